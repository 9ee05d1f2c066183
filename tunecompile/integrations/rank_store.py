"""Notices between the ranks of one training, for which no rank waits.

They go through the store that the ranks met in, torchrun's mostly. A collective needs a moment that all ranks surely
reach together, and there is none at which one of them runs out of memory. So a rank writes when that happens, and the
others read where their next step begins: one request to the store, 50 microseconds on one machine, and none to the GPU.
Where there is no store, or it is gone, there is nothing to read.
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
    """A part of the store, of the ranks that train one model, or parts of it with parameters of the same names.

    The first model of such names in each rank shares one part, the second one another, and so on.
    """

    store: Any  #: torch's; None where none can be reached
    rank: int  #: of this process
    ranks: int  #: how many there are
    number: int = 0  #: of the model, among those with such names
    seen: int = 0  #: notices read so far

    @staticmethod
    def of(model: nn.Module) -> RankStore:
        """The store of a model. A process that trains alone has one of its own, with nothing in it."""
        if not several():
            return RankStore(None, 0, 1)
        names = hashlib.sha256("\n".join(name for name, _ in model.named_parameters()).encode()).hexdigest()[:16]
        made = RankStore(
            meeting_store(f"tunecompile/{names}"), torch.distributed.get_rank(), torch.distributed.get_world_size()
        )
        made.number = made._attempt(lambda: made.store.add(f"models/{made.rank}", 1)) or 0
        return made

    def post(self, **notice: Any) -> None:
        """Write a notice that each other rank reads once."""

        def write() -> None:
            number = self.store.add(f"{self.number}/notices", 1) - 1
            self.store.set(self._notice(number), json.dumps({"rank": self.rank, **notice}))

        self._attempt(write)

    def news(self) -> Iterator[dict[str, Any]]:
        """Notices that others posted since the last time, each with its `rank`."""
        while self._attempt(lambda: self.store.check([self._notice(self.seen)])):
            notice = self._attempt(lambda: json.loads(self.store.get(self._notice(self.seen))))
            self.seen += 1
            if notice is not None and notice["rank"] != self.rank:
                yield notice

    def publish(self, topic: str, value: Any) -> None:
        """Set this rank's value of a topic."""
        self._attempt(lambda: self.store.set(self._topic(topic, self.rank), json.dumps(value)))

    def published(self, topic: str) -> dict[int, Any]:
        """The last value of a topic by rank, of the ranks that have set one."""
        keys = {rank: self._topic(topic, rank) for rank in range(self.ranks)}
        return {rank: self._value(key) for rank, key in keys.items() if self._has(key)}

    def _has(self, key: str) -> bool:
        return bool(self._attempt(lambda: self.store.check([key])))

    def _value(self, key: str) -> Any:
        return self._attempt(lambda: json.loads(self.store.get(key)))

    def _notice(self, number: int) -> str:
        return f"{self.number}/notice/{number}"

    def _topic(self, topic: str, rank: int) -> str:
        return f"{self.number}/{topic}/{rank}"

    def _attempt(self, request: Callable[[], T]) -> T | None:
        """A request to the store. One that fails, since the rank that holds the store has ended, is the last one."""
        try:
            return None if self.store is None else request()
        except RuntimeError:
            self.store = None
            return None
