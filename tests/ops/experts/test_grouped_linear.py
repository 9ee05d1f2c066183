"""Linears of experts: value and gradients against fp64, whatever experts the rows went to."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.ops.checks import LAYOUTS, QUICK, assert_fake_is_real, assert_provider_is_exact, error
from tests.support.ops.experts import exact, leaves, narrow, operands, wide
from tunecompile.ops import adapted_stack, grouped_lora_linear
from tunecompile.ops.experts.products import expert_outer, expert_rows

#: rows of each expert: some idle, the first, the last, all of them but one, none at all
LOADS = st.sampled_from([(3, 0, 4), (0, 0, 7), (7, 0, 0), (0, 5, 0), (1, 1, 1), (0, 0, 0), (9,), (2, 3, 1, 0, 0)])


@given(
    loads=LOADS,
    idle=st.sampled_from([0, 3]),
    ranks=st.sampled_from([(), (1,), (3,), (8,), (2, 5)]),
    transposed=st.booleans(),
    layout=LAYOUTS,
    offsets=st.sampled_from([torch.int32, torch.int64]),
    biased=st.booleans(),
)
@QUICK
def test_value_and_gradients(loads, idle, ranks, transposed, layout, offsets, biased):
    torch.manual_seed(0)
    args = operands(loads, idle, ranks, transposed, torch.float64, layout, offsets, biased=biased)
    ours, theirs = narrow(args), wide(args)
    y, wanted = grouped_lora_linear(*ours)[0], exact(*theirs)
    torch.testing.assert_close(y, wanted, rtol=1e-12, atol=1e-12)
    grad = torch.randn_like(y)
    grad[sum(loads) :] = float("nan")  # what comes back for nobody's rows is nobody's
    got = torch.autograd.grad(y, leaves(ours), grad)
    want = torch.autograd.grad(wanted, leaves(theirs), grad.nan_to_num(0.0))
    for g, w in zip(got, want):
        torch.testing.assert_close(g, w, rtol=1e-11, atol=1e-11)
    assert got[0][sum(loads) :].abs().max() == 0 if idle else True
    for e, load in enumerate(loads):
        if not load:
            assert got[1][e].abs().max() == 0 and (not biased or got[-1][e].abs().max() == 0)


@pytest.mark.parametrize("loads", [(8, 0, 3), (0, 0, 11), (1, 9, 1)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("ranks", [(), (5,), (8, 3)])
def test_torchs_products_are_as_exact(loads, transposed, ranks):
    torch.manual_seed(0)
    args = operands(loads, 4, ranks, transposed, torch.bfloat16, offsets=torch.int32, biased=len(ranks) == 1)
    grad = torch.randn(15, 8).bfloat16()
    y, xa = _check(grouped_lora_linear, args)
    reference = grouped_lora_linear(*args)
    assert y.shape == reference[0].shape and y[11:].abs().max() == 0 and xa[11:].eq(0).all()
    assert error(y, exact(*wide(args)).detach()) < 8e-3
    given_ = grad.clone()
    given_[11:] = float("nan")
    run = next(p for p in grouped_lora_linear.backward_op.providers if p.name == "grouped_mm").run
    ours = run(given_, *args, xa, used=(True,) * (3 + 2 * len(ranks)))
    theirs = wide(args)
    want = torch.autograd.grad(exact(*theirs), leaves(theirs), grad.double())
    for g, w in zip(ours, want):
        assert g.isfinite().all() and error(g, w) < 1.2e-2
    assert all(ours[1][e].abs().max() == 0 for e, load in enumerate(loads) if not load)
    assert run(given_, *args, xa, used=(True, False, False))[1] is None, "nobody asked for the frozen weight's"


def _check(op, args):
    return next(p for p in op.providers if p.name == "grouped_mm").run(*args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [(), (3,)])
def test_fakes(dtype, ranks):
    args = operands((2, 0, 3), 1, ranks, False, dtype, biased=bool(ranks))
    assert_fake_is_real(grouped_lora_linear, *args)
    _, xa = grouped_lora_linear(*args)
    assert_fake_is_real(grouped_lora_linear.backward_op, torch.randn(6, 8, dtype=dtype), *args, xa)
    x, weight, ends, *_ = args
    assert_fake_is_real(expert_rows, x, weight.transpose(1, 2), ends)
    assert_fake_is_real(expert_outer, x, x, ends)


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"dtype": torch.float32}, "bfloat16"),
        ({"columns": 12}, "16 bytes"),
        ({"layout": "transposed"}, "contiguous"),
    ],
)
def test_what_torch_cannot_multiply_is_refused(change, reason):
    args = operands((2, 3), 0, (4,), False, **{"dtype": torch.bfloat16, **change})
    assert reason in str(grouped_lora_linear.refusals(args, None)["grouped_mm"])


@given(ranks=st.sampled_from([(1,), (3,), (2, 4)]), transposed=st.booleans(), layout=LAYOUTS)
@QUICK
def test_a_stack_written_out(ranks, transposed, layout):
    torch.manual_seed(0)
    _, weight, ends, a, b, scales, *_ = operands((1, 1, 1), 0, ranks, transposed, torch.float64, layout)
    mine = [t.clone().requires_grad_() for t in (weight, *a, *b)]
    eye = torch.eye(weight.shape[1 if transposed else 2], dtype=torch.float64)

    def stack(weight, *matrices):
        return adapted_stack(weight, matrices[: len(a)], matrices[len(a) :], scales, transposed)

    made = stack(*mine)
    each = [
        exact(
            eye,
            weight[e : e + 1],
            torch.tensor([len(eye)]),
            [_one(m, 3, e) for m in a],
            [_column(m, 3, e) for m in b],
            scales,
            transposed,
        )
        for e in range(3)
    ]
    wanted = torch.stack([m if transposed else m.t() for m in each])
    torch.testing.assert_close(made, wanted, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(stack, mine, fast_mode=True)  # by projections; entry by entry takes seconds
    assert_fake_is_real(adapted_stack, weight, a, b, scales, transposed)
    assert_fake_is_real(adapted_stack.backward_op, torch.randn_like(made).detach(), weight, a, b, scales, transposed)


def _one(m, experts, e):
    return m.reshape(experts, -1, m.shape[1])[e]


def _column(m, experts, e):
    return m.reshape(m.shape[0], -1, experts)[:, :, e]


def test_opcheck():
    args = operands((2, 0, 3), 1, (3,), False, torch.float32, biased=True)
    torch.library.opcheck(grouped_lora_linear.overload, narrow(args))


def test_provider_against_reference():
    args = operands((8, 0, 8), 0, (8,), False, torch.bfloat16)
    assert_provider_is_exact(grouped_lora_linear, "grouped_mm", *args, factor=2.0)


@pytest.mark.slow
def test_inductor_keeps_the_layout_that_products_read():
    """It chose strides for the copy of an adapter of which no row was dense, at sizes like these."""
    experts, width, columns = 128, 256, 512
    x, weight, a = torch.randn(64, width), torch.randn(experts, columns, width) * 0.1, torch.randn(experts * 16, width)
    b, ends = torch.randn(columns, 16 * experts), torch.arange(1, experts + 1).clamp(max=64)
    halves = (x.bfloat16(), weight.bfloat16(), ends, [a], [b], [2.0], False, None)
    forward, backward = (
        next(p for p in op.providers if p.name == "grouped_mm").run
        for op in (grouped_lora_linear, grouped_lora_linear.backward_op)
    )
    y, xa = torch.compile(forward)(*halves)
    assert error(y, exact(*wide(halves)).detach()) < 8e-3
    got = torch.compile(lambda *args: backward(*args, used=(True,) * 5))(torch.randn_like(y), *halves, xa)
    assert all(g.isfinite().all() for g in got)
