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
from typing import Any

import torch
from torch import Tensor

from tunecompile.errors import summary
from tunecompile.notes import Note, note
from tunecompile.runtime.cuda_graphs.allowance import Allowance
from tunecompile.runtime.cuda_graphs.capture import CudaRecorder, Recorder
from tunecompile.runtime.cuda_graphs.launch_bound import Clock, HostTime
from tunecompile.runtime.cuda_graphs.pool import RecordingPool
from tunecompile.runtime.cuda_graphs.recorded_graph import Backward, Forward, Run
from tunecompile.runtime.cuda_graphs.recording import InputBuffers, Recording, device_of
from tunecompile.runtime.cuda_graphs.stacks import Stacks

MAX_SHARE = 0.25  #: of the device's memory that recordings may take beyond what the process had taken before each


class GraphReplays:
    """State that the recordings of one model share."""

    def __init__(self, recorder: Recorder | None = None):
        self.recorder = recorder or CudaRecorder()
        self.owners: dict[int, Recording] = {}  #: address of a saved value -> the forward that wrote it last
        self.buffers = InputBuffers()  #: beside `bytes`
        self.failures: list[Note] = []
        self.graphs: weakref.WeakSet[Forward] = weakref.WeakSet()
        self.recorded = 0
        self.clock: Clock | None = None  #: of the forward that ran last, until somebody asks
        self.passes = 0  #: told apart by the backwards between them
        self.allowance: Allowance | None = None  #: by the plan of memory; None where there is none
        self.bytes = 0  #: that recordings made the process take from the device
        self.tokens = 0  #: of the step; 0 where no plan of memory depends on it
        self.copying = HostTime()  #: on copies of saved tensors
        self.paused = False  #: whether calls run that no backward follows
        self.stacks = Stacks(self)

    @property
    def device(self) -> str:
        """The type of device whose graphs are recorded."""
        return self.recorder.device

    def forward(self, run: Run, handed: int, parameters: Sequence[int] = ()) -> Forward:
        made = Forward(self, run, handed, frozenset(parameters))
        self.graphs.add(made)
        return made

    def link(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """A compiled graph of layers, as it is called from now on: alone, or as a part of a recorded stack."""
        return self.stacks.link(run)

    def backward(self, run: Run) -> Backward:
        return Backward(self, run)

    def forget(self) -> None:
        """Drop all recordings. Values that a pending backward needs live until then."""
        self.stacks.forget()
        for graph in list(self.graphs):
            graph.forget()
        self.owners.clear()
        self.buffers = InputBuffers()
        self.recorder.forget()
        self.bytes = 0

    @property
    def learns(self) -> bool:
        """Whether layers may be recorded together soon, and so are not yet by themselves."""
        return self.stacks.watcher.learns

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

    def room(self, inputs: Sequence[Any], needed: int = 0, layers: int = 0) -> bool:
        """Whether recordings may take more memory. What is recorded stays so.

        Args:
            inputs: of the call that is to be recorded.
            needed: bytes that its recording takes, as far as is known.
            layers: how many it has, where that is known.
        """
        device = device_of(inputs)
        if (
            self._admitted(needed, layers) and self.bytes + needed <= MAX_SHARE * self.recorder.memory(device)[1]
        ):  # in this order: to look at memory takes a while
            return True
        if self.bytes:
            full = note("cuda-graphs-full", detail=f"{self.bytes / 2**30:.1f} GiB")
            self.failures += [full] if full not in self.failures else []
        return False

    def _admitted(self, needed: int = 0, layers: int = 0) -> bool:
        """Whether the memory plan, if there is one, admits another recording."""
        if self.allowance is None:
            return True
        # asked at each call of a layer
        taken = self.bytes + needed
        return taken < self.allowance.room and self.allowance.admits(taken, self._layers() + layers)

    def _layers(self) -> int:
        """How many layers are recorded, each shape counted."""
        alone = sum(place.recording is not None for graph in self.graphs for place in graph.places.values())
        return alone + self.stacks.chains.layers

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
            (i, self.buffers.of(graph, i, value))
            for i, value in enumerate(inputs)
            if isinstance(value, Tensor) and i not in fixed
        ]
        arguments = list(inputs)
        for position, buffer in copied:
            arguments[position] = buffer
        device = device_of(inputs)
        before, _ = self.recorder.memory(device)
        try:
            outputs, play = _capture(self.recorder, lambda: graph.run(list(arguments)), pool, device)
        except Exception as error:  # a call that waits for the device, say: it runs as it did
            self.failures.append(note("no-cuda-graph", detail=summary(error)))
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

    def notes(self) -> list[Note]:
        """Recordings, and why others were not made."""
        made = (
            [note("cuda-graphs", detail=f"{self.bytes / 2**20:.0f} MiB", count=self.recorded)] if self.recorded else []
        )
        stacks = [note("stacks-replayed", count=self.stacks.chains.recorded)] if self.stacks.chains.recorded else []
        return list(dict.fromkeys(self.failures)) + made + stacks


def _capture(
    recorder: Recorder, run: Callable[[], Sequence[Any]], pool: RecordingPool, device: torch.device
) -> tuple[Sequence[Any], Callable[[], None]]:
    """Record a run; once more where memory ran out, since the allocator frees none that it holds meanwhile."""
    try:
        return recorder.record(run, pool.number, device)
    except torch.OutOfMemoryError:
        recorder.release()
    return recorder.record(run, pool.number, device)


def _storage(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()
