"""Looks for prefixes that rows of a batch share: by the ids of tokens, by the bits of embeddings that come in place of
ids (of images among them), and by all else that an owner of layers is given.

The device copies ids to the host while what stands before the layers runs. Batches that share nothing are looked at
less and less: each look waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tunecompile._torch.cuda import start_copy_to_host
from tunecompile.integrations.loss_caller import ids_of_embeddings
from tunecompile.notes import Note, note
from tunecompile.runtime.memory.rng_autocast import RngAutocastState
from tunecompile.runtime.unpad.masks.given import MASK
from tunecompile.runtime.unpad.prefixes.forest import forest_of
from tunecompile.runtime.unpad.prefixes.shared import SharedPrefixes

LOOKS = 3  #: batches that share nothing, one after another, from which on few are looked at
FEW = 16  #: of so many one
CHECKS = 2  #: batches in which what layers are given is compared
IDS, EMBEDDINGS, POSITIONS = "input_ids", "inputs_embeds", "position_ids"
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  #: by bytes of an element
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  #: 2^64 over the golden ratio, as an int64 (Fibonacci hashing)


@dataclass
class Keys:
    """What the tokens of one batch [B, T] are known by, on its way to the host."""

    search: PrefixSearch
    known_by: Tensor  #: int64 [K, B, T]
    arrived: torch.cuda.Event | None  #: None where it is on the host
    device: torch.device
    positions: slice | None  #: which of them are positions; None where tokens are known by their column
    mask: bool  #: whether the last of them is what a mask [B, T] says
    why_not: Callable[[], Note | None]  #: why copies have to stay, where there are any
    recurs: Callable[[], bool]  #: whether layers have recurrences
    begun: RngAutocastState  #: when the call began
    #: of earlier masks of the call: real tokens, where documents begin, and what these share
    found: list[tuple[Tensor, Tensor, SharedPrefixes | None]] = field(default_factory=list)

    def of_whole_rows(self) -> SharedPrefixes | None:
        """What rows without padding share; None for rows with padding. It waits for the device."""
        if self.arrived is not None:
            self.arrived.synchronize()
        if self.mask and not self.known_by[-1].all():
            return None
        real = torch.ones(self.known_by.shape[1:], dtype=torch.bool, device="cpu")
        starts = torch.zeros_like(real)
        starts[:, 0] = True
        return self.shared(real, starts)

    def shared(self, real: Tensor, starts: Tensor) -> SharedPrefixes | None:
        """What documents share; None where it does not pay, or may not be.

        Args:
            real: bool [B, T], which are tokens; all others are padding.
            starts: bool [B, T], where documents begin.
        """
        real, starts = real.cpu(), starts.cpu()
        for there, begun, shared in self.found:
            if torch.equal(there, real) and torch.equal(begun, starts):
                return shared
        made = self._look(real, starts)
        self.found.append((real, starts, made))
        return made

    def must_be_checked(self) -> bool:
        """Whether what layers are given has to be compared: in the first batches, and where random numbers were drawn
        before the layers. (Dropout may be switched on at any time.)
        """
        first, self.search.checks = self.search.checks > 0, max(self.search.checks - 1, 0)
        return first or self.begun.drawn_since()

    def _begin_alone(self, real: Tensor, starts: Tensor) -> bool:
        """Whether documents begin with their rows, or where positions begin anew, so that no layer sees beyond. (A
        chunk goes on from the one before it in layers that see all of the row.)
        """
        inside = starts & F.pad(real[:, :-1], (1, 0))
        if self.positions is None:
            return not inside.any()
        steps = F.pad(self.known_by[self.positions].diff(), (1, 0))
        return not (inside & (steps == 1).any(0)).any()

    def _look(self, real: Tensor, starts: Tensor) -> SharedPrefixes | None:
        if real.shape != self.known_by.shape[1:]:
            return None
        if self.arrived is not None:
            self.arrived.synchronize()
        if not self._begin_alone(real, starts):
            return None
        keys = self.known_by.flatten(1)
        if self.positions is None:
            column = torch.arange(real.shape[1], device="cpu").expand(real.shape).reshape(1, -1)
            keys = torch.cat([keys, column])
        tokens = real.flatten().nonzero()[:, 0]
        begins = starts.flatten()[tokens].nonzero()[:, 0]
        lengths = torch.cat([begins, torch.tensor([len(tokens)], device="cpu")]).diff().tolist()
        forest = forest_of(keys.index_select(1, tokens), lengths)
        self.search.looked(forest is not None)
        if forest is None:
            return None
        if (why := self.why_not()) is not None:
            self.search.refuse(why)
            return None
        return SharedPrefixes.of(forest, real, self.device, self.recurs())


class PrefixSearch:
    """Decides for the batches of one owner of layers whether prefixes are looked for."""

    def __init__(self) -> None:
        self.refused: Note | None = None  #: why none are from now on
        self.unread: Note | None = None  #: why none were in a call
        self.alone = 0  #: batches that shared nothing, one after another
        self.calls = 0
        self.checks = CHECKS
        self.batches = self.tokens = self.rows = 0  #: that ran: batches, their forests' tokens, and those of rows

    def begin(
        self, given: dict[str, Any], why_not: Callable[[], Note | None], recurs: Callable[[], bool] = lambda: False
    ) -> Keys | None:
        """Copy what tokens of a call are known by to the host; None where nothing is looked for.

        Args:
            given: the owner's arguments, by name.
            why_not: asked where prefixes were found: why they stay.
            recurs: asked then: whether layers have recurrences, which read whole rows.
        """
        self.calls += 1
        if self.refused is not None or (self.alone >= LOOKS and self.calls % FEW):
            return None
        known = self._tokens(given)
        if known is None:
            return None
        ids, parts = known[0][0], [*known]
        mask, positions = given.get(MASK), None
        says = isinstance(mask, Tensor) and mask.shape == ids.shape and mask.device == ids.device
        for name, value in given.items():
            if name in (IDS, EMBEDDINGS) or _is_of_all(value) or (name == MASK and _is_mask(value)):
                continue
            if not _is_by_token(value, ids):
                return self._leave_out(note("not-by-token", detail=name), ids)
            parts.append(value.expand(*value.shape[:-2], *ids.shape).reshape(-1, *ids.shape))
            if name == POSITIONS:
                end = sum(map(len, parts))
                positions = slice(end - len(parts[-1]), end)
        parts += [(mask != 0)[None]] if says else []
        known_by = torch.cat([part.to(torch.int64) for part in parts])
        copied, arrived = start_copy_to_host(known_by) if known_by.is_cuda else (known_by, None)
        begun = RngAutocastState.now(ids.device)
        return Keys(self, copied, arrived, ids.device, positions, says, why_not, recurs, begun)

    def _tokens(self, given: dict[str, Any]) -> list[Tensor] | None:
        """int64 [1, B, T] each: ids, or digests of embeddings and the ids that they are of; None without either."""
        ids, embedded = given.get(IDS), given.get(EMBEDDINGS)
        if isinstance(ids, Tensor) and ids.dim() == 2 and not ids.is_floating_point():
            return [ids[None]] if ids.numel() > 1 else None
        if not isinstance(embedded, Tensor) or embedded.dim() != 3 or not embedded.is_floating_point():
            return None
        embeds = ids_of_embeddings(embedded.shape[:2])
        if embeds is None and embedded.requires_grad:  # the sum of copies' gradients would be that of the first
            return self._leave_out(note("embeddings-train"), embedded)
        return [_digests(embedded)[None], *([] if embeds is None else [embeds[None]])]

    def _leave_out(self, why: Note, rows: Tensor) -> None:
        """A call is not looked at."""
        self.unread = why if len(rows) > 1 else self.unread

    def looked(self, shares: bool) -> None:
        """A batch was looked at."""
        self.alone = 0 if shares else self.alone + 1

    def refuse(self, reason: Note) -> None:
        """From now on rows keep their copies."""
        self.refused = reason

    def ran(self, shared: SharedPrefixes) -> None:
        """A batch ran without copies."""
        self.batches += 1
        self.tokens += shared.forest.count
        self.rows += len(shared.forest.tokens)

    def report(self) -> list[Note]:
        """For the report."""
        told = []
        if self.batches:
            told.append(note("prefixes-shared", count=self.batches, tokens=self.tokens, rows=self.rows))
        told += [note("prefixes-unread", detail=self.unread)] if self.unread is not None else []
        return told + ([note("prefixes-kept", detail=self.refused)] if self.refused is not None else [])


def _is_mask(value: Any) -> bool:
    """Whether it says to layers which tokens see each other. (Masks of pairs are read for documents.)"""
    kinds = value.values() if isinstance(value, dict) else ()
    return isinstance(value, Tensor) or (bool(kinds) and all(each is None or each.dim() == 4 for each in kinds))


def _is_by_token(value: Any, ids: Tensor) -> bool:
    """Whether an argument says something of each token of [B, T], or of each column."""
    if not isinstance(value, Tensor) or value.is_floating_point() or value.device != ids.device:
        return False
    return value.shape[-2:] == ids.shape or value.shape == (1, ids.shape[1])


def _digests(embedded: Tensor) -> Tensor:
    """int64 [B, T]: a number for each embedding of [B, T, H], of all its bits."""
    factors = torch.arange(1, 2 * embedded.shape[-1], 2, device=embedded.device) * _GOLDEN
    factors = (factors ^ (factors >> 29)) * _GOLDEN | 1
    bits = embedded.detach().contiguous().view(_BITS[embedded.element_size()])
    return torch.stack([(row.to(torch.int64) * factors).sum(-1) for row in bits])  # eight bytes an element: row by row


def _is_of_all(value: Any) -> bool:
    """Whether an argument says the same of all tokens."""
    return not value.dim() if isinstance(value, Tensor) else isinstance(value, (bool, int, float, str, type(None)))
