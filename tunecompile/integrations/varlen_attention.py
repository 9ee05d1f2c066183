"""Attention without padding, as transformers' attention interface calls it: what it needs, and what it refuses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tunecompile.ir.op import HALF
from tunecompile.notes import Note, note
from tunecompile.ops import varlen_attention

INTERFACE = "tunecompile_varlen"  #: our name among the attention functions of transformers


OFFSETS = "packed_offsets"  #: int32 [B + 2]: where each row's tokens begin; the last sequence is the rounding up of N
LONGEST = "packed_longest"  #: a tensor [L, 0], read for its size alone: an int would cause recompilations


_varlen = varlen_attention.overload


class CannotFlatten(Exception):
    """The layers cannot run without padding. Dynamo traces where it is raised: it takes a note's parts.

    Args:
        args: code, subject and detail of the reason, as for `note`.
    """

    @property
    def reason(self) -> Note:
        """Why."""
        return note(*self.args)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as layers call it through transformers' interface. query: [1, H, N, D], key and value: [1, K, N, D];
    returns [1, N, H, D].

    Raises:
        CannotFlatten: the offsets are missing, or this is not plain causal attention. Raised while the layer is traced.
    """
    offsets, longest = kwargs.get(OFFSETS), kwargs.get(LONGEST)
    if reason := _why_not(module, query, value, attention_mask, dropout, is_causal, kwargs):
        raise CannotFlatten(*reason)
    if torch.is_autocast_enabled(query.device.type):  # as it would cast for torch's own attention
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if query.is_cuda and (query.dtype not in HALF or query.shape[-1] % 8 or query.shape[-1] > 256):
        raise CannotFlatten("no-unpadded-kernel")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    out, _ = _varlen(
        *(x[0].transpose(0, 1) for x in (query, key, value)), offsets, longest.shape[0], scale, sliding_window or 0
    )
    return out[None], None


def _why_not(
    module: nn.Module,
    query: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    is_causal: bool | None,
    kwargs: dict,
) -> tuple[str, ...]:
    """Code, subject and detail of the reason; empty where there is none."""
    if kwargs.get(OFFSETS) is None or kwargs.get(LONGEST) is None:
        return ("attention-without-offsets",)
    if mask is not None:
        return ("own-mask",)
    if dropout:
        return ("attention-dropout",)
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        return ("not-causal",)
    if value.shape[-1] != query.shape[-1]:
        return ("value-width",)
    for name, given in kwargs.items():  # soft-caps, sinks, biases
        if name == "softcap" and given is not None:
            return ("soft-capped",)
        if isinstance(given, Tensor) and given.dim() and name not in (OFFSETS, LONGEST, "position_ids"):
            return "attention-argument", "", name
    return ()


def attends(gm: torch.fx.GraphModule) -> bool:
    """Whether a graph, or the body of one of its operators, holds our attention."""
    return any(
        node.target is _varlen
        for module in gm.modules()
        if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes
    )
