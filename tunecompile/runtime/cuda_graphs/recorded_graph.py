"""The compiled graphs of a region: their calls are timed, recorded and replayed, layer by layer and shape by shape."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto
from typing import Any, Protocol

import torch
from torch import Tensor

from tunecompile._torch.autograd import plain_tensors
from tunecompile.notes import Note
from tunecompile.runtime.cuda_graphs import launch_bound
from tunecompile.runtime.cuda_graphs.allowance import Allowance
from tunecompile.runtime.cuda_graphs.launch_bound import Clock, HostTime
from tunecompile.runtime.cuda_graphs.pool import MAX_TRIES, Holder, RecordingPool
from tunecompile.runtime.cuda_graphs.recording import (
    InputBuffers,
    LayerInputs,
    Recording,
    ShapeSlot,
    device_of,
    identity,
    storages,
)

Run = Callable[[list], Sequence[Any]]

OBSERVED = 2  #: calls of a layer that show which inputs are the same objects each time, before it is recorded
COMES_AGAIN = 2  #: the call of a layer under one shape that may be recorded: a shape that came once may be no more
#: shapes recorded for one compiled graph; further ones run unrecorded. Token counts are rounded to 128, so that these
#: are all up to 2,048 tokens, where launches are waited for.
MAX_SHAPES = 16
#: of the device's memory that recordings of one shape save in, above which half of a layer's calls must be of that
#: shape: calls of other shapes need as much memory beside. (DPO of an 8B: 16 GiB for one size of twenty.)
LARGE = 0.125


def recordable(inputs: Sequence[Any], kind: str) -> bool:
    """Whether all tensors lie on one device of that kind, and none overlaps itself."""
    device = device_of(inputs)
    return device.type == kind and all(
        value.device == device
        and not any(stride == 0 and size > 1 for size, stride in zip(value.shape, value.stride()))
        for value in inputs
        if isinstance(value, Tensor)
    )


class Replays(Holder, Protocol):
    """What the recordings of one model share: `replay.GraphReplays`."""

    allowance: Allowance | None
    clock: Clock | None
    copying: HostTime
    buffers: InputBuffers
    failures: list[Note]
    passes: int
    paused: bool
    tokens: int

    @property
    def learns(self) -> bool:
        """Whether layers may be recorded together soon, and so are not yet by themselves."""
        ...

    def room(self, inputs: Sequence[Any], needed: int = 0, layers: int = 0) -> bool:
        """Whether recordings of so many layers may take so many bytes more, as far as is known."""
        ...

    def record(
        self, graph: Any, pool: RecordingPool, inputs: Sequence[Any], fixed: set[int], handed: int | None
    ) -> Recording | None:
        """Record one call; None where it cannot be recorded."""
        ...


@contextlib.contextmanager
def unrecorded(replays: Replays | None) -> Iterator[None]:
    """Inside, no call is replayed or recorded: no backward follows, for which recordings would hold what is saved."""
    before = replays is not None and replays.paused
    if replays is not None:
        replays.paused = True
    try:
        yield
    finally:
        if replays is not None:
            replays.paused = before


class Phase(Enum):
    """The state of one layer under one shape, on its way to being replayed.

    Calls whose kernels do not wait have none, and neither have those of a graph that cannot be recorded.
    """

    UNKNOWN = auto()  #: the call runs: it is too early to time, to record or to know the times
    TIMING = auto()  #: the call runs, and is timed
    RECORDING = auto()  #: launch-bound, and called often enough
    REPLAYING = auto()  #: there is a recording


class Forward:
    """The compiled forward of a region, for all its layers.

    A layer under a shape goes UNKNOWN -> TIMING -> RECORDING -> REPLAYING. Timing is common to all layers
    of a shape, and what is known of a layer's inputs to all shapes. A layer is recorded anew where layers run in
    another order than they were recorded in, and UNKNOWN again where all recordings are dropped.
    """

    def __init__(self, shared: Replays, run: Run, handed: int, parameters: frozenset[int]):
        self.shared, self.run, self.handed, self.parameters = shared, run, handed, parameters
        self.clocks: dict[tuple, Clock] = {}
        self.places: dict[tuple, ShapeSlot] = {}
        self.layers: dict[tuple, LayerInputs] = {}
        self.known: set[tuple] = set()  #: layers that ran, by the addresses of their parameters
        self.pool = RecordingPool(shared, self.places)
        #: the last pass with a layer of which it was not known whether it is launch-bound
        self.undecided: int | None = None
        self.enabled = True

    def __call__(self, inputs: list) -> Sequence[Any]:
        if not self.enabled or self.shared.paused:
            return self.run(inputs)
        with plain_tensors():  # 4-bit parameters would answer each question in Python
            return self._call(inputs)

    def _call(self, inputs: list) -> Sequence[Any]:
        shape = tuple(value for value in inputs if not isinstance(value, Tensor))  # the sizes that are symbols
        clock = self.clocks.get(shape)
        if clock is None:
            shared = self.shared
            clock = self.clocks[shape] = Clock(shared.recorder, not self.clocks, shared.tokens, shared.copying)
        self.shared.clock = clock
        if clock.waiting is False:
            return self.run(inputs)
        place = self._place(shape, inputs)
        phase = self._phase(clock, place)
        if phase is Phase.TIMING:
            return self._timed(clock, inputs)
        recording = None
        if phase is Phase.RECORDING and self._may_record(clock, shape, place, inputs):
            recording = self._record(shape, place, inputs)
        elif phase is Phase.REPLAYING:
            recording = self._replayable(place, inputs)
        if recording is None and self.shared.allowance is None:
            return self.run(inputs)  # no plan has to weigh what a recording saves
        if recording is None:
            return clock.probe(self.run, inputs, device_of(inputs))
        self.pool.flying.append(recording)
        self.shared.owners |= recording.owned
        outputs = recording.replay(inputs)
        inputs.clear()
        return outputs

    def _timed(self, clock: Clock, inputs: list) -> Sequence[Any]:
        device, others = device_of(inputs), storages(inputs)
        outputs = clock.time(self.run, inputs, device, self.shared.passes)
        clock.saved = sum(size for at, size in storages(outputs[self.handed :]).items() if at not in others)
        return outputs

    def _phase(self, clock: Clock, place: ShapeSlot) -> Phase:
        if not clock.decide():
            self.undecided = self.shared.passes
            return Phase.TIMING if clock.first or place.seen > 1 or not clock.loads else Phase.UNKNOWN
        if place.recording is not None:
            return Phase.REPLAYING
        some_are_timed = self.undecided == self.shared.passes  # all layers are recorded in one step, so in their order
        if some_are_timed:
            ready = place.seen > launch_bound.SAMPLES + 1
        else:
            ready = place.layer.calls > OBSERVED and place.seen >= COMES_AGAIN
        return Phase.RECORDING if ready else Phase.UNKNOWN

    def _replayable(self, place: ShapeSlot, inputs: list) -> Recording | None:
        """The layer's recording, made anew where a layer before this one was recorded after it.

        None where this call has to run.
        """
        recording = place.recording
        if recording is None or not recording.fits(inputs) or not recording.free():
            return None
        if self.pool.in_order(recording):
            return recording
        return self._record(recording.shape, place, inputs) if place.tries < MAX_TRIES else None

    def saving(self, tokens: int) -> float:
        """Milliseconds that a recording saves of a call on so many tokens; 0 as long as that is not known.

        By such calls, or by all others where there was none.
        """
        told = [clock for clock in self.clocks.values() if clock.known]
        alike = [clock for clock in told if clock.tokens == tokens]
        return max((clock.saving(tokens) for clock in alike or told), default=0.0)

    def forget(self) -> None:
        """Drop the recordings."""
        self.pool.forget()
        self.places.clear()
        self.layers.clear()
        self.pool = RecordingPool(self.shared, self.places)

    def _place(self, shape: tuple, inputs: list) -> ShapeSlot:
        pointers = tuple(
            v.data_ptr() for i, v in enumerate(inputs) if i in self.parameters or isinstance(v, torch.nn.Parameter)
        )
        key = shape, *pointers
        place = self.places.get(key)
        if place is not None and place.recording is not None:
            return place
        layer = self.layers.get(pointers)
        if layer is None:
            self.known.add(pointers)
            layer = self.layers[pointers] = LayerInputs(inputs)
        else:
            layer.observe(inputs)
        if place is None:
            place = self.places[key] = ShapeSlot(layer)
        else:
            place.seen += 1
        return place

    def _may_record(self, clock: Clock, shape: tuple, place: ShapeSlot, inputs: list) -> bool:
        return (
            not self.shared.learns
            and (shape in self.pool.shapes or len(self.pool.shapes) < MAX_SHAPES)
            and (2 * place.seen >= place.layer.calls or not self._large(clock, device_of(inputs)))
            and self.shared.room(inputs)
            and recordable(inputs, self.shared.recorder.device)
        )

    def _large(self, clock: Clock, device: torch.device) -> bool:
        """Whether recordings of all layers save much; under a budget its plan decides."""
        if clock.large is None:  # asked at each call of a shape that is not recorded; all layers are known by the first
            clock.large = clock.saved * len(self.layers) > LARGE * self.shared.recorder.memory(device)[1]
        return clock.large and self.shared.allowance is None

    def _record(self, shape: tuple, place: ShapeSlot, inputs: list) -> Recording | None:
        fixed = place.layer.fixed()
        if not self.pool.hold(
            shape, sum(v.nbytes for i, v in enumerate(inputs) if isinstance(v, Tensor) and i not in fixed)
        ):
            return None
        self.pool.drop(place)
        made = place.recording = self.shared.record(self, self.pool, inputs, fixed, self.handed)
        place.tries += 1
        if made is None:
            self.enabled = False
            return None
        self.pool.shapes.add(shape)
        self.pool.saved += made.saved_bytes()
        made.shape, made.pool, made.owned = shape, self.pool, dict.fromkeys(made.saved_at(), made)
        place.kept = [identity(inputs[i]) for i in fixed]  # the recording points at them
        return made


class Backward:
    """The compiled backward of a region: recorded where its forward is, in the same memory.

    Its scratch may lie where forwards have theirs, but not where any of the same shape saves values: those are held
    while it is recorded. A forward that is recorded after it may save values there.
    """

    def __init__(self, shared: Replays, run: Run):
        self.shared, self.run, self.enabled = shared, run, True

    def __call__(self, inputs: list) -> Sequence[Any]:
        with plain_tensors():
            return self._call(inputs)

    def _call(self, inputs: list) -> Sequence[Any]:
        self.shared.passes += 1
        owners = self.shared.owners
        forward = (
            next((owners[at] for v in inputs if isinstance(v, Tensor) and (at := v.data_ptr()) in owners), None)
            if owners
            else None
        )
        if forward is None or not self.enabled:
            return self.run(inputs)
        if forward.backward is None and forward.pool.holds == forward.shape and self.shared.room(inputs):
            self._record(forward, inputs)
        recording = forward.backward
        if recording is None or not recording.fits(inputs) or not forward.pool.in_order(recording):
            return self.run(inputs)
        outputs = recording.replay(inputs)
        inputs.clear()
        return outputs

    def _record(self, forward: Recording, inputs: list) -> None:
        if recordable(inputs, self.shared.recorder.device):
            stays = forward.addresses()
            fixed = {i for i, value in enumerate(inputs) if isinstance(value, Tensor) and value.data_ptr() in stays}
            made = forward.backward = self.shared.record(self, forward.pool, inputs, fixed, None)
            if made is not None:
                made.shape, made.pool = forward.shape, forward.pool
        self.enabled = forward.backward is not None
