"""Lists and dictionaries among a layer's arguments, which it may write to for layers behind it, or for its model.

A call that can be repeated hands over copies of them, with the layer's own tensors. What is written to a copy is put
into the caller's where the copy is part of the caller's graph; elsewhere the layer is called with the caller's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_Container = list | dict


class GivenContainers:
    """Those of one call."""

    def __init__(self, arguments: tuple[tuple, dict]):
        self.own = [*_inside(arguments)]  #: the caller's
        self.copies: list[_Container] = []  #: the layer's, in the same order
        self.before: list[list[tuple[Any, Any]]] = []  #: what the copies held

    def hand_over(self, arguments: tuple[tuple, dict]) -> None:
        """Note what a copy of the arguments holds, before the layer is called with it."""
        self.copies = [*_inside(arguments)] if self.own else []
        self.before = [_items(copied) for copied in self.copies]

    @property
    def written(self) -> bool:
        """Whether the layer wrote to a copy."""
        pairs = ((_items(copied), before) for copied, before in zip(self.copies, self.before))
        return any(_differ(items, before) for items, before in pairs)

    def write_back(self) -> None:
        """Have the caller's hold what the copies hold: its own values where these were not replaced."""
        known = [_items(own) for own in self.own]
        originals: dict[int, Any] = {id(copied): own for own, copied in zip(self.own, self.copies)}
        originals |= {
            id(given): kept for items, before in zip(known, self.before) for (_, kept), (_, given) in zip(items, before)
        }
        for own, copied, before in zip(self.own, self.copies, self.before):
            items = _items(copied)
            if not _differ(items, before):
                continue
            own.clear()
            if isinstance(own, dict):
                own.update((key, originals.get(id(value), value)) for key, value in items)
            else:
                own.extend(originals.get(id(value), value) for _, value in items)

    def forget(self) -> None:
        """The call is over: hold nothing of it."""
        self.own, self.copies, self.before = [], [], []


def holds_containers(args: tuple, kwargs: dict) -> bool:
    """Whether there are any among a call's arguments."""
    return next(_inside((args, kwargs)), None) is not None


def _inside(arguments: tuple[tuple, dict]) -> Iterator[_Container]:
    """All lists and dictionaries, those inside others behind them."""
    args, kwargs = arguments
    pending: list[Any] = [*args, *kwargs.values()]
    while pending:
        value = pending.pop(0)
        if type(value) in (list, dict):
            yield value
        if type(value) in (list, dict, tuple):
            pending.extend(value.values() if isinstance(value, dict) else value)


def _items(container: _Container) -> list[tuple[Any, Any]]:
    return [*(container.items() if isinstance(container, dict) else enumerate(container))]


def _differ(items: list[tuple[Any, Any]], before: list[tuple[Any, Any]]) -> bool:
    if len(items) != len(before):
        return True
    return any(key != other or value is not held for (key, value), (other, held) in zip(items, before))
