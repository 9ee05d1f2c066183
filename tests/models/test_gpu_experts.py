"""Experts on a real GPU: grouped products of every shape of load, and models with adapters over their experts."""

import copy

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.models.gpu import against_fp32, median
from tests.support.notes import EAGER, find
from tests.support.ops.checks import error
from tests.support.ops.experts import exact, leaves, operands, wide
from tunecompile.ops import gathered_lora_linear, gathered_lora_linear_backward, grouped_lora_linear, sum_rows

pytestmark = pytest.mark.gpu
#: a token goes to every expert: where it goes to some, roundings decide where, and errors of other runs say little
WIDTHS = {
    "num_experts_per_tok": 4,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "vocab_size": 4099,
}
#: gpt-oss has windows in every other layer: one kind of layer is compiled here, as in the other families
ALIKE = {"gpt_oss": {"layer_types": ["full_attention"] * WIDTHS["num_hidden_layers"]}}


def build(family):
    return zoo.make(family, **WIDTHS, **ALIKE.get(family, {})).to("cuda", torch.bfloat16)


def on_gpu(args):
    x, weight, ends, a, b, scales, transposed, bias = args
    last = None if bias is None else bias.cuda()
    return x.cuda(), weight.cuda(), ends.cuda(), [m.cuda() for m in a], [m.cuda() for m in b], scales, transposed, last


@pytest.mark.parametrize("loads", [(130, 0, 3, 77), (0, 0, 300, 0), (1, 1, 1, 1), (64, 64, 64, 64), (0, 0, 0, 0)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("ranks", [(), (5,), (16, 8)])
@pytest.mark.parametrize("provider", ["grouped_mm", "triton"])
def test_products(loads, transposed, ranks, provider):
    shape = dict(offsets=torch.int32, width=128, columns=64, biased=len(ranks) < 2)
    args = on_gpu(operands(loads, 9, ranks, transposed, torch.bfloat16, **shape))
    x, total = args[0], sum(loads)
    x[total:] = float("nan")
    clean = (x.nan_to_num(0.0), *args[1:])
    poison = torch.full((1 << 24,), float("nan"), device="cuda")
    del poison  # what a product leaves unwritten is not a number
    forward, backward = (
        next(p for p in op.providers if p.name == provider).run
        for op in (grouped_lora_linear, grouped_lora_linear.backward_op)
    )
    y, xa = forward(*args)
    grad = torch.randn_like(y)
    grad[total:] = float("nan")
    got = backward(grad, *args, xa, used=(True,) * (3 + 2 * len(ranks)))
    theirs = wide(clean)
    wanted = exact(*theirs)
    want = torch.autograd.grad(wanted, leaves(theirs), grad.nan_to_num(0.0).double())
    for mine, true in zip((y, *got), (wanted.detach(), *want)):
        assert mine.isfinite().all() and error(mine, true) < 1.2e-2
    assert y[total:].eq(0).all() and got[0][total:].eq(0).all()
    assert all(got[1][e].eq(0).all() for e, load in enumerate(loads) if not load)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ranks", [(), (5,), (40, 33)])
@pytest.mark.parametrize("which", ["both", "grad", "x"])
def test_rows_read_in_place(ranks, which, dtype):
    torch.manual_seed(0)
    shape = dict(offsets=torch.int32, width=136, columns=72, biased=len(ranks) == 1)
    args = on_gpu(operands((130, 0, 3, 77), 6, ranks, False, dtype, **shape))
    rows, rest, choices = len(args[0]), args[1:], 4
    order = torch.randperm(rows, device="cuda")
    tokens, grads = (torch.randn(rows // choices, n, device="cuda", dtype=dtype) for n in (136, 72))
    y, xa = op_provider(gathered_lora_linear)(tokens, *rest, order, choices)
    wanted = gathered_lora_linear.reference(*wide((tokens, *rest)), order, choices)
    x, grad = tokens[order // choices], grads[order // choices]
    true = exact(*wide((x, *rest)))
    assert error(y, true.detach()) < 8e-3 and (not ranks or error(xa, wanted[1]) < 8e-3)
    (given, *grad_read), (read_of, *read) = [
        (grads, order, choices) if which != "x" else (grad, None, 0),
        (tokens, order, choices) if which != "grad" else (x, None, 0),
    ]
    used = (True, dtype == torch.bfloat16) + (True,) * (1 + 2 * len(ranks))
    got = op_provider(gathered_lora_linear_backward)(given, read_of, *rest, xa, *grad_read, *read, used=used)
    theirs = wide((x, *rest))
    want = torch.autograd.grad(exact(*theirs), leaves(theirs), grad.double())
    for mine, right, asked in zip(got, want, used):
        assert (mine is None) != asked
        assert not asked or (mine.isfinite().all() and error(mine, right) < 1.2e-2)


@pytest.mark.parametrize("width", [24, 64, 128, 192, 320])
@pytest.mark.parametrize("columns, rank", [(24, 32), (64, 16), (64, 32), (136, 64)])
def test_few_turns(width, columns, rank):
    """A product over fewer steps than its pipeline has stages."""
    args = on_gpu(operands((130, 0, 3, 77), 6, (rank,), False, torch.bfloat16, width=width, columns=columns))
    y, _ = op_provider(grouped_lora_linear)(*args)
    assert error(y, exact(*wide(args)).detach()) < 8e-3


def op_provider(op):
    return next(p for p in op.providers if p.name == "triton").run


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float32])
def test_sums_of_rows(cast):
    y, places = torch.randn(4 * 50, 136, device="cuda").bfloat16(), torch.randperm(200, device="cuda")
    made = op_provider(sum_rows)(y, places, 4, cast)
    assert torch.equal(made, sum_rows.reference(y, places, 4, cast))


def judge(model):
    """Optimize a model, and compare steps of several shapes with eager ones; the errors are those against fp32."""
    eager, reference = copy.deepcopy(model), zoo.in_fp32(model)
    tunecompile.optimize(model)
    shapes = ((2, 256), (3, 201))  # each expert's rows: a multiple of 16 bytes stored transposed, and not
    batches = [zoo.batch(4099, *shape, "cuda", seed=seed) for seed, shape in enumerate(4 * shapes)]
    # a bias of keys adds about the same to all scores of a row: its gradient is mostly rounding
    theirs, ours = against_fp32(reference, (eager, model), batches, lambda name: not name.endswith("k_proj.bias"))
    assert median(ours.values()) <= 1.05 * median(theirs.values())
    floor = torch.finfo(torch.bfloat16).eps
    worst = max(ours, key=lambda name: ours[name] / max(theirs[name], floor))
    assert ours[worst] <= 1.3 * max(theirs[worst], floor), (worst, ours[worst], theirs[worst])
    assert not find(model, *EAGER), tunecompile.report(model)
    return str(tunecompile.report(model))


def the_same_bits_again(model):
    """Sums over rows are in a fixed order."""
    inputs = zoo.batch(4099, 2, 256, "cuda")
    first = zoo.step(model, inputs)
    for _ in range(14):  # some of them replayed, if the host is slow
        loss, gradients = zoo.step(model, inputs)
        assert torch.equal(loss, first[0])
        assert all(torch.equal(g, first[1][name]) for name, g in gradients.items() if "experts" in name)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "mixtral"])
def test_adapted_experts_are_no_further_from_fp32_than_eager(family):
    model = zoo.adapt(
        build(family),
        r=6,
        target_modules=["q_proj", "v_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    report = judge(model)
    assert "grouped_lora_linear: triton" in report, report
    if family == "qwen3_moe":
        the_same_bits_again(model)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_all_weights_are_no_further_from_fp32_than_eager(family):
    """torch's product for a gradient of weights asserts where generated code stores its operands transposed."""
    report = judge(build(family))
    assert "grouped_lora_linear_backward: " in report, report
