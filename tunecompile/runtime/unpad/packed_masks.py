"""Packed batches: several sequences in one row, whose positions tell where each begins.

Whether a model keeps them apart depends on its code, on the version of transformers and on whether a cache is made
(with one, transformers lets them see each other; our training steps make none). So the model is probed: in one call
with a few tokens its layers are replaced by functions that record the masks which reach them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tunecompile._torch.modules import call_original, fill, slot_of

SEQUENCE = 3  #: tokens of each of the two sequences of the probe


def beginnings(positions: Tensor, shape: torch.Size) -> Tensor:
    """Where sequences begin, bool [B, T]: at a row's first token, and wherever positions do not increase by one, as in
    transformers.

    Args:
        positions: [B, T] or [1, T], of any integer dtype.
        shape: (B, T).
    """
    return F.pad(positions.diff() != 1, (1, 0), value=True).expand(shape)


def tokens_of(given: dict[str, Any]) -> Any:
    """Token ids, or embeddings, among the arguments of an owner of layers."""
    return given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")


def seeing_all(given: dict[str, Any], tokens: Tensor) -> dict[str, Any]:
    """With a mask of ones, beside which transformers ignores positions: every token also sees the sequences before its
    own.
    """
    return {**given, "attention_mask": torch.ones(tokens.shape[:2], dtype=torch.int64, device=tokens.device)}


def keeps_apart(owner: nn.Module, layers: Sequence[nn.Module], given: dict[str, Any], tokens: Tensor) -> bool | None:
    """Whether every layer would get a mask under which a token sees its own sequence alone, as far back as a window
    reaches. False where every token would also see the sequences before its own; None where the masks are not
    understood.

    Args:
        owner: of the layers; its forward makes the masks.
        layers: all of them. None is run.
        given: the owner's arguments.
        tokens: ids or embeddings, [B, T, ...]; the first one is used for all.
    """
    few = tokens[:1, :1].detach().expand(1, 2 * SEQUENCE, *tokens.shape[2:])
    name = "input_ids" if given.get("input_ids") is not None else "inputs_embeds"
    positions = torch.arange(SEQUENCE, device=tokens.device).repeat(2)[None]
    masks: list[Tensor | None] = []
    before = [slot_of(layer) for layer in layers]
    for layer in layers:
        fill(layer, _reads_mask(masks))
    try:
        with torch.no_grad(), torch.random.fork_rng([tokens.device] if tokens.is_cuda else []):
            call_original(owner, **{**given, name: few, "position_ids": positions})
    except Exception:  # its layers may return more than hidden states, say
        return None
    finally:
        for layer, slot in zip(layers, before):
            fill(layer, slot)
    found = {_apart(mask) for mask in masks}
    return found.pop() if len(masks) >= len(layers) and len(found) == 1 else None


def _reads_mask(masks: list[Tensor | None]) -> Callable:
    """A stand-in for a layer that records its mask and passes hidden states on."""

    def layer(*args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        masks.append(next((value for value in tensors if value.shape[-2:] == (2 * SEQUENCE, 2 * SEQUENCE)), None))
        return args[0] if args else kwargs["hidden_states"]

    return layer


def _apart(mask: Tensor | None) -> bool | None:
    place = torch.arange(2 * SEQUENCE)
    back = place[:, None] - place
    if mask is None:
        return False
    visible = (mask if mask.dtype is torch.bool else mask == 0).flatten(0, -3).cpu()
    for apart, allowed in ((True, place[:, None] // SEQUENCE == place // SEQUENCE), (False, True)):
        if any(
            bool((visible == ((back >= 0) & (back < window) & allowed)).all()) for window in range(2, 2 * SEQUENCE + 1)
        ):
            return apart
    return None
