"""Batches without padding run by the graph of padded ones where theirs is of other sizes, under masks that leave
nothing out.

A model gives its layers no mask where a batch has no padding: another graph, and once lengths change, another again.
That one is not compiled where `compiler.attention_calls.neutral_masks` shows that it computes what the one with masks
does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tunecompile._torch.autograd import in_checkpoint
from tunecompile.compiler.attention_calls.neutral_masks import NeutralMask
from tunecompile.notes import Note, note
from tunecompile.runtime.unpad.masks.given import hidden_in, is_mask
from tunecompile.runtime.unpad.owner_call import OwnerCall

#: batches of one owner that were given masks, from which a graph of their own pays: its attention is faster
OFTEN = 256
LARGEST = 1 << 30  #: bytes of a mask that is given
WRITTEN_OUT = 1 << 26  #: bytes of the largest mask that is


class NeutralMasks:
    """Gives them to the layers of one owner."""

    def __init__(self, owner: nn.Module) -> None:
        self.owner = owner
        self.batches = 0  #: that were given any
        self.refused = False  #: whether a layer's arguments have no place for one, or it would be too large

    def may_be_given(self, call: OwnerCall | None, scores: bool) -> bool:
        """Whether layers of this call may be: not where a checkpoint of the user's repeats them later.

        call: None where padding stays in any case, in a forward that `scores`: its kernels are to be those of training.
        """
        return scores and not in_checkpoint() if call is None else not call.is_repeated()

    def give(
        self, call: OwnerCall | None, masks: Sequence[tuple[NeutralMask, tuple[int, ...]]], args: tuple, kwargs: dict
    ) -> tuple[tuple, dict] | None:
        """A layer's arguments with these masks, which have the shapes beside them.

        None where graphs without masks are to be compiled from now on.
        """
        hidden = hidden_in(args, kwargs)
        places = [mask.argument for mask, _ in masks]
        given = [args[at] if isinstance(at, int) and at < len(args) else kwargs.get(at) for at in places]
        nowhere = (at >= len(args) if isinstance(at, int) else at not in kwargs for at in places)
        self.refused |= hidden is None or any(nowhere) or any(math.prod(shape) > LARGEST for _, shape in masks)
        if self.refused or self.batches >= OFTEN or any(each is not None for each in given):
            return None
        known = {} if call is None else call.neutral_masks
        made = {mask.argument: _made(mask, shape, hidden.device, known) for mask, shape in masks}
        named = kwargs | {at: value for at, value in made.items() if isinstance(at, str)}
        return tuple(made.get(at, value) for at, value in enumerate(args)), named

    def ran_as(self, call: OwnerCall) -> None:
        """Learn from a call of the owner that is over."""
        self.batches += bool(call.neutral_masks)

    def report(self) -> list[Note]:
        """For the report."""
        return [note("whole-by-padded", type(self.owner).__name__, count=self.batches)] if self.batches else []


def _made(mask: NeutralMask, shape: tuple[int, ...], device: torch.device, known: dict[Any, Tensor]) -> Tensor:
    """The same for all layers of a call."""
    key = mask.causal, mask.expanded, shape, device
    if key not in known:
        narrow = [1 if dim in mask.expanded else size for dim, size in enumerate(shape)]
        made = torch.ones(narrow, dtype=torch.bool, device=device)
        known[key] = (made.tril_() if mask.causal else made).expand(shape).data
    return known[key]


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
        known[key] = mask, mask.contiguous() if of_one_row else mask.data
    return known[key][1]
