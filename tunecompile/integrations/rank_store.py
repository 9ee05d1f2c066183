"""What the ranks of one training tell each other: notices on a board, for which nobody waits.

The board is the store that the ranks met in, torchrun's mostly. A collective needs a moment that all ranks surely reach together, and there is
none at which one of them runs out of memory. So a rank writes when that happens, and the others read where their next step begins: one question
to the store, 50 microseconds on one machine, and none to the GPU. Where there is no store, or it is gone, there is nothing to read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from tunecompile._torch.distributed import meeting_store, several

T = TypeVar("T")


@dataclass
class RankStore:
    """Of the ranks that train one model, or parts of it with parameters of the same names. Every rank's first one of such names is the same board, and
    every rank's second one is another."""

    store: Any  #: None where none can be reached
    rank: int
    ranks: int
    number: int = 0  #: of the model, among those with such names
    seen: int = 0  #: notices

    @staticmethod
    def of(model: nn.Module) -> RankStore:
        """A board of its own for the only process."""
        if not several():
            return RankStore(None, 0, 1)
        names = hashlib.sha256("\n".join(name for name, _ in model.named_parameters()).encode()).hexdigest()[:16]
        board = RankStore(
            meeting_store(f"tunecompile/{names}"), torch.distributed.get_rank(), torch.distributed.get_world_size()
        )
        board.number = board._ask(lambda: board.store.add(f"models/{board.rank}", 1)) or 0
        return board

    def post(self, **notice: Any) -> None:
        """For all others, once."""
        self._ask(
            lambda: self.store.set(
                self._notice(self.store.add(f"{self.number}/notices", 1) - 1), json.dumps({"rank": self.rank, **notice})
            )
        )

    def news(self) -> Iterator[dict[str, Any]]:
        """What others posted since the last time, each with its `rank`."""
        while self._ask(lambda: self.store.check([self._notice(self.seen)])):
            notice = self._ask(lambda: json.loads(self.store.get(self._notice(self.seen))))
            self.seen += 1
            if notice is not None and notice["rank"] != self.rank:
                yield notice

    def say(self, topic: str, value: Any) -> None:
        """What holds of this rank now."""
        self._ask(lambda: self.store.set(self._topic(topic, self.rank), json.dumps(value)))

    def said(self, topic: str) -> dict[int, Any]:
        """What each rank said last, of those that have."""
        found = {}
        for rank in range(self.ranks):
            if self._ask(lambda: self.store.check([self._topic(topic, rank)])):
                found[rank] = self._ask(lambda: json.loads(self.store.get(self._topic(topic, rank))))
        return found

    def _notice(self, number: int) -> str:
        return f"{self.number}/notice/{number}"

    def _topic(self, topic: str, rank: int) -> str:
        return f"{self.number}/{topic}/{rank}"

    def _ask(self, question: Callable[[], T]) -> T | None:
        """A store that fails, since the rank that holds it has ended, is asked no more."""
        try:
            return None if self.store is None else question()
        except RuntimeError:
            self.store = None
            return None
