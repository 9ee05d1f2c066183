"""Launch-bound layers are replayed as CUDA graphs, under any loop: one recording for each layer and shape.

A small step takes the host longer to launch than the GPU to compute. Each compiled graph (the forward or the backward of a
region) is therefore wrapped. Where its kernels turn out to wait for the host, it is recorded once for every layer that runs it,
and replayed from then on: Dynamo's guards, autograd, hooks and the user's optimizer see an ordinary compiled function.

What differs from one call to the next is copied into the recording's buffers, and what the caller may keep (hidden states,
gradients) is copied out. What the forward saves for the backward stays in the recording's own memory; while an earlier
backward is still to come, the layer runs unrecorded, so that nothing it needs is overwritten.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tunecompile._torch.autograd import plain_tensors
from tunecompile.runtime.cuda_graphs import launch_bound
from tunecompile.runtime.cuda_graphs.capture import CudaRecorder, Recorder
from tunecompile.runtime.cuda_graphs.launch_bound import Clock

Run = Callable[[list], Sequence[Any]]

MAX_SHAPES = 4  #: shapes recorded for one compiled graph; further ones run unrecorded
MAX_TRIES = 4  #: recordings of one layer and shape, until the layers' order has settled
MAX_SHARE = 0.25  #: of the device's memory that recordings may take beyond what the process had taken before each
LARGE = 2 << 20  #: bytes; tensors of that size are copied by a launch of their own


@dataclass(frozen=True)
class Allowance:
    """Bytes of the device for the layers of one step, and what the step needs of them unrecorded. A layer that is recorded needs its share no more,
    if nothing but this step is ever run."""

    room: int
    step: int
    layers: int
    alone: bool

    def admits(self, taken: int, recorded: int) -> bool:
        """Whether one more may be recorded, where so many layers are, and hold so many bytes."""
        rest = max(0, self.layers - recorded) if self.alone else self.layers
        return taken + self.step * rest // self.layers < self.room


@dataclass
class Recording:
    """One compiled graph for one layer and one shape, in fixed memory."""

    number: int  #: in the order of recording
    play: Callable[[], None]
    fixed: list[tuple[int, int]]  #: (position, address) of inputs that must be where they were
    copied: list[tuple[int, Tensor]]  #: (position, buffer) of inputs that change
    outputs: list[Any]
    handed: int  #: so many outputs belong to the caller; the others are saved for the backward
    passed: dict[int, int]  #: outputs that are copied inputs, or views of them: position of the input
    saved: list[int]  #: outputs for the backward that lie in the recording's own memory
    lent: list[Tensor] = field(default_factory=list)  #: what was given out of the recording's own memory
    backward: Recording | None = None

    def free(self) -> bool:
        """Whether no backward that needs the saved values is still to come. (They have no other holder then.)"""
        return all(value._use_count() == 1 for value in self.lent)

    def fits(self, inputs: Sequence[Any]) -> bool:
        """Whether what must not move has not moved."""
        return all(inputs[position].data_ptr() == address for position, address in self.fixed)

    def replay(self, inputs: Sequence[Any]) -> list[Any]:
        copy_all([buffer for _, buffer in self.copied], [inputs[position] for position, _ in self.copied])
        self.play()
        return self.collect(inputs)

    def collect(self, inputs: Sequence[Any]) -> list[Any]:
        """The outputs: copies for the caller, the memory itself for the backward."""
        given = list(self.outputs)
        fresh = [i for i in range(self.handed) if isinstance(given[i], Tensor) and i not in self.passed]
        copies = [torch.empty_like(given[i]) for i in fresh]
        copy_all(copies, [given[i] for i in fresh])
        for i, copy in zip(fresh, copies):
            given[i] = copy
        for i, position in self.passed.items():
            source, view = inputs[position], given[i]
            offset = source.storage_offset() + view.storage_offset()  # buffers begin at their storage's beginning
            given[i] = (
                source if view is self._buffer(position) else source.as_strided(view.shape, view.stride(), offset)
            )
        self.lent = [given[i].detach() for i in self.saved]
        for i, value in zip(self.saved, self.lent):
            given[i] = value
        return given

    def _buffer(self, position: int) -> Tensor:
        return next(buffer for at, buffer in self.copied if at == position)

    def saved_at(self) -> set[int]:
        return {self.outputs[i].data_ptr() for i in self.saved}

    def addresses(self) -> set[int]:
        """Of everything that stays where it is from one replay to the next."""
        return self.saved_at() | {address for _, address in self.fixed}


class ShapeSlot:
    """One layer under one shape, before it is recorded: which of its inputs are the same objects at every call."""

    def __init__(self, inputs: Sequence[Any]):
        self.seen, self.tries, self.recording, self.kept = 1, 0, None, []
        self.inputs = [weakref.ref(_identity(value)) if isinstance(value, Tensor) else None for value in inputs]

    def observe(self, inputs: Sequence[Any]) -> None:
        self.seen += 1
        self.inputs = [
            ref if ref is not None and ref() is _identity(value) else None for ref, value in zip(self.inputs, inputs)
        ]

    def fixed(self) -> set[int]:
        return {i for i, ref in enumerate(self.inputs) if ref is not None}


class GraphReplays:
    """What the recordings of one model share.

    Forwards share one pool, backwards another. What a forward saves may lie where an *earlier* recording has scratch, since that was
    free by then; so a forward is replayed only while no later one's saved values are still needed. Layers recorded in the order
    in which they run always satisfy that.
    """

    def __init__(self, recorder: Recorder | None = None):
        self.recorder = recorder or CudaRecorder()
        self.owners: dict[int, Recording] = {}  #: address of a saved value -> the forward that saves it
        self.buffers: dict[tuple, Tensor] = {}
        self.failures: list[str] = []
        self.flying: list[Recording] = []  #: forwards whose backward is still to come, by rising number
        self.graphs: weakref.WeakSet[Forward] = weakref.WeakSet()
        self.recorded = 0
        self.passes = 0  #: told apart by the backwards between them
        self.allowance: Allowance | None = None  #: by the plan of memory; None where there is none
        self.bytes = 0  #: what recordings made the process take from the device

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

    def in_order(self, recording: Recording) -> bool:
        """Whether no saved value that may lie in this recording's scratch is still needed."""
        while self.flying and self.flying[-1].free():
            self.flying.pop()
        return not self.flying or self.flying[-1].number < recording.number

    def forget(self) -> None:
        """Drop all recordings; what a backward still needs of one lives until then."""
        for graph in list(self.graphs):
            graph.places.clear()
        self.owners.clear()
        self.flying.clear()
        self.buffers.clear()
        self.recorder.forget()
        self.bytes = 0

    def launching(self) -> float:
        """Milliseconds in which the host launches the forwards of one step, of layers whose kernels wait for it; 0 as long as that is not known."""
        found: dict[tuple, float] = {}
        for graph in (
            self.graphs
        ):  # a layer has several, one for each plan it has followed, and each may have run under several shapes
            for shape, *pointers in graph.places:
                layer = tuple(pointers)
                found[layer] = max(found.get(layer, 0.0), graph.clocks[shape].launching)
        return sum(found.values())

    def room(self, inputs: Sequence[Any]) -> bool:
        """Whether recordings may take more memory. What is recorded stays so."""
        if self.bytes <= MAX_SHARE * self.recorder.memory(_device(inputs))[1] and self._admitted():
            return True
        full = f"recordings hold {self.bytes / 2**30:.1f} GiB: further layers or shapes get no CUDA graph"
        if self.bytes and full not in self.failures:
            self.failures.append(full)
        return False

    def _admitted(self) -> bool:
        """By the plan of memory, where there is one."""
        if self.allowance is None:
            return True
        recorded = sum(place.recording is not None for graph in self.graphs for place in graph.places.values())
        admitted = self.allowance.admits(self.bytes, recorded)
        if admitted and not recorded:
            self.recorder.release()  # once: what comes next is recorded
        return admitted

    def record(
        self, graph: Forward | Backward, inputs: Sequence[Any], fixed: set[int], handed: int | None
    ) -> Recording | None:
        """Record one call. None where it cannot be recorded; the reason is kept."""
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
            outputs, play = self.recorder.record(lambda: graph.run(list(arguments)), type(graph).__name__, device)
        except Exception as error:  # a call that waits for the device, say: it runs as it did
            self.failures.append(f"no CUDA graph: {type(error).__name__}: {str(error).strip().splitlines()[0][:200]}")
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
        self.bytes += max(0, self.recorder.memory(device)[0] - before)
        return Recording(
            self.recorded, play, [(i, inputs[i].data_ptr()) for i in fixed], copied, outputs, handed, passed, saved
        )

    def leave_out(self, device: torch.device) -> None:
        """Say why layers are not recorded."""
        if device.type == self.recorder.device:
            self.failures.append(
                "no CUDA graph: several processes share the layers' weights, which lie elsewhere at every call"
            )

    def notes(self) -> list[str]:
        said = list(dict.fromkeys(self.failures))
        if self.recorded:
            said.append(
                f"launch-bound layers are replayed as CUDA graphs ({self.recorded} recordings, {self.bytes / 2**20:.0f} MiB)"
            )
        return said

    def _buffer(self, graph: Any, position: int, like: Tensor) -> Tensor:
        """Shared by all layers: what is copied in is used up before the next layer runs."""
        key = (id(graph), position, tuple(like.shape), like.stride(), like.dtype, like.device)
        if key not in self.buffers:
            self.buffers[key] = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
        return self.buffers[key]


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Few launches: `_foreach_copy_` joins small tensors of one dtype. (It gives a block 64 K elements, too few blocks for a large one alone.)"""
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources):
        if target.nbytes >= LARGE:
            target.copy_(source)
            continue
        of_dtype = by_dtype.setdefault(target.dtype, ([], []))
        of_dtype[0].append(target)
        of_dtype[1].append(source)
    for some_targets, some_sources in by_dtype.values():
        torch._foreach_copy_(some_targets, some_sources)


def _identity(value: Tensor) -> Any:
    """What is the same at every call: of a matrix of weights what describes it (tunecompile/runtime/memory/weight_cache.py), since the weights hold its memory."""
    return getattr(value, "_matrix", value)


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


class Forward:
    """The compiled forward of a region, for all its layers."""

    def __init__(self, shared: GraphReplays, run: Run, handed: int, parameters: frozenset[int]):
        self.shared, self.run, self.handed, self.parameters = shared, run, handed, parameters
        self.clocks: dict[tuple, Clock] = {}
        self.places: dict[tuple, ShapeSlot] = {}
        self.enabled = True

    def __call__(self, inputs: list) -> Sequence[Any]:
        if not self.enabled:
            return self.run(inputs)
        with plain_tensors():  # 4-bit parameters would answer each question in Python
            return self._call(inputs)

    def _call(self, inputs: list) -> Sequence[Any]:
        shape = tuple(value for value in inputs if not isinstance(value, Tensor))  # the sizes that are symbols
        clock = self.clocks.setdefault(shape, Clock(self.shared.recorder))
        if clock.waiting is False:
            return self.run(inputs)
        place = self._place(shape, inputs)
        if not clock.decide():
            return (
                clock.time(self.run, inputs, _device(inputs), self.shared.passes)
                if clock.first or place.seen > 1
                else self.run(inputs)
            )
        if (
            place.seen > launch_bound.SAMPLES + 1
            and place.recording is None
            and recordable(inputs, self.shared.recorder.device)
            and self._room(shape, inputs)
        ):
            self._record(place, inputs)  # all layers in the same step, however many of them share this graph
        recording = place.recording
        if recording is None or not recording.fits(inputs) or not recording.free():
            return self.run(inputs)
        if not self.shared.in_order(recording):  # a layer before this one was recorded after it
            if place.tries >= MAX_TRIES or (recording := self._record(place, inputs)) is None:
                return self.run(inputs)
        self.shared.flying.append(recording)
        outputs = recording.replay(inputs)
        inputs.clear()
        return outputs

    def _place(self, shape: tuple, inputs: list) -> ShapeSlot:
        key = (
            shape,
            *(v.data_ptr() for i, v in enumerate(inputs) if i in self.parameters or isinstance(v, torch.nn.Parameter)),
        )
        place = self.places.get(key)
        if place is None:
            place = self.places[key] = ShapeSlot(inputs)
        elif place.recording is None:
            place.observe(inputs)
        return place

    def _room(self, shape: tuple, inputs: list) -> bool:
        return len(
            {key[0] for key, place in self.places.items() if place.recording} | {shape}
        ) <= MAX_SHAPES and self.shared.room(inputs)

    def _record(self, place: ShapeSlot, inputs: list) -> Recording | None:
        owners = self.shared.owners
        for address in place.recording.saved_at() if place.recording else ():
            del owners[address]
        place.recording = None  # its memory is free again
        place.recording = self.shared.record(self, inputs, place.fixed(), self.handed)
        place.tries += 1
        if place.recording is None:
            self.enabled = False
            return None
        place.kept = [_identity(inputs[i]) for i in place.fixed()]  # the recording points at them
        owners |= {address: place.recording for address in place.recording.saved_at()}
        return place.recording


class Backward:
    """The compiled backward of a region: recorded where its forward was."""

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
        if forward.backward is None and self.shared.room(inputs):
            self._record(forward, inputs)
        recording = forward.backward
        if recording is None or not recording.fits(inputs):
            return self.run(inputs)
        outputs = recording.replay(inputs)
        inputs.clear()
        return outputs

    def _record(self, forward: Recording, inputs: list) -> None:
        if recordable(inputs, self.shared.recorder.device):
            stays = forward.addresses()
            fixed = {i for i, value in enumerate(inputs) if isinstance(value, Tensor) and value.data_ptr() in stays}
            forward.backward = self.shared.record(self, inputs, fixed, None)
        self.enabled = forward.backward is not None
