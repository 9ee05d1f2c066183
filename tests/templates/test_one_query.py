"""Attention of one query over a cache, against torch's in fp64."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
from tunecompile.ops.attention.causal import one_query_attention  # noqa: E402
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


@pytest.mark.parametrize("added", [False, True])
def test_sinks_soft_capped_scores_and_masks_that_are_added(device, added):
    q, k, v, mask = case(device, 2, 2, 4, 300, 64, torch.float32)
    sinks = torch.linspace(-2, 4, 8).to(device)
    bias = torch.randn(mask.shape, generator=torch.Generator().manual_seed(1)).to(device)
    given = torch.where(mask, bias, torch.finfo(torch.bfloat16).min) if added else mask
    scores = q.double() @ k.double().repeat_interleave(4, 1).mT * 0.5
    scores = (3 * torch.tanh(scores / 3) + bias * added).masked_fill(~mask, -torch.inf)
    weights = torch.cat([scores, sinks.double().view(1, -1, 1, 1).expand(2, -1, 1, 1)], -1).softmax(-1)[..., :-1]
    found = one_query.forward(q, k, v, given, 0.5, sinks, 3.0)
    torch.testing.assert_close(found.double(), weights @ v.double().repeat_interleave(4, 1), atol=1e-3, rtol=1e-3)


def test_strided_operands_and_one_mask_for_all_rows(device):
    q, k, v, mask = case(device, 2, 2, 2, 70, 64, torch.float32)
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    wide = q, *(x.repeat_interleave(2, 1) for x in (k, v))
    right = F.scaled_dot_product_attention(*wide, attn_mask=mask[:1], scale=0.2)
    torch.testing.assert_close(one_query.forward(q, k, v, mask[:1], 0.2), right, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("hidden", [torch.finfo(torch.bfloat16).min, -1e30, None])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_query_that_sees_no_key(device, hidden, sinks):
    """As in eager code: beside a sum like this a score vanishes. torch's attention gives 0 for a mask of bools."""
    q, k, v, mask = case(device, 2, 1, 8, 150, 16, torch.float32)
    mask[1] = False
    given = mask if hidden is None else torch.where(mask, 0.0, hidden)
    column = torch.linspace(-2, 4, 8).to(device) if sinks else None
    found = one_query.forward(q, k, v, given, 0.2, column)
    right = one_query_attention.reference(q, k, v, given, 0.2, column, 0.0)
    assert not found.isnan().any() and found[1].any() == (hidden is not None and not sinks)
    torch.testing.assert_close(found, right, atol=1e-3, rtol=1e-3)
