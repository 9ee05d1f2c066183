"""The chains of one model's layers, and what is recorded of them: which, when, and in how much memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from tunecompile.errors import summary
from tunecompile.notes import note
from tunecompile.runtime.cuda_graphs.chain import DIFFERED, Call, Chain, Link, shape_of
from tunecompile.runtime.cuda_graphs.launch_bound import Clock
from tunecompile.runtime.cuda_graphs.pool import next_pool
from tunecompile.runtime.cuda_graphs.recorded_graph import MAX_SHAPES, Replays, recordable, unrecorded
from tunecompile.runtime.cuda_graphs.recording import device_of
from tunecompile.runtime.cuda_graphs.stack_pass import Flight, Pass, ShapeOfChain
from tunecompile.runtime.cuda_graphs.stack_recording import StackRecording

AGREED = 1  #: passes like the first one, from which on a chain is recorded
UNUSED = 200  #: passes of other chains, after which one is forgotten
#: of the device's memory that a chain's recordings may take beside blocks that are too small for the largest. Each time
#: these are given back, all its shapes are recorded anew: 18 of 31 recordings in 60 steps of short rows
IN_BLOCKS = 0.125
MAX_FLIGHTS = 4  #: passes that wait for their backward: a question, an answer, and two that are wrong
MAX_BROKEN = 8  #: passes that were replayed in vain, from which on a chain is left alone


class RecordedChains:
    """The chains of one model's layers, by their first call, and their recordings."""

    def __init__(self, shared: Replays):
        self.shared = shared
        self.chains: dict[tuple, Chain] = {}
        self.apart: set[tuple] = set()  #: calls that do more than return a result, and are in no stack
        self.broken: Counter[tuple] = Counter()  #: passes that were replayed in vain, by their first call
        self.recorded = self.passes = 0

    @property
    def layers(self) -> int:
        """How many calls of layers are recorded, each shape counted."""
        found = ((chain, flight) for chain in self.chains.values() for flight in chain.flights)
        return sum(len(chain.calls) * len(flight.recordings) for chain, flight in found)

    def forget(self) -> None:
        """Drop all recordings."""
        for chain in self.chains.values():
            self.drop(chain)

    def drop(self, chain: Chain) -> None:
        """Drop the recordings of a chain. A backward that is still to come holds its own."""
        for flight in chain.flights:
            self._empty(flight)

    def _empty(self, flight: Flight) -> None:
        if not flight.free():
            flight.pool = next_pool()  # that backward's memory is no other recording's
        flight.recordings.clear()
        self.shared.bytes -= flight.bytes
        flight.bytes = flight.largest = 0
        self.shared.buffers.forget(flight)

    def settled(self, key: tuple) -> bool:
        """Whether passes that begin with this call differed more often than by chance."""
        return key in self.chains and self.chains[key].differed > DIFFERED

    def begun(self, link: Link, inputs: Sequence[Any], key: tuple) -> Chain | None:
        """The chain of a pass that this call begins, if its passes agreed."""
        chain = self.chains.get(key)
        if chain is not None and chain.agreed >= AGREED and not chain.begins_with(link, inputs):
            self.drop(chain)  # what stayed has changed: learn anew
            del self.chains[key]
        self.passes += 1
        if (chain := self.chains.get(key)) is None or chain.agreed < AGREED:
            return None
        chain.used_at = self.passes
        return chain

    def learn(self, seen: Pass) -> list[Call]:
        """Compare a pass with those before, and return calls that begin a chain of their own from now on."""
        begin: list[Call] = []
        if seen.learns:  # the last pass counts: the first compiles, and tunes kernels
            self.apart = (self.apart - {call.key for call in seen.calls}) | seen.apart
        key = seen.calls[0].key
        chain = self.chains.get(key)
        if chain is None:
            if not seen.learns:
                return begin
            self._clean()
            chain = self.chains[key] = Chain(seen.calls, used_at=self.passes)
        elif seen.learns:
            begin = [*chain.learn(seen.calls), *(chain.cut(self.apart) if chain.agreed else ())]
        shape = chain.shapes.setdefault(seen.shape, ShapeOfChain())
        shape.clock, shape.kind = shape.clock or seen.clock, seen.kind
        return begin

    def _clean(self) -> None:
        """Forget chains whose layers are gone, or are called otherwise: they hold weights."""
        for key, chain in [*self.chains.items()]:
            if self.passes - chain.used_at > UNUSED:
                self.drop(chain)
                del self.chains[key]

    def replayable(self, chain: Chain, inputs: Sequence[Any]) -> tuple[ShapeOfChain, Flight] | None:
        """What is known of passes on such inputs, and where one is recorded, unless it has to wait for more; None: it
        is not replayed.
        """
        shape = chain.shapes.get(shape_of(inputs))
        flight = None if shape is None else self._free(chain, shape)
        if shape is None or flight is None:
            return None
        recording = flight.recordings.get(shape)
        if recording is not None and not recording.fits():
            self.drop(chain)
            self.broken[chain.calls[0].key] += 1
            recording = None
        if recording is None and not self._pays(chain, shape, flight, inputs):
            return None
        return (shape, flight) if chain.ready or self.record(chain, shape, flight, inputs) is not None else None

    def _free(self, chain: Chain, shape: ShapeOfChain) -> Flight | None:
        """Memory that no backward needs any more, best where the shape is recorded; None where there is none."""
        free = [flight for flight in chain.flights if flight.free()]
        if not free and len(chain.flights) < MAX_FLIGHTS:
            free = [Flight()]
            chain.flights += free
        return max(free, key=lambda flight: shape in flight.recordings, default=None)

    def _pays(self, chain: Chain, shape: ShapeOfChain, flight: Flight, inputs: Sequence[Any]) -> bool:
        """Whether layers are launch-bound, and can be recorded."""
        if shape.refused or shape.clock is None or not shape.clock.decide():
            return False
        if len(flight.recordings) >= MAX_SHAPES:
            return False
        if any(call.key in self.apart for call in chain.calls):
            return False
        read = [inputs[position] for position in chain.read() if position < len(inputs)]
        layers = len(chain.calls)
        return recordable(read, self.shared.recorder.device) and self._room(flight, shape.clock, layers, inputs)

    def _room(self, flight: Flight, clock: Clock, layers: int, inputs: Sequence[Any]) -> bool:
        """Whether so many layers can be recorded, if need be without other shapes."""
        needed = clock.saved * layers
        grows = flight.largest < needed  # blocks of smaller shapes cannot be joined
        _, total = self.shared.recorder.memory(device_of(inputs))
        if grows and needed < flight.bytes and flight.bytes + needed > IN_BLOCKS * total:
            self._empty(flight)
            self.shared.recorder.release()
        flight.largest = max(flight.largest, needed)
        if self.shared.room(inputs, needed if grows else max(0, needed - flight.bytes), layers):
            return True
        if not flight.bytes:
            return False
        self._empty(flight)
        self.shared.recorder.release()
        return self.shared.room(inputs, needed, layers)

    def record(self, chain: Chain, shape: ShapeOfChain, flight: Flight, inputs: Sequence[Any]) -> StackRecording | None:
        """The recording of a shape; None where it cannot be made. The reason is kept."""
        if shape in flight.recordings:
            return flight.recordings[shape]
        shared, device = self.shared, device_of(inputs)
        before, _ = shared.recorder.memory(device)
        made = StackRecording(chain, inputs, partial(shared.buffers.of, flight), flight.pool)
        try:
            made.record(chain, inputs, shared.recorder, partial(unrecorded, shared))
        except Exception as error:  # layers are recorded one by one, or run as they did
            shared.failures.append(note("no-stack-recorded", detail=summary(error)))
            shape.refused = True
            return None
        taken = max(0, shared.recorder.memory(device)[0] - before)
        shared.bytes += taken
        flight.bytes += taken
        self.recorded += 1
        flight.recordings[shape] = made
        return made
