"""RMSNorm: the formula, its gradient, and the two roundings."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tests.support.ops.checks import DTYPES, LAYOUTS, QUICK, assert_fake_is_real, error, tensor
from tunecompile.ops import add_rms_norm, rms_norm

AXES = pytest.mark.parametrize("offset, round_first", [(0.0, False), (0.0, True), (1.0, False), (1.0, True)])


@AXES
@pytest.mark.parametrize("shape", [(2, 3, 8), (5, 7), (1, 1), (8,)])
def test_gradcheck(shape, offset, round_first):
    x, w = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True),
        torch.randn(shape[-1], dtype=torch.float64, requires_grad=True),
    )
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-3, offset, round_first), (x, w))


def test_is_torchs_own_in_fp64():
    x, w = torch.randn(4, 8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    torch.testing.assert_close(rms_norm(x, w, 1e-6, 0.0, False), F.rms_norm(x, (8,), w, 1e-6), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(
        rms_norm(x, w, 1e-6, 1.0, False), F.rms_norm(x, (8,), 1 + w, 1e-6), rtol=1e-13, atol=1e-13
    )


def llama(x, w, eps):
    wide = x.to(torch.float32)
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def gemma(x, w, eps):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * (1.0 + w.float())).type_as(x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("model, offset, round_first", [(llama, 0.0, True), (gemma, 1.0, False)])
def test_bits_of_the_models_own_formula(model, offset, round_first, dtype):
    x, w = tensor((3, 5, 64), dtype=dtype), tensor((64,), dtype=dtype)
    got = rms_norm(x, w, 1e-6, offset, round_first)
    assert got.dtype == model(x, w, 1e-6).dtype
    assert torch.equal(got, model(x, w, 1e-6))


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_result_dtype_with_a_weight_of_another_dtype(weight_dtype):
    x, w = tensor((3, 8), dtype=torch.bfloat16), tensor((8,), dtype=weight_dtype)
    assert rms_norm(x, w, 1e-6, 0.0, True).dtype == llama(x, w, 1e-6).dtype
    assert rms_norm(x, w, 1e-6, 0.0, False).dtype == torch.bfloat16


@given(
    rows=st.integers(0, 5),
    columns=st.sampled_from([1, 3, 8, 33]),
    dtype=DTYPES,
    layout=LAYOUTS,
    offset=st.sampled_from([0.0, 1.0]),
    first=st.booleans(),
)
@QUICK
def test_any_shape_dtype_and_stride(rows, columns, dtype, layout, offset, first):
    torch.manual_seed(0)
    x, w, grad = (
        tensor((2, rows, columns), layout, dtype),
        tensor((columns,), dtype=dtype),
        tensor((2, rows, columns), layout, dtype),
    )
    assert_fake_is_real(rms_norm, x, w, 1e-5, offset, first)
    assert_fake_is_real(rms_norm.backward_op, grad, x, w, 1e-5, offset, first)
    x64, w64 = x.double().requires_grad_(), w.double().requires_grad_()
    exact = F.rms_norm(x64, (columns,), offset + w64, 1e-5)
    wanted = torch.autograd.grad(exact, (x64, w64), grad.double())
    x, w = x.detach().requires_grad_(), w.requires_grad_()
    got = rms_norm(x, w, 1e-5, offset, first)
    gradients = torch.autograd.grad(got, (x, w), grad)
    eps = torch.finfo(dtype).eps
    assert rows == 0 or error(got, exact) < 2 * eps
    if rows and columns > 1:  # one column: x / |x| has a gradient of almost nothing
        assert error(gradients[0], wanted[0]) < 4 * eps and error(gradients[1], wanted[1]) < 4 * eps
    assert all(g.dtype == v.dtype and g.shape == v.shape for g, v in zip(gradients, (x, w)))


def test_opcheck():
    x, w = torch.randn(2, 4, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    torch.library.opcheck(rms_norm.overload, (x, w, 1e-6, 1.0, False))


def test_an_expanded_gradient():
    x, w = torch.randn(2, 4, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    rms_norm(x, w, 1e-6, 0.0, True).sum().backward()
    y = F.rms_norm(x2 := x.detach().requires_grad_(), (8,), w2 := w.detach().requires_grad_(), 1e-6)
    y.sum().backward()
    torch.testing.assert_close((x.grad, w.grad), (x2.grad, w2.grad))


def test_ambient_autocast_changes_nothing():
    x, w = torch.randn(4, 8), torch.randn(8)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(rms_norm(x, w, 1e-6, 0.0, True), llama(x, w, 1e-6))


def test_extreme_values():
    x = torch.tensor([[6e4, -6e4, 1.0, 0.0]], dtype=torch.float16)
    got = rms_norm(x, torch.ones(4, dtype=torch.float16), 1e-6, 0.0, True)
    assert torch.isfinite(got).all() and error(got, F.rms_norm(x.double(), (4,), None, 1e-6)) < 1e-3
    zeros = torch.zeros(2, 4, requires_grad=True)
    rms_norm(zeros, torch.ones(4), 1e-6, 0.0, True).sum().backward()
    assert torch.isfinite(zeros.grad).all()


@pytest.mark.filterwarnings("ignore")
def test_a_second_derivative_is_refused_and_never_silently_wrong():
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8)
    (first,) = torch.autograd.grad(rms_norm(x, w, 1e-6, 0.0, False).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(first.sum(), x)


@AXES
def test_add_gradcheck(offset, round_first):
    x, r, w = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((3, 5), (3, 5), (5,)))
    assert torch.autograd.gradcheck(lambda x, r, w: add_rms_norm(x, r, w, 1e-3, offset, round_first), (x, r, w))
    assert torch.autograd.gradcheck(lambda x, w: add_rms_norm(x, x, w, 1e-3, offset, round_first), (x, w))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("read", ["both", "norm", "total"])
def test_add_is_the_add_and_the_norm(dtype, read):
    made = []
    for fused in (True, False):
        torch.manual_seed(0)
        x, r, w = (tensor(s, dtype=dtype).requires_grad_() for s in ((4, 7, 16), (4, 7, 16), (16,)))
        total = x + r
        normed, total = (
            add_rms_norm(x, r, w, 1e-6, 1.0, False) if fused else (rms_norm(total, w, 1e-6, 1.0, False), total)
        )
        loss = (normed * 0.5 if read != "total" else 0) + (total * 3 if read != "norm" else 0)
        loss.sum().backward()
        made.append((normed.detach(), total.detach(), x.grad, r.grad, *([w.grad] if read != "total" else [])))
    for i, (got, expected) in enumerate(zip(*made)):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected) if i < 2 else error(got, expected) < torch.finfo(dtype).eps


@given(
    rows=st.integers(0, 3),
    columns=st.sampled_from([1, 3, 32]),
    dtype=DTYPES,
    first=LAYOUTS,
    second=LAYOUTS,
    round_first=st.booleans(),
)
@QUICK
def test_add_fakes(rows, columns, dtype, first, second, round_first):
    x, r, w = (
        tensor((2, rows, columns), first, dtype),
        tensor((2, rows, columns), second, dtype),
        tensor((columns,), dtype=dtype),
    )
    assert_fake_is_real(add_rms_norm, x, r, w, 1e-5, 0.0, round_first)
    assert_fake_is_real(
        add_rms_norm.backward_op,
        tensor((2, rows, columns), second, dtype),
        tensor((2, rows, columns), first, dtype),
        x + r,
        w,
        1e-5,
        0.0,
        round_first,
    )


def test_add_opcheck():
    torch.library.opcheck(
        add_rms_norm.overload,
        (
            torch.randn(2, 8, requires_grad=True),
            torch.randn(2, 8, requires_grad=True),
            torch.randn(8, requires_grad=True),
            1e-6,
            0.0,
            True,
        ),
    )
