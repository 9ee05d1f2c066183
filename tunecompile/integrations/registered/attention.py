"""Attention by the name `tunecompile`, as transformers' models call it.

Without sinks and soft-caps it is transformers' call of torch's function. With them it is one op, which keeps no scores,
where whole rows see all that stands before them. Under a mask it is written out as models write it; in layers that are
optimized, masks of padding, documents and windows become the op all the same (`passes.recognize.document_attention`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from tunecompile.errors import UnknownAttention
from tunecompile.integrations.context_parallel import is_shared
from tunecompile.ir.eager_call import by_provider
from tunecompile.ops import varlen_attention

CHOSEN = ("indices", "block_indices")  #: keys that a model has chosen for each query, which no mask says


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of one layer.

    Args:
        module: the layer's attention, which may say that it is not causal.
        query: [B, H, Q, D].
        key: [B, K, N, D], where K divides H.
        value: as key, perhaps of another width.
        attention_mask: [B, 1, Q, N], of bools or to be added; None where rows are whole.
        dropout: share of weights that are dropped.
        scaling: of scores; None for 1 / sqrt(D).
        is_causal: None asks the module.
        s_aux: [H], sinks, as most models call them.
        sinks: the same, as others do.
        softcap: of scores.
        position_bias: added to scores.
        more: what models pass to every implementation.

    Returns:
        ([B, Q, H, width of values], None or the weights).

    Raises:
        UnknownAttention: something was given that would have been left out.
    """
    if given := next((name for name in CHOSEN if more.get(name) is not None), None):
        raise UnknownAttention(kind=type(module).__name__, given=given)
    sinks = s_aux if sinks is None else sinks
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    rows, keys = query.shape[2], key.shape[2]
    if attention_mask is None and causal and 1 < rows < keys and more.get("cache") is None:
        attention_mask = _lower(rows, keys, query.device)
    if sinks is None and not softcap:
        if position_bias is not None:
            more["position_bias"] = position_bias
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **more
        )
    shared = not torch.compiler.is_compiling() and is_shared()  # where it is, attention is called outside of graphs
    if shared or more.get("cache") is not None:
        what = "context parallelism" if shared else "a paged cache"
        raise UnknownAttention(kind=type(module).__name__, given=f"{what} beside sinks or soft-caps")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    plain = attention_mask is None and position_bias is None and not dropout and rows == keys
    if plain and value.shape[-1] == query.shape[-1]:
        return _by_op(query, key, value, scale, sinks, causal, softcap), None
    if attention_mask is None and causal and rows > 1:
        attention_mask = _lower(rows, keys, query.device)
    biases = [each for each in (position_bias, attention_mask) if each is not None]
    return _written_out(query, key, value, biases, scale, sinks, softcap, dropout if module.training else 0.0)


def _lower(rows: int, keys: int, device: torch.device) -> Tensor:
    """The mask of queries that are the last of the keys."""
    return torch.ones(rows, keys, dtype=torch.bool, device=device).tril(keys - rows)[None, None]


def _by_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    sinks: Tensor | None,
    causal: bool,
    softcap: float | None,
) -> Tensor:
    """Each row is a document."""
    rows, heads, length, width = query.shape
    offsets = torch.arange(rows + 1, dtype=torch.int32, device=query.device) * length
    q, k, v = (x.transpose(1, 2).reshape(rows * length, x.shape[1], width) for x in (query, key, value))
    made = by_provider(varlen_attention, q, k, v, offsets, length, scale, 0, sinks, causal, float(softcap or 0))[0]
    return made.view(rows, length, heads, width)


def _written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    biases: list[Tensor],
    scale: float,
    sinks: Tensor | None,
    softcap: float | None,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """As models write it, and passes recognise it."""
    key, value = (repeat_kv(x, query.shape[1] // x.shape[1]) for x in (key, value))
    scores = torch.matmul(query, key.transpose(2, 3)) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    for bias in biases:
        if bias.dtype == torch.bool:
            least = max(torch.finfo(scores.dtype).min, torch.finfo(torch.float32).min)
            bias = torch.where(bias, 0.0, least).to(scores.dtype)
        scores = scores + bias
    if sinks is not None:
        column = sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(query.shape[0], -1, query.shape[2], -1)
        scores = torch.cat([scores, column], dim=-1)
        scores = scores - scores.max(dim=-1, keepdim=True).values
    weights = F.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    weights = (weights if sinks is None else weights[..., :-1]).to(query.dtype)
    weights = F.dropout(weights, p=dropout, training=dropout > 0)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights
