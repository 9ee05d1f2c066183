"""In which form a batch reaches the layers: as it comes, or as one row of documents. Pure, from what its mask says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tunecompile.notes import Note, note

PADDED, PACKED = "padding-kept", "packing-kept"  #: codes of notes


@dataclass(frozen=True)
class MaskFacts:
    """What is known of a batch's mask, and of who reads the batch."""

    understood: bool  #: whether it says where documents are, and nothing else
    interrupted: bool = False  #: whether padding stands between tokens of a row
    padded: bool = False  #: whether there is padding
    labelled: bool = False  #: whether a label at padding would be read by a loss
    #: whether it says nothing that layers do not know without it, or would not read from it: whole rows, of bools
    needless: bool = False
    narrows: bool = False  #: whether a kernel with its window computes fewer pairs
    joins: bool = False  #: whether rows without padding run by the graph of padded ones
    shares: bool = False  #: whether rows begin alike, and are computed as branches
    keeps: Note | None = None  #: why nothing at padding may be left out: what the call, or its loss, is like
    #: why hidden states have to stay as they are: a look at all modules; whether at heads, too
    seen: Callable[[bool], Note | None] = lambda heads: None


@dataclass(frozen=True)
class Form:
    """How a batch reaches the layers."""

    rows: bool = False  #: whether as one row of documents
    reason: Note | None = None  #: why it keeps its padding, or its mask
    batches: str = PADDED  #: the code of the note that has the reason


def form_of(facts: MaskFacts) -> Form:
    """The form of a batch.

    The padded run computes hidden states at padding; without padding they are zero. So padding is removed only where
    labels show that no loss reads them. A packed batch has no padding, and nothing is dropped.
    """
    if not facts.understood:
        return Form(reason=note("row-interrupted" if facts.interrupted else "masks-not-understood"))
    if facts.needless and not (facts.joins or facts.narrows or facts.shares):
        return Form()
    if not facts.padded:
        reason = facts.seen(False)
        return Form(rows=reason is None, reason=None if facts.needless else reason, batches=PACKED)
    reason = facts.keeps or (note("labels-at-padding") if facts.labelled else facts.seen(True))
    return Form(rows=reason is None, reason=reason)
