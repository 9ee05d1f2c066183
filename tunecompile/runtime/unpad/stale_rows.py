"""What a layer put into containers of the user's, without padding, and has to be taken out once it ran with padding.

Only what the layer's call made is looked for, by identity, so that nothing that was there before is lost.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tunecompile.runtime.layers.module_watch import holders


@dataclass(frozen=True)
class StaleRow:
    """A row of tokens, and what held it when its layer had run on it. (By id: lists of that would hold it, too.)"""

    row: Tensor
    inner: dict[int, Any]  #: tuples and dictionaries with the row, and what the layer returned
    outer: dict[int, Any]  #: tuples with one of these

    @staticmethod
    def of(row: Tensor, output: Any) -> StaleRow:
        """For a row that was just made by a layer with this output."""
        found = [each for each in holders(row, None) if each is output or isinstance(each, (tuple, dict))]
        inner = {id(each): each for each in found if not _is_attributes(each)}
        outer = {id(each): each for entry in inner.values() for each in holders(entry, None) if type(each) is tuple}
        return StaleRow(row, inner, outer)


def take_back(stale: list[StaleRow]) -> None:
    """Take rows out of lists, and out of tuples that were made longer since; clears `stale`.

    What others stand in the place of by now is gone by itself. A tuple or dictionary with a row is taken out of a list
    as a whole: a number and a row, say. An attribute that still has such a tuple was not meant to have another.
    """
    for each in stale:
        entries = (each.row, *each.inner.values())
        for entry in entries:
            for holder in holders(entry, None):
                if id(holder) in each.inner:
                    continue
                if isinstance(holder, (list, deque)):
                    for at in reversed(_places(holder, entry)):
                        del holder[at]
                elif type(holder) is tuple and holder is not entries and id(holder) not in each.outer:
                    _rebind(holder, tuple([part for part in holder if part is not entry]))
    stale.clear()


def _is_attributes(value: Any) -> bool:
    """Whether a dictionary is that of an object's attributes."""
    return isinstance(value, dict) and any(_attributes(owner) is value for owner in holders(value, None))


def _attributes(owner: Any) -> dict | None:
    try:
        return object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return None


def _rebind(before: tuple, after: tuple) -> None:
    """Put a tuple in the place of another, in lists, dictionaries, attributes and variables of closures."""
    for holder in holders(before, None):
        if isinstance(holder, types.CellType):
            holder.cell_contents = after
            continue
        for place in _places(holder, before):
            if isinstance(holder, (list, deque)):
                holder[place] = after
            elif not isinstance(holder, dict):
                object.__setattr__(holder, place, after)
            elif kinds := [each for each in holders(holder, None) if isinstance(each, type)]:
                setattr(kinds[0], place, after)  # Python remembers what it found in a class
            else:
                holder[place] = after


def _places(holder: Any, value: Any) -> list[Any]:
    """Where a list, a dictionary or an object holds a value: indices, keys or names of attributes."""
    if isinstance(holder, (list, deque)):
        return [at for at, each in enumerate(holder) if each is value]
    if isinstance(holder, dict):
        return [key for key, each in holder.items() if each is value]
    return [name for name in _names(holder) if getattr(holder, name, None) is value]


def _names(owner: Any) -> Iterator[str]:
    """The names of an object's attributes, from its dictionary and from slots."""
    yield from _attributes(owner) or ()
    for kind in type(owner).__mro__:
        slots = vars(kind).get("__slots__", ())
        yield from [slots] if isinstance(slots, str) else slots
