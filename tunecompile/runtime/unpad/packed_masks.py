"""Packed batches: several sequences in one row, whose positions tell where each begins.

Whether a model keeps them apart depends on its code, on the version of transformers and on whether a cache is made (with one, transformers lets them
see each other; a training step of ours makes none). So the model is asked: its layers are left out for one call with a few tokens, and the masks that
would have reached them are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tunecompile._torch.modules import call_original, fill, slot_of

SEQUENCE = 3  #: tokens of each of the two sequences that the model is asked about


def beginnings(positions: Tensor, shape: torch.Size) -> Tensor:
    """Where sequences begin, bool [B, T]: at a row's first token, and wherever positions do not go on by one, as transformers has it.

    Args:
        positions: [B, T] or [1, T], of any integer dtype.
        shape: (B, T).
    """
    return F.pad(positions.diff() != 1, (1, 0), value=True).expand(shape)


def tokens_of(given: dict[str, Any]) -> Any:
    """Ids, or embeddings, among what an owner of layers is called with."""
    return given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")


def seeing_all(given: dict[str, Any], tokens: Tensor) -> dict[str, Any]:
    """With a mask of ones, beside which transformers does not look at positions: every token sees the sequences before its own, too."""
    return {**given, "attention_mask": torch.ones(tokens.shape[:2], dtype=torch.int64, device=tokens.device)}


def keeps_apart(owner: nn.Module, layers: Sequence[nn.Module], given: dict[str, Any], tokens: Tensor) -> bool | None:
    """Whether every layer would get a mask under which a token sees its own sequence alone, as far back as a window reaches; False where every
    token would see the sequences before its own, too; None where nobody knows.

    Args:
        owner: of the layers; its forward makes the masks.
        layers: all of them. None is run.
        given: what the owner is called with.
        tokens: ids or embeddings, [B, T, ...]; the first one stands for all.
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
    except Exception:  # its layers return something else than hidden states, say
        return None
    finally:
        for layer, slot in zip(layers, before):
            fill(layer, slot)
    found = {_apart(mask) for mask in masks}
    return found.pop() if len(masks) >= len(layers) and len(found) == 1 else None


def _reads_mask(masks: list[Tensor | None]) -> Callable:
    """In place of a layer: its mask is kept, and hidden states go on as they are."""

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
