"""Launch-bound layers are replayed as CUDA graphs, under any loop: one recording for each layer and shape.

A small step takes the host longer to launch than the GPU to compute. Each compiled graph (the forward or the backward
of a region) is therefore wrapped. Where it is launch-bound, it is recorded once for every layer that runs
it, and replayed from then on: Dynamo's guards, autograd, hooks and the user's optimizer see an ordinary compiled
function.

Inputs that differ from call to call are copied into the recording's buffers, and outputs that the caller may keep
(hidden states, gradients) are copied out. Tensors saved for the backward stay in the recording's own memory. While an
earlier backward is still to come, the layer runs unrecorded, so that no replay overwrites them.

Recordings of several shapes share their memory, as batches do: one shape is in use at a time, and together they take
what the largest one needs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

from tunecompile._torch.autograd import plain_tensors
from tunecompile.notes import Note, note
from tunecompile.runtime.cuda_graphs import launch_bound
from tunecompile.runtime.cuda_graphs.allowance import Allowance
from tunecompile.runtime.cuda_graphs.capture import CudaRecorder, Recorder
from tunecompile.runtime.cuda_graphs.launch_bound import Clock, HostTime
from tunecompile.runtime.cuda_graphs.pool import MAX_TRIES, RecordingPool
from tunecompile.runtime.cuda_graphs.recording import LayerInputs, Recording, ShapeSlot, identity

Run = Callable[[list], Sequence[Any]]

OBSERVED = 2  #: calls of a layer that show which inputs are the same objects each time, before it is recorded
COMES_AGAIN = 2  #: the call of a layer under one shape that may be recorded: a shape that came once may be no more
#: shapes recorded for one compiled graph; further ones run unrecorded. Token counts are rounded to 128, so that these
#: are all up to 2,048 tokens, where launches are waited for.
MAX_SHAPES = 16
MAX_SHARE = 0.25  #: of the device's memory that recordings may take beyond what the process had taken before each


class GraphReplays:
    """State that the recordings of one model share."""

    def __init__(self, recorder: Recorder | None = None):
        self.recorder = recorder or CudaRecorder()
        self.owners: dict[int, Recording] = {}  #: address of a saved value -> the forward that wrote it last
        self.buffers: dict[tuple, Tensor] = {}
        self.failures: list[Note] = []
        self.graphs: weakref.WeakSet[Forward] = weakref.WeakSet()
        self.recorded = 0
        self.clock: Clock | None = None  #: of the forward that ran last, until somebody asks
        self.passes = 0  #: told apart by the backwards between them
        self.allowance: Allowance | None = None  #: by the plan of memory; None where there is none
        self.bytes = 0  #: that recordings made the process take from the device
        self.buffered = 0  #: bytes beside these that inputs are copied to, of all shapes
        self.tokens = 0  #: of the step; 0 where no plan of memory depends on it
        self.copying = HostTime()  #: on copies of saved tensors

    @property
    def device(self) -> str:
        """The type of device whose graphs are recorded."""
        return self.recorder.device

    def forward(self, run: Run, handed: int, parameters: Sequence[int] = ()) -> Forward:
        made = Forward(self, run, handed, frozenset(parameters))
        self.graphs.add(made)
        return made

    def backward(self, run: Run) -> Backward:
        return Backward(self, run)

    def forget(self) -> None:
        """Drop all recordings. Values that a pending backward needs live until then."""
        for graph in list(self.graphs):
            graph.forget()
        self.owners.clear()
        self.buffers.clear()
        self.recorder.forget()
        self.bytes = self.buffered = 0

    @property
    def closed(self) -> bool:
        """Whether the memory plan leaves recordings no room, and there is none."""
        return self.allowance is not None and self.allowance.room <= 0 and not self.bytes

    def saved_bytes(self) -> int:
        """Bytes in tensors that recordings hold from step to step: what forwards save, of one shape at a time."""
        return sum(graph.pool.saved for graph in self.graphs)

    def last_waits(self) -> bool | None:
        """Whether launches of the forward that ran last are waited for; None where that is not known, or was asked."""
        clock, self.clock = self.clock, None
        return None if clock is None else clock.waiting

    def saving(self, tokens: int) -> float:
        """Milliseconds of a step's forwards on so many tokens that recordings of all layers save; 0 if not known."""
        found: dict[tuple, float] = {}
        for graph in self.graphs:  # a layer has one for each plan that it has followed
            ms = graph.saving(tokens)
            found |= {layer: max(found.get(layer, 0.0), ms) for layer in graph.known}
        return sum(found.values())

    def room(self, inputs: Sequence[Any]) -> bool:
        """Whether recordings may take more memory. What is recorded stays so."""
        if self._admitted() and self.bytes <= MAX_SHARE * self.recorder.memory(_device(inputs))[1]:
            return True
        if self.bytes:
            full = note("cuda-graphs-full", detail=f"{self.bytes / 2**30:.1f} GiB")
            self.failures += [full] if full not in self.failures else []
        return False

    def _admitted(self) -> bool:
        """Whether the memory plan, if there is one, admits another recording."""
        if self.allowance is None:
            return True
        # asked at each call of a layer
        return self.bytes < self.allowance.room and self.allowance.admits(self.bytes, self._layers())

    def _layers(self) -> int:
        """How many layers are recorded, each shape counted."""
        return sum(place.recording is not None for graph in self.graphs for place in graph.places.values())

    def record(
        self, graph: Forward | Backward, pool: RecordingPool, inputs: Sequence[Any], fixed: set[int], handed: int | None
    ) -> Recording | None:
        """Record one call. None where it cannot be recorded; the reason is kept.

        Args:
            graph: whose call it is.
            pool: whose memory the recording shares.
            inputs: of the call.
            fixed: positions of inputs that are the same tensors at every call.
            handed: how many outputs are the caller's; None for all.
        """
        if self.allowance is not None and not self._layers():
            self.recorder.release()  # recordings cannot use what the allocator holds of unrecorded steps
        copied = [
            (i, self._buffer(graph, i, value))
            for i, value in enumerate(inputs)
            if isinstance(value, Tensor) and i not in fixed
        ]
        arguments = list(inputs)
        for position, buffer in copied:
            arguments[position] = buffer
        device = _device(inputs)
        before, _ = self.recorder.memory(device)
        try:
            outputs, play = self.recorder.record(lambda: graph.run(list(arguments)), pool.number, device)
        except Exception as error:  # a call that waits for the device, say: it runs as it did
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
            self.failures.append(note("no-cuda-graph", detail=reason))
            return None
        outputs = list(outputs)
        handed = len(outputs) if handed is None else handed
        storages = {
            i: _storage(value) for i, value in enumerate(outputs) if isinstance(value, Tensor) and value.numel()
        }
        buffers, foreign = (
            {_storage(buffer): position for position, buffer in copied},
            {_storage(inputs[i]) for i in fixed},
        )
        passed = {i: buffers[storage] for i, storage in storages.items() if storage in buffers}
        saved = [
            i for i, storage in storages.items() if i >= handed and storage not in buffers and storage not in foreign
        ]
        self.recorded += 1
        taken = max(0, self.recorder.memory(device)[0] - before)
        self.bytes += taken
        pool.bytes += taken
        fixed_at = [(i, inputs[i].data_ptr()) for i in fixed]
        made = Recording(self.recorded, play, fixed_at, copied, outputs, handed, passed, saved)
        others = buffers.keys() | foreign
        # copied as soon as they are computed, and then free
        made.give_back([i for i, at in storages.items() if i < handed and at not in others], self.recorder)
        return made

    def leave_out(self, device: torch.device) -> None:
        """Note why layers are not recorded."""
        if device.type == self.recorder.device:
            self.failures.append(note("no-cuda-graph", detail=note("weights-of-several-processes")))

    def notes(self) -> list[Note]:
        """Recordings, and why others were not made."""
        made = (
            [note("cuda-graphs", detail=f"{self.bytes / 2**20:.0f} MiB", count=self.recorded)] if self.recorded else []
        )
        return list(dict.fromkeys(self.failures)) + made

    def _buffer(self, graph: Any, position: int, like: Tensor) -> Tensor:
        """A buffer for an input, shared by all layers: its values are used up before the next layer runs."""
        key = (id(graph), position, tuple(like.shape), like.stride(), like.dtype, like.device)
        if key not in self.buffers:
            made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
            self.buffers[key], self.buffered = made, self.buffered + made.nbytes
        return self.buffers[key]


def _storage(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


def _device(inputs: Sequence[Any]) -> torch.device:
    return next((value.device for value in inputs if isinstance(value, Tensor)), torch.device("cpu"))


def recordable(inputs: Sequence[Any], kind: str) -> bool:
    """Whether all tensors lie on one device of that kind, and none overlaps itself."""
    device = _device(inputs)
    return device.type == kind and all(
        value.device == device
        and not any(stride == 0 and size > 1 for size, stride in zip(value.shape, value.stride()))
        for value in inputs
        if isinstance(value, Tensor)
    )


class Phase(Enum):
    """The state of one layer under one shape, on its way to being replayed."""

    UNKNOWN = auto()  #: the call runs: it is too early to time, to record or to know the times
    TIMING = auto()  #: the call runs, and is timed
    RECORDING = auto()  #: launch-bound, and called often enough
    REPLAYING = auto()  #: there is a recording
    OFF = auto()  #: kernels do not wait, or the graph cannot be recorded


class Forward:
    """The compiled forward of a region, for all its layers.

    A layer under a shape goes UNKNOWN -> TIMING -> RECORDING -> REPLAYING, or ends OFF. Timing is common to all layers
    of a shape, and what is known of a layer's inputs to all shapes. A layer is recorded anew where layers run in
    another order than they were recorded in, and UNKNOWN again where all recordings are dropped.
    """

    def __init__(self, shared: GraphReplays, run: Run, handed: int, parameters: frozenset[int]):
        self.shared, self.run, self.handed, self.parameters = shared, run, handed, parameters
        self.clocks: dict[tuple, Clock] = {}
        self.places: dict[tuple, ShapeSlot] = {}
        self.layers: dict[tuple, LayerInputs] = {}
        self.known: set[tuple] = set()  #: layers that ran, by the addresses of their parameters
        self.pool = RecordingPool(shared, self.places)
        self.undecided = -1  #: the last pass with a layer of which it was not known whether it is launch-bound
        self.enabled = True

    def __call__(self, inputs: list) -> Sequence[Any]:
        if not self.enabled:
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
            return clock.time(self.run, inputs, _device(inputs), self.shared.passes)
        recording = None
        if phase is Phase.RECORDING and self._room(shape, inputs) and recordable(inputs, self.shared.recorder.device):
            recording = self._record(shape, place, inputs)
        elif phase is Phase.REPLAYING:
            recording = self._replayable(place, inputs)
        if recording is None and self.shared.allowance is None:
            return self.run(inputs)  # no plan has to weigh what a recording saves
        if recording is None:
            return clock.probe(self.run, inputs, _device(inputs))
        self.pool.flying.append(recording)
        self.shared.owners |= recording.owned
        outputs = recording.replay(inputs)
        inputs.clear()
        return outputs

    def _phase(self, clock: Clock, place: ShapeSlot) -> Phase:
        if not self.enabled or clock.waiting is False:
            return Phase.OFF
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

    def _room(self, shape: tuple, inputs: list) -> bool:
        return (shape in self.pool.shapes or len(self.pool.shapes) < MAX_SHAPES) and self.shared.room(inputs)

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

    def __init__(self, shared: GraphReplays, run: Run):
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
