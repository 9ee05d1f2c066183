"""Attention of one query over a cache, against torch's in fp64."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
from tunecompile.templates.attention import one_query  # noqa: E402


def case(device, rows, heads, shared, length, width, dtype):
    g = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(rows, n, tokens, width, generator=g).to(device, dtype)
        for n, tokens in ((heads * shared, 1), (heads, length), (heads, length))
    )
    mask = torch.rand(rows, 1, 1, length, generator=g) > 0.3
    mask[..., 2 * length // 3 :] = False  # what is not filled yet: whole parts see nothing
    mask[:, :, :, 0] = True
    return q, k, v, mask.to(device)


@pytest.mark.parametrize(
    ("rows", "heads", "shared", "length", "width", "most"),
    [
        *((2, 2, 4, 300, 64, most) for most in (one_query.MOST, 2)),  # a program goes over its part in steps
        (1, 3, 1, 77, 80, 32),
        (3, 1, 7, 640, 128, 32),
        (2, 2, 2, 5, 16, 32),
        (1, 1, 20, 130, 256, 32),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_as_torchs(device, rows, heads, shared, length, width, most, dtype, monkeypatch):
    monkeypatch.setattr(one_query, "MOST", most)
    q, k, v, mask = case(device, rows, heads, shared, length, width, dtype)
    wide = [x.double() for x in (q, *(x.repeat_interleave(shared, 1) for x in (k, v)))]
    right = F.scaled_dot_product_attention(*wide, attn_mask=mask, scale=0.2)
    found = one_query.forward(q, k, v, mask, 0.2)
    assert found.shape == q.shape and found.dtype == dtype
    assert (found.double() - right).norm() / right.norm() < (5e-3 if dtype == torch.bfloat16 else 1e-3)


def test_strided_operands_and_one_mask_for_all_rows(device):
    q, k, v, mask = case(device, 2, 2, 2, 70, 64, torch.float32)
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    wide = q, *(x.repeat_interleave(2, 1) for x in (k, v))
    right = F.scaled_dot_product_attention(*wide, attn_mask=mask[:1], scale=0.2)
    torch.testing.assert_close(one_query.forward(q, k, v, mask[:1], 0.2), right, atol=1e-3, rtol=1e-3)
