"""Rotary embedding against fp64 autograd, in the layouts attention layers have."""

import pytest
import torch

pytest.importorskip("triton")
from tunecompile.templates import rope  # noqa: E402

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def rotate(x, cos, sin):
    """Transformers' formula in fp64, [B, H, T, D]; dimensions past cos' are kept."""
    cos, sin = (t.double().unsqueeze(-3) for t in (cos, sin))
    rot = cos.shape[-1]
    head, rest = x.double()[..., :rot], x.double()[..., rot:]
    x1, x2 = head.chunk(2, -1)
    return torch.cat([head * cos + torch.cat([-x2, x1], -1) * sin, rest], -1)


def gradient(grad, cos, sin):
    x = torch.zeros_like(grad, dtype=torch.float64, requires_grad=True)
    return torch.autograd.grad(rotate(x, cos, sin), x, grad.double())[0]


def tables(batch, length, rot, device, dtype, seed=5):
    """Both halves of sin differ, as no model's do: the kernel must not rely on it."""
    angle = torch.rand(batch, length, rot, generator=torch.Generator().manual_seed(seed)).mul(6)
    return angle.cos().to(device, dtype), angle.sin().to(device, dtype)


def projection(batch, length, hq, hk, hv, d, device, dtype, seed=0):
    """A fused q|k|v buffer and its three [B, H, T, D] views."""
    buffer = torch.randn(batch, length, (hq + hk + hv) * d, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
    return buffer, [p.transpose(1, 2) for p in buffer.unflatten(-1, (-1, d)).split((hq, hk, hv), 2)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch,length,hq,hk,d,rot", [(1, 1, 1, 1, 2, 2), (2, 3, 9, 3, 64, 64), (1, 2, 17, 2, 96, 48), (2, 2, 2, 1, 80, 20)])
def test_forward_and_backward(device, error, bound, dtype, batch, length, hq, hk, d, rot):
    _, (q, k, v) = projection(batch, length, hq, hk, hk, d, device, dtype)
    cos, sin = tables(batch, length, rot, device, dtype)
    for got, x in zip(rope.forward(q, k, cos, sin), (q, k)):
        assert error(got, rotate(x, cos, sin)) < bound(dtype)
    for got, x in zip(rope.backward(q, k, cos, sin), (q, k)):
        assert error(got, gradient(x, cos, sin)) < bound(dtype)
    fused = rope.backward(q, k, cos, sin, dv=v)
    parts = [p.transpose(1, 2) for p in fused.unflatten(-1, (-1, d)).split((hq, hk, hk), 2)]
    assert error(parts[0], gradient(q, cos, sin)) < bound(dtype) and error(parts[1], gradient(k, cos, sin)) < bound(dtype)
    assert torch.equal(parts[2], v)


def test_tables_without_a_batch_contiguous_heads_and_mixed_dtypes(device, error, bound):
    q, k = (torch.randn(2, h, 3, 16, generator=torch.Generator().manual_seed(h)).to(device, torch.bfloat16) for h in (4, 2))
    cos, sin = (t[0] for t in tables(1, 3, 16, device, torch.float32))
    for got, x in zip(rope.forward(q, k, cos, sin), (q, k)):
        assert error(got, rotate(x, cos, sin)) < bound(torch.bfloat16)
    for got, x in zip(rope.forward(q, k, cos[None], sin[None]), (q, k)):
        assert error(got, rotate(x, cos, sin)) < bound(torch.bfloat16)


def test_inputs_are_kept_and_the_direction_is_right(device):
    buffer, (q, k, _) = projection(1, 2, 1, 1, 1, 4, device, torch.float32)
    before = buffer.clone()
    zero, one = torch.zeros(2, 4, device=device), torch.ones(2, 4, device=device)  # a quarter turn: (x1, x2) -> (-x2, x1)
    turned, _ = rope.forward(q, k, zero, one)
    back, _ = rope.backward(turned, k, zero, one)
    assert torch.equal(turned, torch.cat([-q[..., 2:], q[..., :2]], -1)) and torch.equal(back, q)
    assert torch.equal(buffer, before)


@pytest.mark.gpu
@pytest.mark.parametrize("hq,hk,d,rot", [(32, 8, 128, 128), (9, 3, 64, 64), (16, 8, 256, 256), (32, 32, 96, 72)])
def test_real_size(gpu_only, device, error, bound, hq, hk, d, rot):
    dtype = torch.bfloat16
    _, (q, k, v) = projection(4, 2048, hq, hk, hk, d, device, dtype)
    cos, sin = tables(1, 2048, rot, device, dtype)
    for got, x in zip(rope.forward(q, k, cos, sin), (q, k)):
        assert error(got, rotate(x, cos, sin)) < bound(dtype)
    fused = rope.backward(q, k, cos, sin, dv=v).unflatten(-1, (-1, d))
    assert error(fused[:, :, :hq].transpose(1, 2), gradient(q, cos, sin)) < bound(dtype)
    assert torch.equal(fused[:, :, hq + hk:].transpose(1, 2), v)
