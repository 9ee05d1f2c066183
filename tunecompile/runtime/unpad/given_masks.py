"""Which argument of a layer is its mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tunecompile.runtime.unpad.pair_masks import PairMask


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
    hidden = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
    mask = kwargs.get("attention_mask")
    if hidden is None or hidden.dim() != 3 or not isinstance(mask, Tensor) or mask.is_floating_point():
        return None
    return mask if mask.shape == hidden.shape[:2] else None


def _may_mask(x: Tensor) -> bool:
    return x.dtype is torch.bool or (x.is_floating_point() and not x.requires_grad)


def is_given(mask: Tensor, given: dict[str, Any]) -> bool:
    """Whether a mask lies in the memory of one of these arguments."""
    if isinstance(mask, PairMask):
        return False
    storage = mask.untyped_storage().data_ptr()
    return any(isinstance(x, Tensor) and x.untyped_storage().data_ptr() == storage for x in given.values())
