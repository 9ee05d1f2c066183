"""The backward of RMS norm against fp64 autograd, in the three spellings of the model families."""

import pytest
import torch

pytest.importorskip("triton")
from tunecompile.templates import norms  # noqa: E402
from tunecompile.templates._tiles import Tile  # noqa: E402

FAMILIES = {
    "llama": dict(offset=0.0, round_first=True),
    "gemma": dict(offset=1.0),
    "olmo2": dict(offset=0.0),
}
DTYPES = (torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow), torch.float32)


def backward(grad, x, weight, eps, sums=1, **options):
    return norms.backward(grad, x, weight, eps, centred=False, sums=sums, **options)


def reference(x, weight, eps, offset, grad):
    """dx, dweight in fp64; roundings inside are left out."""
    s, w = x.double().requires_grad_(), weight.double().requires_grad_()
    y = s * torch.rsqrt(s.pow(2).mean(-1, keepdim=True) + eps) * (w + offset)
    return torch.autograd.grad(y, (s, w), grad.double())


def make(shape, device, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("residual", (False, True), ids=("plain", "residual"))
def test_against_fp64(device, error, bound, dtype, family, residual):
    x, weight, grad = (
        make((2, 3, 576), device, dtype) * 3,
        make((576,), device, dtype, 1),
        make((2, 3, 576), device, dtype, 2),
    )
    other = make((2, 3, 576), device, dtype, 3) if residual else None
    options = FAMILIES[family]
    dx, dw = reference(x, weight, 1e-3, options["offset"], grad)
    dx = dx if other is None else dx + other.double()
    got_dx, got_dw = backward(grad, x, weight, 1e-3, residual_grad=other, **options)
    assert error(got_dx, dx) < bound(dtype) and error(got_dw, dw) < bound(dtype) and got_dw.dtype == torch.float32
    (alone,) = backward(grad, x, weight, 1e-3, sums=0, residual_grad=other, **options)
    assert torch.equal(alone, got_dx)


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (3, 1), (5, 7), (1, 130), (2, 1025), (37, 64), (2, 2, 3, 96)])
def test_odd_shapes(device, error, shape):
    x, weight, grad = (
        make(shape, device, torch.float32),
        make(shape[-1:], device, torch.float32, 1),
        make(shape, device, torch.float32, 2),
    )
    dx, dw = reference(x, weight, 1e-5, 1.0, grad)
    got_dx, got_dw = backward(grad, x, weight, 1e-5, **FAMILIES["gemma"])
    # Rows of one element: dx is a difference of equal numbers, so the error is measured against its terms.
    assert (got_dx - dx).norm() < 2e-6 * (dx.norm() + grad.norm()) and error(got_dw, dw) < 2e-6


@pytest.mark.parametrize("transposed", (False, True), ids=("BTHD", "BHTD"))
def test_strided_heads_of_a_fused_projection(device, error, transposed):
    """q's norm reads its columns of the q|k|v buffer, in either order of the head and time dimensions."""
    b, t, heads, d = 2, 5, 3, 32
    qkv, weight = make((b, t, 5 * d), device, torch.float32), make((d,), device, torch.float32, 1)
    x = qkv[..., d : 4 * d].unflatten(-1, (heads, d))
    grad = make((b, heads, t, d), device, torch.float32, 2).transpose(1, 2)
    if transposed:
        x, grad = x.transpose(1, 2), grad.transpose(1, 2)
    assert not x.is_contiguous()
    dx, dw = reference(x, weight, 1e-6, 0.0, grad)
    got_dx, got_dw = backward(grad, x, weight, 1e-6)
    assert error(got_dx, dx) < 2e-6 and error(got_dw, dw) < 2e-6 and got_dx.is_contiguous()


def test_the_value_is_rounded_before_the_scale(device, error, cast):
    """The weight's gradient is a sum over what was scaled."""
    x, grad = make((4, 64), device, torch.bfloat16), make((4, 64), device, torch.bfloat16, 1)
    xhat = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    first, last = ((grad.float() * each.float()).sum(0) for each in (cast(xhat, torch.bfloat16), xhat))
    for options, expected, other in ((FAMILIES["llama"], first, last), (FAMILIES["olmo2"], last, first)):
        got = backward(grad, x, None, 1e-6, **options)[1]
        assert error(got, expected) < 1e-5 < error(got, other)


def test_fp32_weight_on_bf16_and_no_weight(device, error, bound):
    x, weight, grad = (
        make((3, 40), device, torch.bfloat16),
        make((40,), device, torch.float32, 1),
        make((3, 40), device, torch.float32, 2),
    )
    for given, used in ((weight, weight), (None, torch.ones(40, device=device))):
        dx = reference(x, used, 1e-6, 0.0, grad)[0]
        assert error(backward(grad, x, given, 1e-6)[0], dx) < bound(torch.bfloat16)


def test_more_rows_than_programs(device, error):
    """The weight gradient's programs each loop over rows."""
    x, weight, grad = (
        make((70, 33), device, torch.float32),
        make((33,), device, torch.float32, 1),
        make((70, 33), device, torch.float32, 2),
    )
    dx, dw = reference(x, weight, 1e-6, 0.0, grad)
    got_dx, got_dw = backward(grad, x, weight, 1e-6, tile=Tile(0, rows=2, num_warps=32))
    assert error(got_dx, dx) < 2e-6 and error(got_dw, dw) < 2e-6


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8192, 4096), (4096, 8192), (1000, 576), (64, 28672), (4, 512, 32, 128)])
@pytest.mark.parametrize("family", FAMILIES)
def test_real_size(gpu_only, device, error, bound, family, shape):
    dtype, options = torch.bfloat16, FAMILIES[family]
    x, weight, grad = make(shape, device, dtype), make(shape[-1:], device, dtype, 1), make(shape, device, dtype, 2)
    dx, dw = reference(x, weight, 1e-6, options["offset"], grad)
    got_dx, got_dw = backward(grad, x, weight, 1e-6, **options)
    assert error(got_dx, dx) < bound(dtype) and error(got_dw, dw) < bound(dtype)
