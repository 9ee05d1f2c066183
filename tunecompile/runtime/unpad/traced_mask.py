"""The mask of a row of documents as an operation of a layer's graph, in the place of the one that the model made."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tunecompile.ops import document_mask
from tunecompile.runtime.unpad.documents import width_of
from tunecompile.runtime.unpad.flat_batch import ADDED, LONGEST, MASKS, OFFSETS, PLACES, ROW_OFFSETS, ROWS, TREE, WINDOW

_OURS = (OFFSETS, LONGEST, WINDOW, MASKS, ADDED, TREE, PLACES, ROW_OFFSETS, *ROWS)


def with_document_mask(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """A layer's arguments, with the mask as an operation of its graph. Dynamo traces this.

    Args:
        args, kwargs: as `FlatBatch.enter` returns them, or of any other call.
    """
    if OFFSETS not in kwargs:
        return args, kwargs
    places, named = kwargs[MASKS], {name: value for name, value in kwargs.items() if name not in _OURS}
    if not places:
        return args, named
    hidden = _first_tensor(*args, *kwargs.values())
    longest = kwargs[LONGEST].shape[0]
    window = int(kwargs[WINDOW])
    tree = kwargs.get(TREE), kwargs.get(PLACES)
    mask = document_mask(kwargs[OFFSETS], longest, hidden.shape[1], width_of(window), window >= 0, *tree)
    if kwargs[ADDED]:
        dtype = getattr(torch, kwargs[ADDED])
        mask = torch.where(mask, 0.0, torch.finfo(dtype).min).to(dtype)
    named = {name: mask if name in places else value for name, value in named.items()}
    return tuple(mask if place in places else value for place, value in enumerate(args)), named


def _first_tensor(*values: Any) -> Tensor:
    """The hidden states. Dynamo guards each value that is looked at: none behind them, such as a collator's numbers."""
    at = 0
    while not isinstance(values[at], Tensor):
        at += 1
    return values[at]
