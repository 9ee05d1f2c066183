"""What layers hand on beside their results: keys and values that later layers read, in a mapping that each is given.

The mapping stays the caller's, with entries for the batch [B, T]. A layer that runs on a row of documents is given a
copy whose entries are for the row, and what it writes there is put into the caller's as it would be without us. So a
layer that keeps its padding, or anybody else, reads what they know.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tunecompile.notes import Note, note
from tunecompile.runtime.step.rows_refused import RowsRefused
from tunecompile.runtime.unpad.flat_batch import FlatBatch, HasNoTokens

#: what layers wrote -> the dimension that counts tokens. (By sizes alone, [B, H, T, D] may be taken for [3, B, T, D].)
_tokens: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


@dataclass(frozen=True)
class HandedOn:
    """A mapping in one call of a layer."""

    known: MutableMapping  #: the caller's
    given: MutableMapping  #: the layer's
    before: dict[Any, Any]  #: what the layer's held at first

    @property
    def changed(self) -> bool:
        """Whether the layer wrote to it."""
        same = len(self.before) == len(self.given)
        return not same or any(key not in self.before or self.before[key] is not self.given[key] for key in self.given)

    @staticmethod
    def without_entries(mapping: MutableMapping) -> HandedOn:
        """For a layer that reads none: its graph does not depend on what others wrote."""
        given = copy.copy(mapping)
        given.clear()
        return HandedOn(mapping, given, {})

    def leave(self, flat: FlatBatch, keep: bool) -> int:
        """Put what the layer wrote into the caller's.

        Args:
            flat: the batch that the layer ran on.
            keep: whether layers of the same batch may read it as it is.

        Returns:
            How many tensors [1, H, N, D] it wrote.

        Raises:
            RowsRefused: sizes do not tell which dimension counts tokens.
        """
        wrote = 0
        for key in [key for key in self.before if key not in self.given]:
            del self.known[key]
        for key, value in self.given.items():
            if key not in self.before or value is not self.before[key]:
                dims: list[int] = []
                self.known[key] = _left(value, flat, keep, dims)
                wrote += dims.count(2)
        return wrote


class Graph(Protocol):
    """A compiled graph of a layer."""

    hands_on: int  #: how many tensors [1, H, N, D] it returns


class Receiver(Protocol):
    """The owner's call that is under way."""

    mappings: dict[int, Any]  #: by id: those that layers wrote to


@dataclass(frozen=True)
class RowCall:
    """A layer's call on a row of documents."""

    flat: FlatBatch
    args: tuple
    kwargs: dict
    handed: list[HandedOn]  #: mappings among the arguments
    keep: bool  #: whether other layers of the batch may read what it makes as it is

    @staticmethod
    def of(
        flat: FlatBatch, mask: Tensor | None, args: tuple, kwargs: dict, keep: bool, unread: str = ""
    ) -> RowCall | None:
        """None where an argument has no tokens; see `FlatBatch.enter` for the others.

        unread: the name of a mapping whose entries the layer does not read.
        """
        handed: list[HandedOn] = []

        def entered(value: Any, name: str = "") -> Any:
            if not isinstance(value, (dict, UserDict)):
                return value
            made = HandedOn.without_entries(value)
            if not name or name != unread:
                made.given.update({key: _entered(entry, flat, keep) for key, entry in value.items()})
                made.before.update(made.given)
            handed.append(made)
            return made.given

        try:
            args, kwargs = tuple(map(entered, args)), {name: entered(value, name) for name, value in kwargs.items()}
        except HasNoTokens:
            return None
        if (found := flat.enter(args, kwargs, mask, keep)) is None:
            return None
        return RowCall(flat, *found, handed, keep)

    def hand_on(self, graph: Graph | None, receiver: Receiver | None) -> Note | None:
        """Put what the layer wrote into mappings into its caller's.

        Args:
            graph: that ran; None where it is not known.
            receiver: takes the mappings that were written to.

        Returns:
            Why what it returned cannot be used: its graph returns more than was found there.

        Raises:
            RowsRefused: as `HandedOn.leave`.
        """
        changed = [each for each in self.handed if each.changed]
        wrote = sum([each.leave(self.flat, self.keep) for each in changed])
        if graph is not None and graph.hands_on != wrote:
            return note("output-holds-more")
        if receiver is not None:
            receiver.mappings |= {id(each.known): each.known for each in changed}
        return None


def mappings_in(args: tuple, kwargs: dict) -> Iterator[int]:
    """Ids of mappings among a layer's arguments, and of what holds their entries."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, (dict, UserDict)):
            yield id(value)
            yield id(getattr(value, "data", value))


def entries_before(args: tuple, kwargs: dict) -> list[tuple[MutableMapping, dict]]:
    """Mappings among a layer's arguments, with what they hold."""
    return [(value, dict(value)) for value in (*args, *kwargs.values()) if isinstance(value, (dict, UserDict))]


def note_written(before: list[tuple[MutableMapping, dict]], sizes: tuple[int, ...]) -> None:
    """Note which dimension counts tokens of what a layer wrote into mappings, keys and values [B, H, T, D].

    Args:
        before: what they held when the layer, which ran on the batch as it comes, was called.
        sizes: rows and length of the batch.
    """
    for mapping, held in before:
        for value in (value for key, value in mapping.items() if key not in held or held[key] is not value):
            for made in value if isinstance(value, (tuple, list)) else (value,):
                shape = made.shape if isinstance(made, Tensor) else ()
                if len(shape) == 4 and (shape[0], shape[2]) == sizes and shape[1] != shape[2]:
                    _tokens[made] = 2


def is_seen(mappings: Iterable[Any], given: dict[str, Any], output: Any) -> bool:
    """Whether the model's caller gave one of these mappings, or is returned one."""
    ids = {id(mapping) for mapping in mappings}
    return any(id(value) in ids for value in (*given.values(), *_values(output)))


def _values(output: Any) -> Iterator[Any]:
    yield output
    if isinstance(output, (tuple, list)):
        yield from output
    elif isinstance(output, (dict, UserDict)):
        yield from output.values()


def _entered(value: Any, flat: FlatBatch, keep: bool) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)([_entered(item, flat, keep) for item in value])
    if not isinstance(value, Tensor) or not value.dim():
        return value
    dim = _tokens.get(value)
    if dim is None:
        if value.dim() > 3:
            raise HasNoTokens
        return flat.entered(value)
    return flat.row_along(value, dim, keep)


def _left(value: Any, flat: FlatBatch, keep: bool, found: list[int]) -> Any:
    """For the batch; `found` takes the dimensions that counted tokens."""
    if isinstance(value, (tuple, list)):
        return type(value)([_left(item, flat, keep, found) for item in value])
    if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[0] != 1:
        return value
    dims = [dim for dim in range(1, max(value.dim() - 1, 2)) if value.shape[dim] == len(flat.index)]
    if not dims:
        return value
    if len(dims) > 1:
        raise RowsRefused(note("output-holds-more"))
    found += dims
    made = flat.batch_along(value, dims[0], keep)
    _tokens[made] = dims[0]
    return made
