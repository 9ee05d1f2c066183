"""SwiGLU, GeGLU and the clamped gate: value, slope, extremes."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tests.support.ops.checks import DTYPES, LAYOUTS, QUICK, assert_fake_is_real, error, tensor
from tunecompile.ops import clamped_gate, gated_activation, weighted_gate

FORMULAS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}
EACH = pytest.mark.parametrize("activation", FORMULAS)


@EACH
@pytest.mark.parametrize("shape", [(2, 3, 4), (1,), (1, 1), ()])
def test_gradcheck_and_value(activation, shape):
    gate, up = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda g, u: gated_activation(g, u, activation), (gate, up))
    torch.testing.assert_close(
        gated_activation(gate, up, activation), FORMULAS[activation](gate) * up, rtol=1e-14, atol=0
    )
    exact = torch.autograd.grad((FORMULAS[activation](gate) * up).sum(), (gate, up))
    torch.testing.assert_close(
        torch.autograd.grad(gated_activation(gate, up, activation).sum(), (gate, up)), exact, rtol=1e-12, atol=1e-13
    )


@given(
    rows=st.integers(0, 4),
    columns=st.sampled_from([1, 5, 32]),
    dtype=DTYPES,
    gates=LAYOUTS,
    ups=LAYOUTS,
    activation=st.sampled_from(list(FORMULAS)),
)
@QUICK
def test_any_shape_dtype_and_stride(rows, columns, dtype, gates, ups, activation):
    torch.manual_seed(0)
    gate, up, grad = (
        tensor((3, rows, columns), gates, dtype),
        tensor((3, rows, columns), ups, dtype),
        tensor((3, rows, columns), ups, dtype),
    )
    assert_fake_is_real(gated_activation, gate, up, activation)
    assert_fake_is_real(gated_activation.backward_op, grad, gate, up, activation)
    g64, u64 = gate.double().requires_grad_(), up.double().requires_grad_()
    exact = FORMULAS[activation](g64) * u64
    wanted = torch.autograd.grad(exact, (g64, u64), grad.double())
    g, u = gate.detach().requires_grad_(), up.detach().requires_grad_()
    got = gated_activation(g, u, activation)
    ours = torch.autograd.grad(got, (g, u), grad)
    assert got.dtype == dtype and all(o.dtype == dtype and o.shape == g.shape for o in ours)
    if rows:
        eps = torch.finfo(dtype).eps
        assert error(got, exact) < 2 * eps and all(error(o, w) < 2 * eps for o, w in zip(ours, wanted))


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_far_tails_are_finite(activation, dtype):
    values = torch.tensor([-6e4, -1e3, -88.0, -20.0, 0.0, 20.0, 88.0, 1e3, 6e4], dtype=dtype)
    gate, up = values.clone().requires_grad_(), torch.ones_like(values).requires_grad_()
    gated_activation(gate, up, activation).backward(torch.ones_like(values))
    g64 = values.double().requires_grad_()
    FORMULAS[activation](g64).sum().backward()
    torch.testing.assert_close(gate.grad.double(), g64.grad, rtol=4e-3, atol=1e-3)
    assert torch.isfinite(up.grad).all()


@EACH
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_a_weighted_gate(activation, rows):
    gate, up = (torch.randn(rows, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weights = torch.randn(rows, 1, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *given: weighted_gate(*given, activation), (gate, up, weights))
    exact = FORMULAS[activation](gate) * up * weights
    torch.testing.assert_close(weighted_gate(gate, up, weights, activation), exact, rtol=1e-14, atol=0)


@EACH
@pytest.mark.parametrize("of_weights", [torch.bfloat16, torch.float32])
def test_a_weighted_gate_is_rounded_once(activation, of_weights):
    torch.manual_seed(0)
    both = torch.randn(9, 64, dtype=torch.bfloat16)
    given = [*both.chunk(2, 1), torch.rand(9, 1, dtype=of_weights)]
    grad = torch.randn(9, 32, dtype=torch.bfloat16)
    assert_fake_is_real(weighted_gate, *given, activation)
    assert_fake_is_real(weighted_gate.backward_op, grad, *given, activation)
    wide = [each.double().requires_grad_() for each in given]
    exact = FORMULAS[activation](wide[0]) * wide[1] * wide[2]
    wanted = torch.autograd.grad(exact, wide, grad.double())
    got = weighted_gate(*given, activation), *weighted_gate.backward_op(grad, *given, activation)
    for mine, true, like in zip(got, (exact, *wanted), (given[0], *given)):
        assert mine.dtype == like.dtype and error(mine, true) < 2 * torch.finfo(mine.dtype).eps


@EACH
def test_gate_and_up_of_two_dtypes(activation):
    gate, up = torch.randn(4, 8, dtype=torch.bfloat16), torch.randn(4, 8)
    assert gated_activation(gate, up, activation).dtype == torch.float32
    assert_fake_is_real(gated_activation, gate, up, activation)
    grads = gated_activation.backward_op(torch.ones(4, 8), gate, up, activation)
    assert [g.dtype for g in grads] == [torch.bfloat16, torch.float32]


def test_one_tensor_as_both():
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: gated_activation(x, x, "silu"), (x,))


def test_opcheck():
    torch.library.opcheck(
        gated_activation.overload,
        (torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True), "gelu_tanh"),
    )


def written_out(both, alpha, limit):
    """As transformers has it for gpt-oss."""
    gate, up = both[..., ::2].clamp(max=limit), both[..., 1::2].clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


@given(rows=st.integers(0, 4), columns=st.sampled_from([1, 5, 32]), dtype=DTYPES, layout=LAYOUTS)
@QUICK
def test_a_clamped_gate_is_the_written_one(rows, columns, dtype, layout):
    torch.manual_seed(0)
    both = tensor((rows, 2 * columns), layout, dtype)
    assert_fake_is_real(clamped_gate, both, 1.7, 1.0)
    exact = both.detach().double().requires_grad_()
    expected = written_out(exact, 1.7, 1.0)
    grad = torch.randn(expected.shape, dtype=torch.float64).to(dtype)
    (d_exact,) = torch.autograd.grad(expected, exact, grad.double())
    (d_both,) = clamped_gate.backward_op(grad, both, 1.7, 1.0)
    assert error(clamped_gate(both, 1.7, 1.0), expected) < 2 * torch.finfo(dtype).eps
    assert error(d_both, d_exact) < 2 * torch.finfo(dtype).eps and d_both.dtype == dtype


def test_a_clamped_gate_beyond_its_limit():
    """At the limit a gradient passes if it does in torch's clamp (before 2.14); beyond it, and of what is no number, none does."""
    values = torch.tensor([-8.0, -7.0, -1.0, 0.0, 7.0, 8.0, 6e4, float("nan")], dtype=torch.float64)
    both = torch.stack([values.repeat(8), values.repeat_interleave(8)], -1).flatten().requires_grad_()
    expected = written_out(both, 1.702, 7.0)
    torch.testing.assert_close(clamped_gate(both, 1.702, 7.0), expected, rtol=1e-14, atol=0, equal_nan=True)
    ones = torch.ones_like(expected)
    found = torch.autograd.grad(clamped_gate(both, 1.702, 7.0), both, ones)
    torch.testing.assert_close(found, torch.autograd.grad(expected, both, ones), rtol=1e-13, atol=1e-13, equal_nan=True)
    inside = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda both: clamped_gate(both, 1.702, 7.0), (inside,))
    torch.library.opcheck(clamped_gate.overload, (torch.randn(3, 8, requires_grad=True), 1.702, 7.0))
