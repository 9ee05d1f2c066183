"""Which argument of a layer is its mask, or says what a mask would."""

from __future__ import annotations

import functools
import inspect
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from tunecompile.integrations.kernel_functions import BOUNDARIES, knows_documents
from tunecompile.runtime.unpad.masks.pairs import PairMask


def hidden_in(args: tuple, kwargs: dict) -> Tensor | None:
    """The hidden states that a layer is given: its first tensor."""
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)


def mask_in(args: tuple, kwargs: dict) -> Tensor | None:
    """The only argument that is a mask of all pairs of tokens."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    if not tensors or tensors[0].dim() != 3:
        return None
    rows, length = tensors[0].shape[:2]
    masks = [x for x in tensors if _may_mask(x) and tuple(x.shape) == (rows, 1, length, length)]
    return masks[0] if len(masks) == 1 else None


def padding_in(args: tuple, kwargs: dict) -> Tensor | None:
    """The argument that says which tokens are real, where transformers hands on the caller's mask."""
    hidden, mask = hidden_in(args, kwargs), kwargs.get(MASK)
    if hidden is None or hidden.dim() != 3 or not isinstance(mask, Tensor) or mask.is_floating_point():
        return None
    return mask if mask.shape == hidden.shape[:2] else None


MASK = "attention_mask"  #: an argument's name


def place_of_mask(layer: nn.Module, args: tuple, kwargs: dict) -> str | int | None:
    """Where a layer's call has its mask, or nothing in its place: by name, or by position (GPT-2); None if nowhere."""
    if MASK in kwargs:
        return MASK
    place = _position_of_mask(type(layer))
    return place if place is not None and place < len(args) else None


@functools.cache
def _position_of_mask(kind: type[nn.Module]) -> int | None:
    names = list(inspect.signature(kind.forward).parameters)[1:]
    return names.index(MASK) if MASK in names else None


def bounds_in(layer: nn.Module, args: tuple, kwargs: dict) -> Tensor | None:
    """Bounds of documents that a layer with attention is given without a mask, where its file has scans, too.

    (Of scans they are told: attention has to agree. Granite 4's code makes no mask of positions.)
    """
    bounds = kwargs.get(BOUNDARIES)
    if not isinstance(bounds, Tensor) or bounds.dim() != 1 or MASK not in kwargs or kwargs[MASK] is not None:
        return None
    hidden = hidden_in(args, kwargs)
    if hidden is None or hidden.dim() != 3 or hidden.shape[0] != 1 or not knows_documents(layer):
        return None
    if layer not in _attends:
        _attends[layer] = any(vars(module).get("is_causal") for module in layer.modules())
    return bounds if _attends[layer] else None


_attends: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def is_mask(value: Any) -> bool:
    """Whether it is of bools, for pairs of tokens."""
    return isinstance(value, Tensor) and value.dtype is torch.bool and value.dim() == 4


def _may_mask(x: Tensor) -> bool:
    return x.dtype is torch.bool or (x.is_floating_point() and not x.requires_grad)


def is_given(mask: Tensor, given: dict[str, Any]) -> bool:
    """Whether a mask lies in the memory of one of these arguments."""
    if isinstance(mask, PairMask):
        return False
    storage = mask.untyped_storage().data_ptr()
    return any(isinstance(x, Tensor) and x.untyped_storage().data_ptr() == storage for x in given.values())
