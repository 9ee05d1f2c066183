"""Whether a batch reaches the layers without its padding: one value for each mask, read where the first layer is given
it, and decided by a pure function of what it says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tunecompile._torch.autograd import in_checkpoint
from tunecompile._torch.card import AMPERE, older_than
from tunecompile.integrations import context_parallel, loss_caller
from tunecompile.integrations.registered.names import NAME
from tunecompile.ir.op import HALF
from tunecompile.notes import Note, note
from tunecompile.runtime.unpad.documents import MaskReading, read_mask, read_offsets, read_padding, width_of
from tunecompile.runtime.unpad.flat_batch import FlatBatch
from tunecompile.runtime.unpad.masks.given import MASK
from tunecompile.runtime.unpad.masks.pairs import PairMask
from tunecompile.runtime.unpad.prefixes.search import Keys
from tunecompile.runtime.unpad.refusals import OwnerWatch

PADDED, PACKED = "padding-kept", "packing-kept"  #: codes of notes


@dataclass(frozen=True)
class UnpadDecision:
    """What happens to one batch."""

    flat: FlatBatch | None = None  #: the batch as a row of documents
    reason: Note | None = None  #: why it keeps its padding, or its mask
    batches: str = PADDED  #: the code of the note that has the reason


AS_IT_COMES = UnpadDecision()


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


def decide_by(facts: MaskFacts, row: Callable[[], FlatBatch]) -> UnpadDecision:
    """What happens to a batch, which `row` makes one row of documents.

    The padded run computes hidden states at padding; without padding they are zero. So padding is removed only where
    labels show that no loss reads them. A packed batch has no padding, and nothing is dropped.
    """
    if not facts.understood:
        return UnpadDecision(None, note("row-interrupted" if facts.interrupted else "masks-not-understood"))
    if facts.needless and not (facts.joins or facts.narrows or facts.shares):
        return AS_IT_COMES
    if facts.padded:
        reason = facts.keeps or (note("labels-at-padding") if facts.labelled else facts.seen(True))
    else:
        reason = facts.seen(False)
    if reason is None:
        return UnpadDecision(row())
    return AS_IT_COMES if facts.needless else UnpadDecision(None, reason, PADDED if facts.padded else PACKED)


def decide(
    mask: Tensor,
    windows: tuple[int, ...],
    watch: OwnerWatch,
    refused: Note | None,
    joins: bool = False,
    prefixes: Keys | None = None,
    waited: float = 0,
) -> UnpadDecision:
    """For the mask of a batch.

    Args:
        mask: [B, 1, T, T], of bools or to be added to scores; or [B, T], 0 at padding; or [S + 1], the bounds of a
            row's documents.
        windows: of attention, as the layers' code has them.
        watch: whether anybody else looks at hidden states.
        refused: why no padding may be left out in this call; None where nothing is known.
        joins: whether rows without padding run by the graph of padded ones.
        prefixes: what tokens are known by, where common prefixes are looked for.
        waited: tokens of a row below which launches are waited for, as far as is known.
    """
    labels, unknown, model = loss_caller.causal_labels()
    if labels is not None and labels.shape != (len(mask), mask.shape[-1]):
        labels, unknown = None, note("labels-shape")
    if mask.dim() == 1:
        reading = read_offsets(mask) if windows == (0,) else MaskReading(None)
    else:
        reading = read_padding(mask, labels) if mask.dim() == 2 else read_mask(mask, windows, labels)
    found, shared = reading.documents, None
    if found is not None and prefixes is not None and found.window >= 0:
        shared = prefixes.shared(found.real, found.starts)
    facts = MaskFacts(
        understood=found is not None,
        interrupted=reading.interrupted,
        padded=found is not None and found.count < found.real.numel(),
        labelled=reading.labelled,
        # such attention knows that it is causal, or reads the mask; written out it would be all scores
        needless=reading.full and not mask.is_floating_point() and not isinstance(mask, PairMask),
        narrows=found is not None and narrows(found.window, mask),
        joins=joins,
        shares=shared is not None,
        keeps=refused or unknown,
        seen=lambda heads: watch.reason(model) if heads else watch.reason(),
    )

    def row() -> FlatBatch:
        flat = FlatBatch.of_shared(shared, found.real.shape, found.window) if shared else FlatBatch.of(found, waited)
        flat.fills = MASK if mask.dim() == 1 else ""
        return flat

    return decide_by(facts, row)


def narrows(window: int, mask: Tensor) -> bool:
    """Whether a kernel with a window leaves out pairs that one with a mask [B, 1, T, T] computes.

    A CPU's attention reads masks as fast, and has no windows.
    """
    return mask.is_cuda and 0 < width_of(window) < mask.shape[-1]


def refused_now(owner: nn.Module) -> Note | None:
    """Why no batch can be flattened in this call: settings that the user may change at any time."""
    device = next((parameter.device for parameter in owner.parameters() if not parameter.is_meta), None)
    if device is not None and device.type == "cuda":
        if older_than(device, AMPERE):
            return note("gpu-without-kernel")
        half = getattr(owner, "dtype", None) in HALF or torch.is_autocast_enabled("cuda")
        if not half:  # told here, before layers are compiled in vain
            return note("no-unpadded-kernel")
    config = getattr(owner, "config", None)
    if (name := getattr(config, "_attn_implementation", "sdpa")) not in ("sdpa", "eager", NAME):
        return note("other-attention", str(name))
    for name in ("output_hidden_states", "output_attentions"):
        if getattr(config, name, False):
            return note("output-required", name)
    if context_parallel.is_shared():
        return note("context-parallel")
    return note("checkpoint-around-layers") if in_checkpoint() else None
