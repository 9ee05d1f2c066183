"""What is known of one call of the owner of layers, while it is under way and when it is over."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tunecompile._torch.autograd import in_backward, in_checkpoint
from tunecompile.integrations import loss_caller
from tunecompile.notes import Note
from tunecompile.runtime.unpad.decision import UnpadDecision
from tunecompile.runtime.unpad.flat_batch import FlatBatch
from tunecompile.runtime.unpad.masks.presume import Presumed
from tunecompile.runtime.unpad.masks.recorder import MaskRecorder
from tunecompile.runtime.unpad.prefixes.search import Keys
from tunecompile.runtime.unpad.prefixes.shared import SharedPrefixes


@dataclass
class OwnerCall:
    """The owner's call that is under way."""

    given: dict[str, Any]  #: its arguments by name
    beside: dict[str, Any] | None = None  #: see `given_beside`; None: not known yet
    refused: Note | None = None  #: why nothing is flattened in it
    keeps_padding: Note | None = None  #: why nothing at padding is left out in it
    drops: bool = False  #: whether hidden states at padding were left out
    packs: bool = False  #: whether documents were told apart without a mask
    trains: bool = field(default_factory=torch.is_grad_enabled)  #: whether it has gradients
    rounds: bool = False  #: whether its size may be rounded up
    waited: float = 0  #: see `SizesSeen.waited`, which its layers may change
    sized: bool = False  #: whether that was decided
    rounded: FlatBatch | None = None  #: rows without padding, as documents
    #: whether rows without padding came as documents: their attention is written out, or their lengths change
    whole: bool = False
    joins: bool = False  #: whether rows without padding run by the graph of padded ones, under the mask of these
    decided: bool = False  #: whether a layer was given a mask that could be read
    presumed: list[Presumed] = field(default_factory=list)  #: masks that were not waited for
    ran: int = 0  #: layers that were launched since a mask was presumed
    recorder: MaskRecorder | None = None  #: while its masks are made, and are large
    #: by id: those that layers wrote to, for others to read
    mappings: dict[int, Any] = field(default_factory=dict)
    prefixes: Keys | None = None  #: what its tokens are known by, where common prefixes are looked for
    shared: SharedPrefixes | None = None  #: what layers ran on, where rows share prefixes
    by_rows: FlatBatch | None = None  #: what a mask [B, T] of a layer that has no other said
    #: by id: masks, and what became of them
    masks_in_one_form: dict[Any, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def given_beside(self) -> dict[str, Any]:
        """What the model was given, which it may keep from the owner."""
        if self.beside is None:
            self.beside = loss_caller.given_beside()
        return self.beside

    def let_go(self) -> None:
        """It is over: what was decided of its masks lives on."""
        self.given, self.beside, self.mappings, self.masks_in_one_form = {}, {}, {}, {}
        self.prefixes = self.shared = None

    def is_repeated(self) -> bool:
        """Whether a checkpoint of the user's repeats the layer that runs, which would have to know. (A re-entrant one
        runs it without gradients.)
        """
        return in_backward() or in_checkpoint() or torch.is_grad_enabled() is not self.trains


@dataclass(frozen=True)
class PastCall:
    """A call that may have to be made again, with its padding."""

    args: tuple
    kwargs: dict
    memory: weakref.ref  #: the tensor whose memory the hidden states that it returned are in
    place: tuple  #: where in it, and their shape
    batch: FlatBatch  #: what it ran on

    @staticmethod
    def of(args: tuple, kwargs: dict, output: Any, batch: FlatBatch) -> PastCall | None:
        """None where it returned no hidden states."""
        hidden = hidden_of(output)
        # Callers drop what they were returned, and go on with views, which hold the tensor it is a view of, if any.
        if hidden is None:
            return None
        base = hidden if hidden._base is None else hidden._base
        return PastCall(args, kwargs, weakref.ref(base), _place_of(hidden), batch)

    def returned(self, hidden: Tensor) -> bool:
        """Whether it returned these hidden states: the same tensor, or all of it as a view."""
        return self.memory() is not None and _place_of(hidden) == self.place

    def with_padding(self, hidden: Tensor, again: Tensor | None) -> Tensor | None:
        """Its hidden states [B, T, H], where they are of real tokens, with those at padding of a repetition.

        So a loss that was computed of them is of the same ones, whatever dropout drew since.
        """
        if again is None:
            return None
        real = torch.ones(1, len(self.batch.index), 1, dtype=torch.bool, device=hidden.device)
        return torch.where(self.batch.unflatten(real), hidden, again)


def _place_of(value: Tensor) -> tuple:
    return value.data_ptr(), value.shape


@dataclass(frozen=True)
class MaskDecision:
    """What was decided of a mask, in a call of the owner."""

    call: OwnerCall | None
    version: int
    decision: UnpadDecision


def hidden_of(output: Any) -> Tensor | None:
    """The last hidden states of a model's output."""
    found = getattr(output, "last_hidden_state", output[0] if isinstance(output, (tuple, list)) and output else output)
    return found if isinstance(found, Tensor) else None
