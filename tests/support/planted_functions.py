"""What ops stand for, in plain torch, as `tests.support.planted` compares them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tunecompile.ops import dropout_attention

SEED = torch.tensor([5])


def norm(x, weight):
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.1))


def gemma_norm(x, weight):
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide)
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 0.1) * (1.0 + weight.to(wide))).to(x.dtype)


def residual_norm(x, residual, weight):
    total = x + residual
    return norm(total, weight), total


def layer_norm(x, weight, bias):
    return F.layer_norm(x, x.shape[-1:], weight, bias, 0.1)


def modulated_norm(x, scale, shift):
    return F.layer_norm(x, x.shape[-1:], None, None, 0.1) * (1 + scale[:, None]) + shift[:, None]


def residual_modulated_norm(x, residual, scale, shift):
    total = x + residual
    return modulated_norm(total, scale, shift), total


def residual_layer_norm(x, residual, weight, bias):
    total = x + residual
    return layer_norm(total, weight, bias), total


def rotated(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def rotated_in_pairs(x, cos, sin):
    return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin


def adapted(x, weight, a, b, bias=None):
    return F.linear(x, weight, bias) + F.linear(F.linear(x, a), b) * 0.5


def by_lora(op, x, weight, a, b, bias=None):
    return op(x, [], [weight], [] if bias is None else [bias], [a], [b], [0.5], x.dtype, "dense")[0]


def head(x, weight, labels, scale=1.0, softcap=0.0, smoothing=0.0):
    logits = F.linear(x, weight) * scale if scale != 1.0 else F.linear(x, weight)
    logits = torch.tanh(logits / softcap) * softcap if softcap else logits
    return F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing) * 0.37


def attention(q, k, v, window, sinks=None, causal=True, softcap=0.0):
    parts = []
    for rows in (slice(0, 3), slice(3, 8)):
        places = torch.arange(rows.stop - rows.start)
        distance = places[:, None] - places
        mask = ((distance >= 0) | (not causal)) & (distance < (window or 99))
        if sinks is not None:  # one key more, of which the score is the sink, and the value nothing
            parts.append(_beside_sinks(q[rows], k[rows], v[rows], mask, sinks))
            continue
        shared = [x[rows].repeat_interleave(2, 1).transpose(0, 1) for x in (k, v)]
        if softcap:
            scores = torch.tanh(q[rows].transpose(0, 1) @ shared[0].mT * 0.7 / softcap) * softcap
            parts.append((scores.masked_fill(~mask, float("-inf")).softmax(-1) @ shared[1]).transpose(0, 1))
            continue
        parts.append(
            F.scaled_dot_product_attention(q[rows].transpose(0, 1), *shared, attn_mask=mask, scale=0.7).transpose(0, 1)
        )
    return torch.cat(parts)


def _beside_sinks(q, k, v, mask, sinks):
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = (torch.einsum("qhd,khd->hqk", q, k) * 0.7).masked_fill(~mask, float("-inf"))
    weights = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], -1).softmax(-1)[..., :-1]
    return torch.einsum("hqk,khd->qhd", weights, v)


def quantised(rows: int = 6, columns: int = 128) -> torch.nn.Module:
    """A layer of bitsandbytes."""
    bnb = pytest.importorskip("bitsandbytes")
    torch.manual_seed(5)
    made = bnb.nn.Linear4bit(
        columns, rows, bias=False, compute_dtype=torch.float32, compress_statistics=True, quant_type="nf4"
    )
    made.weight = bnb.nn.Params4bit(
        torch.randn(rows, columns), requires_grad=False, compress_statistics=True, quant_type="nf4"
    )
    return made.to("cpu").train()


def by_bitsandbytes(x, layer):
    from bitsandbytes.functional import dequantize_4bit

    return F.linear(x, dequantize_4bit(layer.weight.data, layer.weight.quant_state).to(x.dtype))


def dequantised(op, x, layer):
    weight, state = layer.weight.data, layer.weight.quant_state
    return F.linear(
        x,
        op(
            weight,
            state.absmax,
            state.state2.code,
            state.state2.absmax,
            state.offset,
            *state.shape,
            64,
            "nf4",
            torch.float32,
        ).to(x.dtype),
    )


def by_factors(q, k, v, dropout):
    """Attention of one sequence, with the factors of weights from what the op gives for values of the identity."""
    still, eye = torch.zeros_like(q[..., :1]).expand(-1, -1, 5), torch.eye(5, dtype=q.dtype)[:, None].expand(-1, 2, -1)
    given = torch.tensor([0, 5], dtype=torch.int32), 5, 1.0, 0, False, dropout, SEED
    factors = dropout_attention(still, still[:, :2], eye, *given)[0].detach().transpose(0, 1) * 5
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    weights = (torch.einsum("qhd,khd->hqk", q, k) * 0.7).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights * factors, v)


def one_query(q, k, v, sinks, mask):
    """Attention over a cache, as transformers writes it: soft-capped scores, a mask that is added, sinks."""
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = torch.tanh(torch.matmul(q, k.transpose(2, 3)) * 0.7 / 1.5) * 1.5 + mask
    scores = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)], dim=-1)
    return torch.matmul(F.softmax(scores, dim=-1)[..., :-1], v)
