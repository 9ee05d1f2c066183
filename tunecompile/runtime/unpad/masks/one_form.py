"""Masks of batches with padding and without come in one form, so that one graph serves both."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tunecompile.runtime.unpad.masks.given import is_mask
from tunecompile.runtime.unpad.owner_call import OwnerCall

WRITTEN_OUT = 1 << 26  #: bytes of the largest mask that is


def in_one_form(call: OwnerCall | None, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """A layer's arguments, with masks that are no views, and written out for each row, once for all layers of a call.

    Dynamo guards strides, and of a view those of what it is a view of. Masks of batches with padding have rows.
    """
    others = [(at, value) for at, value in (*enumerate(args), *kwargs.items()) if is_mask(value) and value._is_view()]
    if not others:
        return args, kwargs
    known = {} if call is None else call.masks_in_one_form
    made = {at: _in_one_form(value, known) for at, value in others}
    named = kwargs | {at: value for at, value in made.items() if isinstance(at, str)}
    return tuple(made.get(at, value) for at, value in enumerate(args)), named


def _in_one_form(mask: Tensor, known: dict[Any, tuple[Tensor, Tensor]]) -> Tensor:
    key = id(mask), mask._version  # which counts what is written to what it is a view of
    if key not in known:
        of_one_row = mask.shape[0] > 1 and mask.stride(0) == 0 and mask.numel() <= WRITTEN_OUT
        known[key] = mask, mask.contiguous() if of_one_row else mask.detach()
    return known[key][1]
