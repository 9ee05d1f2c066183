"""The backward of layer norm against fp64 autograd."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
from tunecompile.templates import norms  # noqa: E402
from tunecompile.templates._tiles import Tile  # noqa: E402


def make(shape, device, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def reference(x, weight, grad, eps):
    x, weight = x.double().requires_grad_(), weight.double().requires_grad_()
    bias = torch.zeros_like(weight).requires_grad_()
    return torch.autograd.grad(F.layer_norm(x, weight.shape, weight, bias, eps), (x, weight, bias), grad.double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("residual", (False, True), ids=("plain", "residual"))
def test_against_fp64(device, error, bound, dtype, residual):
    """A mean far from 0: the variance is of what is left without it."""
    x = (make((2, 3, 576), device, torch.float32) * 3 + 20).to(dtype)
    weight, grad = make((576,), device, dtype, 1), make((2, 3, 576), device, dtype, 2)
    other = make((2, 3, 576), device, dtype, 3) if residual else None
    dx, *wanted = reference(x, weight, grad, 1e-3)
    dx = dx if other is None else dx + other.double()
    got = norms.backward(grad, x, weight, 1e-3, residual_grad=other, sums=2)
    assert error(got[0], dx) < bound(dtype)
    assert all(
        error(mine, exact) < bound(dtype) and mine.dtype == torch.float32 for mine, exact in zip(got[1:], wanted)
    )
    assert torch.equal(norms.backward(grad, x, weight, 1e-3, residual_grad=other)[0], got[0])


@pytest.mark.parametrize("shape", [(5, 7), (2, 2, 3, 96)])
def test_odd_shapes_and_strides(device, error, shape):
    x, grad = (make((*shape[:-1], 2 * shape[-1]), device, torch.float32, seed)[..., : shape[-1]] for seed in (0, 2))
    weight = make(shape[-1:], device, torch.float32, 1)
    got = norms.backward(grad, x, weight, 1e-5, sums=2)
    assert all(error(mine, exact) < 2e-6 for mine, exact in zip(got, reference(x, weight, grad, 1e-5)))
    ones = torch.ones_like(weight)
    assert error(norms.backward(grad, x, None, 1e-5)[0], reference(x, ones, grad, 1e-5)[0]) < 2e-6


def test_more_rows_than_programs(device, error):
    x, weight, grad = (make(s, device, torch.float32, i) for i, s in enumerate(((70, 33), (33,), (70, 33))))
    got = norms.backward(grad, x, weight, 1e-6, sums=2, tile=Tile(0, rows=2, num_warps=32))
    assert all(error(mine, exact) < 2e-6 for mine, exact in zip(got, reference(x, weight, grad, 1e-6)))


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("groups", [1, 3])
def test_groups_of_rows_have_weights_of_their_own(device, error, groups, centred):
    """More rows than programs take at a time, and columns that are no multiple of a block."""
    x, grad, other = (make((3, 11, 36), device, torch.float32, seed) for seed in range(3))
    scale, shift = (make((groups, 1, 72), device, torch.float32, 3)[..., i::2][..., :36].contiguous() for i in (0, 1))
    given = [each.double().requires_grad_() for each in (x, scale, shift)]
    norm = F.layer_norm if centred else F.rms_norm
    extra = (None, None) if centred else (None,)
    made = norm(given[0], (36,), *extra, 1e-3) * (1 + given[1]) + given[2]
    dx, *sums = torch.autograd.grad(made, given, grad.double())
    got = norms.backward(
        *(grad, x, scale[:, 0], 1e-3),
        offset=1.0,
        centred=centred,
        residual_grad=other,
        sums=2,
        tile=Tile(0, rows=2, num_warps=32),
    )
    assert error(got[0], dx + other.double()) < 2e-6
    assert all(error(mine, exact[:, 0]) < 2e-6 for mine, exact in zip(got[1:], sums))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8192, 4096), (4096, 8192), (1000, 768), (64, 28672)])
def test_real_size(gpu_only, device, error, bound, shape):
    x, weight, grad = (make(s, device, torch.bfloat16, i) for i, s in enumerate((shape, shape[-1:], shape)))
    got = norms.backward(grad, x, weight, 1e-6, sums=2)
    assert all(error(mine, exact) < bound(torch.bfloat16) for mine, exact in zip(got, reference(x, weight, grad, 1e-6)))
