"""What an attention mask says: which tokens are real, where documents begin, how far back a token sees.

A mask is taken for a mask of documents only where its values are exactly those of one, at every real token. Who made
it, transformers or a function of the user's in its place, is not asked.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tunecompile._torch.cuda import start_copy_to_host
from tunecompile.runtime.unpad.masks.pairs import blocks, diagonal

IGNORED = -100
#: in place of a window: attention that is not causal, to all tokens of the document. With windows, -n is that to
#: tokens nearer than n.
BOTH_WAYS = -1
AT_ONCE = 1 << 26  #: elements of a mask that are compared at once


@dataclass(frozen=True)
class Documents:
    """Attention inside documents, as a mask [B, 1, T, T] has it."""

    real: Tensor  #: bool [B, T]: tokens; all others are padding
    starts: Tensor  #: bool [B, T]: real tokens that begin a document
    count: int  #: real tokens
    documents: int
    longest: int  #: tokens of the longest document
    #: how many tokens a token sees, itself included; 0 for all that stand before it; negative where it sees those
    #: behind it, too: see BOTH_WAYS
    window: int

    @property
    def full(self) -> bool:
        """Whether each row is one document without padding."""
        return self.count == self.real.numel() and self.documents == len(self.real)


@dataclass(frozen=True)
class MaskReading:
    """A mask, read on the host."""

    documents: Documents | None  #: None where it is not a mask of documents
    interrupted: bool = False  #: whether padding stands between tokens of a row
    labelled: bool = False  #: whether a label at padding would be read by a loss

    @property
    def full(self) -> bool:
        """Whether there is neither padding nor a second document in a row."""
        return self.documents is not None and self.documents.full


@dataclass(frozen=True)
class PendingReading:
    """What the device finds in a mask, on its way to the host."""

    real: Tensor
    starts: Tensor
    windows: tuple[int, ...]
    found: Tensor  #: numbers
    arrived: torch.cuda.Event | None  #: None where they are on the host

    def wait(self) -> MaskReading:
        """The reading. A wait for the device, if the numbers are not there yet."""
        if self.arrived is not None:
            self.arrived.synchronize()
        count, documents, longest, runs, labelled, weighs, *wrong = self.found.tolist()
        fits = next((window for window, differs in zip(self.windows, wrong) if not differs and not weighs), None)
        if fits is None or not count:
            return MaskReading(None, interrupted=runs > 1)
        found = Documents(self.real, self.starts, count, documents, longest, fits)
        return MaskReading(found, labelled=bool(labelled))


def windows_of(layer: nn.Module) -> tuple[int, ...]:
    """How many tokens a token may see by the layer's attributes, then 0 for all. The mask has the last word.

    Negative, and BOTH_WAYS for all, where the attributes say that attention is not causal.
    """
    modules = list(layer.modules())
    causal = {vars(module).get("is_causal") for module in modules}
    sign, whole = (-1, BOTH_WAYS) if False in causal and True not in causal else (1, 0)  # some decoders have both
    for holder in (*modules, *(getattr(module, "config", None) for module in modules)):
        if "sliding_window" in getattr(holder, "__dict__", ()):
            window = holder.sliding_window
            known = isinstance(window, int) and window > max(0, -whole)
            return (sign * window, whole) if known else (whole,)
    return (whole,)


def width_of(window: int) -> int:
    """How many tokens a token sees on a side, itself included; 0 for all."""
    return 0 if window == BOTH_WAYS else abs(window)


def read_mask(mask: Tensor, windows: Sequence[int], labels: Tensor | None) -> MaskReading:
    """Read a mask: `begin_reading`, and a wait for the device."""
    return begin_reading(mask, windows, labels).wait()


def begin_reading(mask: Tensor, windows: Sequence[int], labels: Tensor | None) -> PendingReading:
    """Let the device read a mask.

    Args:
        mask: [B, 1, T, T]: True, or 0, where a query (third dimension) sees a key; False, or the least number of its
            dtype, where it does not.
        windows: to try, the first that fits is taken: see `Documents`.
        labels: int [B, T] of a loss that may shift them by one, or None.
    """
    real, before = _seen(diagonal(mask, 0)), F.pad(_seen(diagonal(mask, -1)), (1, 0))
    follows = real & before & F.pad(real[:, :-1], (1, 0))
    starts = real & ~follows
    place = torch.arange(real.shape[1], device=mask.device)
    begin = torch.where(starts, place, 0).cummax(1).values
    longest = ((place - begin + 1) * real).amax()
    weighs, *wrong = _compare(mask, real, [_seen_from(real, starts, begin, place, window) for window in windows])
    found = torch.stack(
        [
            real.sum(),
            starts.sum(),
            longest,
            _runs(real),
            _read_at_padding(real, labels),
            weighs.long(),
            *(each.long() for each in wrong),
        ]
    )
    found, arrived = start_copy_to_host(found) if found.is_cuda else (found, None)
    return PendingReading(real, starts, tuple(windows), found, arrived)


def read_padding(mask: Tensor, labels: Tensor | None) -> MaskReading:
    """Read a mask that says which tokens are real: each row is one document. It waits for the device.

    Args:
        mask: [B, T], bool or int: 0 at padding.
        labels: int [B, T] of a loss that may shift them by one, or None.
    """
    real = mask != 0
    starts = real & ~F.pad(real[:, :-1], (1, 0))
    found = torch.stack([real.sum(), starts.sum(), real.sum(1).amax(), _runs(real), _read_at_padding(real, labels)])
    count, documents, longest, runs, labelled = found.tolist()
    if not count or runs > 1:
        return MaskReading(None, interrupted=runs > 1)
    return MaskReading(Documents(real, starts, count, documents, longest, 0), labelled=bool(labelled))


def read_offsets(offsets: Tensor) -> MaskReading:
    """Read where documents of a row begin, and where the last one ends. It waits for the device."""
    ends = offsets.tolist()
    lengths = [end - begin for begin, end in itertools.pairwise(ends)]
    if not lengths or ends[0] != 0 or min(lengths) < 1:
        return MaskReading(None)
    real = torch.ones(1, ends[-1], dtype=torch.bool, device=offsets.device)
    starts = torch.zeros_like(real).index_fill_(1, offsets[:-1].long(), True)
    return MaskReading(Documents(real, starts, ends[-1], len(lengths), max(lengths), 0))


def _seen_from(real: Tensor, starts: Tensor, begin: Tensor, place: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """The first and the last token that each token sees, [B, T]."""
    width = width_of(window)
    first = torch.maximum(begin, place - width + 1) if width else begin
    if window >= 0:
        return first, place.expand_as(begin)
    is_last = F.pad(starts[:, 1:] | ~real[:, 1:], (0, 1), value=True)
    last = torch.where(is_last, place, len(place)).flip(1).cummin(1).values.flip(1)
    return first, torch.minimum(last, place + width - 1) if width else last


def _seen(pairs: Tensor) -> Tensor:
    """Whether a query sees a key; pairs: of bools, or added to scores."""
    return pairs == 0 if pairs.is_floating_point() else pairs


def _compare(mask: Tensor, real: Tensor, expected: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Whether what is added to scores is neither nothing nor all there is: a bias. Then for each (first, last) whether
    a real token sees anything but the tokens from `first` to `last`.
    """
    place = torch.arange(mask.shape[-1], device=mask.device)
    found = [torch.zeros((), dtype=torch.bool, device=mask.device)] * (1 + len(expected))
    for rows, queries, pairs in blocks(mask, AT_ONCE):
        seen, tokens = _seen(pairs), real[rows, queries, None]
        differ = []
        for first, last in expected:
            inside = (place >= first[rows, queries, None]) & (place <= last[rows, queries, None])
            differ.append(((seen ^ inside) & tokens).any())
        found = [before | now for before, now in zip(found, (_weighs(pairs), *differ))]
    return found


def _weighs(pairs: Tensor) -> Tensor:
    """Whether what is added to scores is neither nothing nor all there is."""
    if not pairs.is_floating_point():
        return pairs.new_zeros((), dtype=torch.bool)
    return ((pairs != 0) & ~(pairs <= torch.finfo(pairs.dtype).min)).any()


def _runs(real: Tensor) -> Tensor:
    """How often the tokens of a row begin, at most."""
    return (real & ~F.pad(real[:, :-1], (1, 0))).sum(1).amax()


def _read_at_padding(real: Tensor, labels: Tensor | None) -> Tensor:
    """How many labels at padding count, in a loss that shifts them or in one that does not."""
    if labels is None:
        return real.new_zeros((), dtype=torch.int64)
    labelled = F.pad(labels.to(real.device) != IGNORED, (0, 1))
    return (~real & (labelled[:, :-1] | labelled[:, 1:])).sum()
