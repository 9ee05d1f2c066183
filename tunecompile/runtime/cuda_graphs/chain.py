"""Chains: compiled calls of layers that follow each other, and where each of their inputs comes from.

An input is the result of the call before, or an input of the chain's first call, or the same tensor in every pass
(weights, most of all), or one that a later call brings (`Brought`). A chain whose passes were alike twice can be run
from its first call's inputs, and from what is brought, alone. Arguments of the first layer that its graph does not read
count among the former: layers of another kind may read them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple

from torch import Tensor, nn

DIFFERED = 1  #: passes that may differ by chance


def itself(tensor: Tensor) -> Tensor:
    """The tensor."""
    return tensor


class Previous:
    """The result of the call before."""


class Varies:
    """Another value in each pass: of a chain's first call alone."""


@dataclass(frozen=True)
class Brought:
    """Another tensor in each pass, which none of the calls before is given: tables of another kind of layers, say.

    From the call behind it on it is among the inputs of the first one.
    """

    position: int  #: among these


class Held(NamedTuple):
    """A tensor of one pass that is not among the first call's inputs."""

    tensor: Callable[[], Tensor | None]  #: weakly
    call: int  #: the first that is given it
    place: int  #: among that call's inputs

    def in_common(self, other: Held) -> Source | None:
        """What it is in both passes; `Held` with the place alone, where the tensors differ."""
        mine, theirs = self.tensor(), other.tensor()
        if mine is theirs and mine is not None:
            return weakref.ref(mine)
        if self[1:] != other[1:] or isinstance(mine, nn.Parameter) or isinstance(theirs, nn.Parameter):
            return None
        return Held(_no_tensor, *self[1:])


def _no_tensor() -> None:
    return None


#: where an input comes from: the call before, positions among the first call's inputs, or always the same tensor
Source = type[Previous] | type[Varies] | frozenset[int] | weakref.ref | Brought | Held


class Link:
    """The compiled graph of a layer. Its calls run alone, or as a part of a recorded stack.

    Args:
        run: takes the inputs of the graph that Dynamo made, and returns its outputs.
        through: decides that, in place of a call of `run`.
    """

    def __init__(self, run: Callable[..., Any], through: Callable[[Link, Sequence[Any]], Any]):
        self.run, self.through = run, through

    def __call__(self, *inputs: Any) -> Any:
        return self.through(self, inputs)


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a chain."""

    link: Link
    sources: tuple[Source, ...]
    key: tuple = ()  #: its graph and its layer's parameters
    reads: int = 0  #: of a first call: how many of the inputs its graph reads

    @staticmethod
    def first(link: Link, inputs: Sequence[Any], beside: Sequence[Any] = ()) -> Call:
        """The call that begins a chain; `beside` are arguments of its layer that its graph does not read, and sizes."""
        sources = tuple(weakref.ref(v) if isinstance(v, Tensor) else Varies for v in (*inputs, *beside))
        return Call(link, sources, key_of(link, inputs), len(inputs))

    @staticmethod
    def after(
        link: Link, inputs: Sequence[Any], first: Sequence[Any], previous: Any, held: Mapping[int, Held] | None = None
    ) -> Call:
        """A later one.

        Args:
            link, inputs: of the call.
            first: the inputs of the first.
            previous: what the call before returned.
            held: what is known of other tensors that calls were given, by their ids.
        """
        sources = tuple(_source(value, first, previous, held or {}) for value in inputs)
        return Call(link, sources, key_of(link, inputs))

    def agreeing(self, other: Call) -> Call | None:
        """What both passes have in common; None where they differ."""
        if self.link is not other.link or len(self.sources) != len(other.sources):
            return None
        common = tuple(each for each in map(_in_common, self.sources, other.sources) if each is not None)
        return Call(self.link, common, self.key) if len(common) == len(self.sources) else None

    def takes(self, link: Link, inputs: Sequence[Any], first: Sequence[Any], previous: Any) -> bool:
        """Whether a call is this one, in the pass that began with the inputs `first`."""
        return (
            link is self.link
            and len(inputs) == len(self.sources)
            and all(_is_from(source, value, first, previous) for source, value in zip(self.sources, inputs))
        )

    def inputs(self, first: Sequence[Any], previous: Any, given: Callable[[Tensor], Tensor]) -> list[Any]:
        """The inputs of this call.

        Args:
            first: the inputs of the first call.
            previous: what the call before returned.
            given: the tensor that is passed for one that is the same in every pass.
        """
        return [_value(source, first, previous, given) for source in self.sources]

    def fixed(self) -> list[Tensor]:
        """The tensors that its graph reads, and that are the same in every pass."""
        read = self.sources[: self.reads or None]
        return [value for source in read if isinstance(source, weakref.ref) and (value := source()) is not None]

    def brings(self, inputs: Sequence[Any]) -> dict[int, Tensor] | None:
        """What it brings, of its inputs, by its position; None where that is one tensor no longer."""
        found: dict[int, Tensor] = {}
        brought = [(source.position, v) for source, v in zip(self.sources, inputs) if isinstance(source, Brought)]
        return found if all(found.setdefault(position, value) is value for position, value in brought) else None

    def placed(self, positions: Mapping[tuple[int, int], int], number: int) -> Call:
        """With the positions of what calls bring, by the call and the place there. number: of this call."""

        def place(source: Source) -> Source:
            if not isinstance(source, Held):
                return source
            position = positions[source[1:]]
            return Brought(position) if source.call == number else frozenset({position})

        return Call(self.link, tuple(map(place, self.sources)), self.key, self.reads)


def _source(value: Any, first: Sequence[Any], previous: Any, held: Mapping[int, Held]) -> Source:
    if isinstance(value, Tensor):
        if value is previous:
            return Previous
        places = frozenset(at for at, other in enumerate(first) if other is value)
        return places or held.get(id(value)) or weakref.ref(value)
    return frozenset(at for at, other in enumerate(first) if _is_number(other, value))


def _is_number(other: Any, value: Any) -> bool:
    return type(other) is type(value) and not isinstance(other, Tensor) and bool(other == value)


def _in_common(one: Source, other: Source) -> Source | None:
    if isinstance(one, frozenset) and isinstance(other, frozenset):
        return (one & other) or None
    if isinstance(one, weakref.ref) and isinstance(other, weakref.ref):
        return one if one() is other() and one() is not None else None
    if isinstance(one, Held) and isinstance(other, Held):
        return one.in_common(other)
    if isinstance(one, Brought):
        return one if isinstance(other, (weakref.ref, Held)) else None
    return one if one is other else None


def _is_from(source: Source, value: Any, first: Sequence[Any], previous: Any) -> bool:
    if source is Previous:
        return value is previous
    if isinstance(source, weakref.ref):
        return source() is value
    if source is Varies:
        return True
    if isinstance(source, Brought):  # by this call
        return isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and value is not previous
    other = _value(source, first, previous, itself)  # of several positions, what was recorded read this one
    return other is value or _is_number(other, value)


def _value(source: Source, first: Sequence[Any], previous: Any, given: Callable[[Tensor], Tensor]) -> Any:
    if source is Previous:
        return previous
    if isinstance(source, weakref.ref):
        tensor = source()
        assert tensor is not None, "a weight of a recorded layer is gone"
        return given(tensor)
    assert isinstance(source, (frozenset, Brought))
    value = first[source.position if isinstance(source, Brought) else min(source)]
    return given(value) if isinstance(value, Tensor) else value  # a weight, perhaps, that two layers share


@dataclass
class Chain:
    """Calls that follow each other."""

    calls: list[Call]
    agreed: int = 0  #: passes that were like the first one
    differed: int = 0  #: passes that were not
    shapes: dict[tuple, Any] = field(default_factory=dict)  #: by `shape_of`
    flights: list[Any] = field(default_factory=list)  #: memory for its passes, one at a time each
    used_at: int = 0  #: the pass that it began last
    places: set[int] | None = None  #: see `read`
    ready: int = 0  #: the last call that brings inputs, from which on all calls can be run

    def learn(self, calls: Sequence[Call]) -> list[Call]:
        """Compare with another pass. Of the first call, inputs that differ vary; of all others, none may.

        Returns:
            Calls that begin a chain of their own from now on, since they were others time and again. (Once may be by
            chance: something was compiled anew.)
        """
        mine, others = self.calls[0], calls[0]
        sources = tuple(map(_first_in_common, mine.sources, others.sources))
        head = Call(mine.link, sources, mine.key, mine.reads)
        compared = [(call, mine.agreeing(call)) for mine, call in zip(self.calls[1:], calls[1:])]
        different = [call for call, common in compared if common is None]
        if not different and len(self.calls) == len(calls):
            self._agree([head, *(common for _, common in compared if common is not None)])
            return []
        self.agreed, self.differed, self.calls = 0, self.differed + 1, [head, *calls[1:]]
        if self.differed <= DIFFERED:
            return []
        self.calls = [head, *takewhile(lambda call: call not in different, calls[1:])]
        return different

    def _agree(self, calls: list[Call]) -> None:
        """Take calls as those of all passes."""
        self.agreed += 1
        held = [(number, source) for number, call in enumerate(calls) for source in call.sources]
        bring = [source[1:] for number, source in held if isinstance(source, Held) and source.call == number]
        size = len(calls[0].sources)
        positions = {place: size + at for at, place in enumerate(dict.fromkeys(bring))}
        self._take([call.placed(positions, number) for number, call in enumerate(calls)])

    def _take(self, calls: list[Call]) -> None:
        bring = (at for at, call in enumerate(calls) if any(isinstance(each, Brought) for each in call.sources))
        self.calls, self.places, self.ready = calls, None, max(bring, default=0)

    def cut(self, apart: Collection[tuple]) -> list[Call]:
        """End before the first call that does more than return a result.

        Args:
            apart: keys of such calls.

        Returns:
            Calls that begin a chain of their own from now on: these, and those behind them.
        """
        places = [at for at, call in enumerate(self.calls) if call.key in apart]
        if not places:
            return []
        begin = [self.calls[at] for place in places for at in (place, place + 1) if 0 < at < len(self.calls)]
        self._take(self.calls[: max(places[0], 1)])
        return begin

    def begins_with(self, link: Link, inputs: Sequence[Any]) -> bool:
        """Whether its weights and all else that stays are among these inputs of a first call."""
        return self.calls[0].takes(link, inputs, inputs, None)

    def read(self) -> set[int]:
        """Positions of the first call's inputs, and of what is brought, that any call reads."""
        if self.places is None:  # asked in each pass
            sources = [source for call in self.calls[1:] for source in call.sources]
            later = {min(source) for source in sources if isinstance(source, frozenset)}
            brought = {source.position for source in sources if isinstance(source, Brought)}
            self.places = later | brought | {*range(self.calls[0].reads)}
        return self.places

    def varies(self, position: int) -> bool:
        """Whether an input of the first call, or what is brought, differs from pass to pass."""
        sources = self.calls[0].sources
        return position >= len(sources) or sources[position] is Varies

    def narrow(self, place: int, link: Link, inputs: Sequence[Any], first: Sequence[Any], previous: Any) -> bool:
        """Whether a call is the one at this place after all: several of the first inputs were equal before."""
        common = self.calls[place].agreeing(Call.after(link, inputs, first, previous))
        if common is None:
            return False
        self.calls[place], self.places = common, None
        return True

    def run(
        self,
        inputs: Sequence[Any],
        upto: int,
        given: Callable[[Tensor], Tensor] = itself,
        known: tuple[int, Tensor | None] = (0, None),
    ) -> Any:
        """The result of so many calls, run one after the other.

        Args:
            inputs: of the first call.
            upto: the number of calls.
            given: the tensor that is passed for one that is the same in every pass.
            known: what so many calls give, which are not run.
        """
        done, value = known
        for place, call in enumerate(self.calls[done:upto], done):
            read = call.inputs(inputs, value, given) if place else self._first(inputs, given)
            value = result_of(call.link.run(*read))
        return value

    def _first(self, inputs: Sequence[Any], given: Callable[[Tensor], Tensor]) -> list[Any]:
        return [
            given(value) if isinstance(source, weakref.ref) else value
            for value, source in zip(inputs[: self.calls[0].reads], self.calls[0].sources)
        ]


def _first_in_common(one: Source, other: Source) -> Source:
    return Varies if (common := _in_common(one, other)) is None else common


def result_of(outputs: Any) -> Tensor | None:
    """The one result of a call; None where it has more, or none."""
    tensors = [value for value in outputs if isinstance(value, Tensor)] if isinstance(outputs, (tuple, list)) else []
    return tensors[0] if len(tensors) == 1 == len(outputs) else None


def shape_of(inputs: Sequence[Any]) -> tuple:
    """What tells passes apart that need recordings of their own, by the first call's inputs."""
    return tuple(
        (v.shape, v.stride(), v.dtype, v.requires_grad) if isinstance(v, Tensor) else v
        for v in inputs
        if not isinstance(v, nn.Parameter)
    )


def key_of(link: Link, inputs: Sequence[Any]) -> tuple:
    """Of a call: its graph and its layer's parameters."""
    return id(link), *(id(value) for value in inputs if isinstance(value, nn.Parameter))
