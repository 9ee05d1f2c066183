"""The joined backward of a gated MLP with LoRA, against the same sums in fp64."""

import pytest
import torch

pytest.importorskip("triton")
from tests.support.ops.templates import REFERENCE, make, reference
from tunecompile.templates import lora_mlp  # noqa: E402
from tunecompile.templates._tiles import Tile  # noqa: E402


def inputs(rows, columns, ranks, device, dtype):
    shapes = [(rows, columns), (rows, 2 * columns), (rows, ranks[0]), (rows, sum(ranks[1:]))]
    return [make(shape, device, dtype, seed) for seed, shape in enumerate(shapes)]


def check(rows, columns, ranks, device, dtype, activation, error, bound, extra=0, tile=None):
    grad, gate_up, down, xa = inputs(rows, columns, ranks, device, dtype)
    both, d_bg, d_bu, d_a = lora_mlp.backward(
        grad, gate_up, down, xa, ranks[1:], activation, width=2 * columns + extra, tile=tile
    )
    gate, up = gate_up.split(columns, 1)
    exact = torch.cat(reference(gate, up, activation, grad), 1)
    assert both.shape == (rows, 2 * columns + extra) and both.dtype == dtype
    assert error(both[:, : 2 * columns], exact) < bound(dtype)
    dg, du = (part.double() for part in both[:, : 2 * columns].split(columns, 1))  # what is summed is what is stored
    xg, xu = xa.double().split(ranks[1:], 1) if len(ranks) == 3 else [xa.double()] * 2
    assert error(d_bg, xg.t() @ dg) < 1e-5 and error(d_bu, xu.t() @ du) < 1e-5
    a = REFERENCE[activation](gate.double()) * up.double()
    assert error(d_a, down.double().t() @ a) < bound(dtype)  # `a` is rounded before it is summed


@pytest.mark.parametrize("activation", REFERENCE)
@pytest.mark.parametrize(
    "dtype", (torch.float16,) + ((torch.bfloat16,) if torch.cuda.is_available() else ())
)  # the interpreter has no bf16 dot
@pytest.mark.parametrize(
    "rows, columns, ranks", [(1, 8, (1, 2, 3)), (70, 96, (16, 16, 16)), (33, 40, (4, 24, 8)), (33, 40, (4, 24))]
)
def test_against_fp64(device, error, bound, rows, columns, ranks, dtype, activation):
    check(
        rows,
        columns,
        ranks,
        device,
        dtype,
        activation,
        error,
        bound,
        extra=sum(ranks[1:]),
        tile=Tile(32, rows=48, num_warps=4, step=16),
    )


def test_strides_that_do_not_fit(device):
    arguments = inputs(4, 8, (2, 2, 2), device, torch.float16)
    with pytest.raises(ValueError, match="unit column stride"):
        lora_mlp.backward(arguments[0].t().contiguous().t(), *arguments[1:], (2, 2))
    with pytest.raises(ValueError, match="do not fit"):
        lora_mlp.backward(arguments[0], arguments[1][:, :8], *arguments[2:], (2, 2))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "rows, columns, ranks", [(8192, 14336, (16, 16, 16)), (1000, 8192, (64, 32, 8)), (2048, 1536, (16, 16, 16))]
)
def test_real_size(gpu_only, device, error, bound, rows, columns, ranks):
    check(rows, columns, ranks, device, torch.bfloat16, "silu", error, bound, extra=ranks[1] + ranks[2])


def test_the_gradient_in_place_of_what_it_is_of(device):
    grad, gate_up, down, xa = inputs(70, 96, (16, 16, 16), device, torch.float16)
    expected = lora_mlp.backward(grad, gate_up, down, xa, (16, 16), width=200)
    room = torch.cat([gate_up, gate_up.new_zeros(70, 8)], 1)
    both, *sums = lora_mlp.backward(grad, room[:, :192], down, xa, (16, 16), both=room)
    assert both is room and torch.equal(both[:, :192], expected[0][:, :192]) and not both[:, 192:].any()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(sums, expected[1:]))


def test_the_same_bits_every_time(device):
    arguments = inputs(70, 96, (16, 16, 16), device, torch.float16)
    first, second = (lora_mlp.backward(*arguments, (16, 16)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@pytest.fixture(params=["dense, joint", "packed", "dense, not copied", pytest.param("dense", marks=pytest.mark.slow)])
def arguments(request, device, monkeypatch):
    """Of the op, by kind of weights: fp16, as the interpreter's products want it."""
    from torch.utils._pytree import tree_map

    from tests.support.ops.arguments import APART, JOINT, dense_mlp, packed_mlp
    from tunecompile.ops.frozen_weights import DenseWeights

    if "not copied" in request.param:
        monkeypatch.setattr(DenseWeights, "adds", lambda *_: True)
        monkeypatch.setattr(DenseWeights, "without_copy", lambda weights, tokens: weights.matrices)

    def make(activation, dtype):
        shapes = JOINT if "joint" in request.param else APART
        packed = "packed" in request.param
        made = packed_mlp(True, activation, shapes)[0] if packed else dense_mlp(dtype, activation, shapes=shapes)
        made[0] = made[0].to(dtype)
        return tree_map(lambda v: v.detach().to(device) if isinstance(v, torch.Tensor) else v, made)

    return make


def provided(name, arguments, dying=()):
    """(what a provider gives, the reference's, fp64's) for each output and gradient."""
    from tests.support.ops.checks import wide
    from tunecompile.ops import lora_mlp as op

    forward, backward = (next(p for p in o.providers if p.name == name).run for o in (op, op.backward_op))
    reference, exact = op.reference(*arguments), op.reference(*wide(arguments))
    saved = [
        torch.randn(reference[0].shape, device=reference[0].device).to(reference[0].dtype),
        *arguments,
        *reference[1:],
    ]
    told = {"dying": dying} if dying else {}
    return [
        *zip(forward(*arguments, used=[True] * 4), reference, exact),
        *zip(backward(*saved, **told), op.backward_op.reference(*saved), op.backward_op.reference(*wide(saved))),
    ]


@pytest.mark.parametrize("dying", [(), ("out1",)])
@pytest.mark.parametrize(
    "activation", [pytest.param(name, marks=[pytest.mark.slow] * (name != "silu")) for name in REFERENCE]
)
def test_provider(error, arguments, activation, dying):
    """No further from fp64 than the reference, within a factor."""
    for mine, theirs, best in provided("joined", arguments(activation, torch.float16), dying):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        assert error(mine, best) <= 2 * max(error(theirs, best), torch.finfo(torch.float16).eps / 2)


def test_what_nobody_reads_is_not_computed(arguments):
    from tunecompile.ops import lora_mlp as op

    made = arguments("silu", torch.float16)
    run = next(p for p in op.providers if p.name == "joined").run
    without, whole = run(*made, used=[False, True, True, False]), run(*made, used=[True] * 4)
    assert without[0] is None and without[3] is None and torch.equal(without[1], whole[1])


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ("fp8", "int8"))
@pytest.mark.parametrize("activation", REFERENCE)
def test_provider_in_8_bits(gpu_only, error, arguments, activation, precision):
    """e4m3 has 4 significant bits: a rounding moves a value by 3 % at most, and a sum of many by less."""
    if precision == "fp8" and torch.cuda.get_device_capability() not in ((9, 0), (10, 0)):
        pytest.skip("no FP8 products scaled by row on this GPU")
    for mine, theirs, best in provided(f"joined_{precision}", arguments(activation, torch.bfloat16)):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype) and error(mine, best) < 0.15, error(mine, best)


def through_pieces(op, arguments, tiles):
    """As `provided`, of the tiled op, against the whole one's reference."""
    from tests.support.ops.checks import wide

    run, backward = (next(p for p in o.providers if p.name == "joined").run for o in (op.tiled, op.tiled.backward_op))
    (theirs, *saved), (best, *exact) = op.reference(*arguments), op.reference(*wide(arguments))
    grad = torch.randn(theirs.shape, device=theirs.device).to(theirs.dtype)
    return [
        (run(*arguments, tiles), theirs, best),
        *zip(
            backward(grad, *arguments, tiles),
            op.backward_op.reference(grad, *arguments, *saved),
            op.backward_op.reference(*wide([grad, *arguments]), *exact),
        ),
    ]


def test_provider_in_pieces(error, arguments):
    from tunecompile.ops import lora_mlp as op

    for mine, theirs, best in through_pieces(op, arguments("silu", torch.float16), 4):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        assert error(mine, best) <= 2 * max(error(theirs, best), torch.finfo(torch.float16).eps / 2)
