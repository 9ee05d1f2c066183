"""Attention, its masks and experts by the name `tunecompile`, as transformers' models call them.

Attention: without sinks and soft-caps it is transformers' call of torch's function. With them it is one op, which keeps
no scores, where whole rows see all that stands before them. Under a mask it is written out as models write it; in
layers that are optimized, masks of padding, documents and windows become the op all the same
(`passes.recognize.document_attention`).

Masks are as for torch's function, or to be added to scores: transformers makes them by the function of this name for
every model, also for one whose code has attention of its own and adds the mask to its scores. A mask of bools would be
added as ones and zeros there.

Experts are products grouped by expert. While Dynamo traces, that is transformers' own code for grouped products, which
passes recognise with whatever adapters, packed weights and biases it reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import grouped_mm_experts_forward
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from tunecompile.errors import UnknownAttention
from tunecompile.integrations.context_parallel import is_shared
from tunecompile.ir.eager_call import by_provider
from tunecompile.ops import collect_rows, grouped_lora_linear, inverse_order, spread_rows, varlen_attention

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


_by_name: dict[type, bool] = {}  #: whether models of a class of configs call attention by name


def mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """The mask of one call, with transformers' arguments; None where all rows are plainly causal, or see everything.

    Where there are more keys than queries there always is one, so that queries left out later have the right keys.
    """
    kind = type(kwargs.get("config"))
    if kind not in _by_name:
        models = [each for each in _below(PreTrainedModel) if each.config_class is kind]
        _by_name[kind] = bool(models) and all(each._supports_attention_backend for each in models)
    if not _by_name[kind]:
        return eager_mask(*args, **kwargs)
    queries = kwargs["q_length"] if "q_length" in kwargs else len(kwargs["cache_position"])  # transformers 5.0
    if queries != kwargs["kv_length"]:
        kwargs["allow_is_causal_skip"] = False
    return sdpa_mask(*args, **kwargs)


def _below(kind: type) -> Iterator[type]:
    for each in kind.__subclasses__():
        yield each
        yield from _below(each)


def experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What the experts make of each token, weighted and summed.

    Args:
        self: the module that has their weights.
        hidden_states: [T, H].
        top_k_index: [T, k], the experts of each token.
        top_k_weights: [T, k].

    Returns:
        [T, H], in the dtype of `hidden_states`.
    """
    gated = getattr(self, "has_gate", True)  # transformers 5.0 has no others
    first, last = "gate_up_proj" if gated else "up_proj", "down_proj"
    stacks = {} if torch.compiler.is_compiling() else {name: getattr(self, name) for name in (first, last)}
    if not stacks or not _is_plain(self, stacks, hidden_states):
        return grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
    choices = top_k_index.shape[-1]
    expert, order = torch.sort(top_k_index.reshape(-1), stable=True)
    places = inverse_order(order)
    ends = torch.searchsorted(expert, torch.arange(self.num_experts, device=expert.device), right=True).int()

    def product(rows: Tensor, name: str) -> Tensor:
        bias = getattr(self, f"{name}_bias") if self.has_bias else None
        return by_provider(grouped_lora_linear, rows, stacks[name], ends, [], [], [], self.is_transposed, bias)[0]

    made = product(spread_rows(hidden_states, order, places, choices), first)
    made = self._apply_gate(made) if gated else self.act_fn(made)
    made = product(made, last) * top_k_weights.reshape(-1)[order].unsqueeze(-1)
    return collect_rows(made, order, places, choices).to(hidden_states.dtype)


def _is_plain(self: Any, stacks: dict[str, Tensor], tokens: Tensor) -> bool:
    """Whether all is as the op has it: all experts are here, in the dtype of the tokens, and no norm follows."""
    if getattr(self, "_is_expert_parallel", False) or getattr(self, "has_post_expert_norm", False):
        return False
    if torch.is_autocast_enabled(tokens.device.type):
        return False
    return all(type(each.data) is Tensor and each.dtype == tokens.dtype for each in stacks.values())
