"""Recorders of the work of a device: CUDA graphs, or a test's replacement for them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from tunecompile._torch.card import total_memory
from tunecompile._torch.cuda import occupy_gpu

CYCLES = 2_000_000  #: of a GPU in a millisecond; few clocks are faster


class Recorder(Protocol):
    """Records the work that a function launches on the device, and replays it without the function."""

    device: str

    def record(
        self, run: Callable[[], Sequence[Any]], pool: Hashable, device: torch.device
    ) -> tuple[Sequence[Any], Callable[[], None]]:
        """Record one run.

        Args:
            run: launches the work, and returns tensors.
            pool: recordings of one pool share scratch memory, and what they gave back.
            device: to record on.

        Returns:
            The outputs, in fixed memory, and a function that replays the work and so fills them.
        """
        ...

    def give_back(self, value: Tensor, play: Callable[[], None]) -> Tensor:
        """The same memory without a claim to it: once `value` is gone, recordings of its pool may write there.

        As long as the result is held, so is `play`, which replays the recording: the pool stays while it does.
        """
        ...

    def mark(self, device: torch.device) -> Any:
        """A point in the device's work, after everything launched so far."""

    def elapsed(self, begin: Any, end: Any) -> float | None:
        """The device's milliseconds between two marks; None as long as they are not known."""

    def occupy(self, device: torch.device, milliseconds: float) -> None:
        """Let the device do nothing for about so long, while the host goes on: what follows is launched meanwhile."""

    def memory(self, device: torch.device) -> tuple[int, int]:
        """Bytes that this process has taken from the device, and bytes that the device has."""
        ...

    def release(self) -> None:
        """Free unused memory that the allocator holds: recordings cannot use it."""

    def forget(self) -> None:
        """Forget the pools: all recordings are gone, or will be."""


class CudaRecorder:
    """Recordings run one after the other on one stream, so they may share scratch memory."""

    device = "cuda"

    def __init__(self) -> None:
        self.pools: dict[tuple, tuple[Any, weakref.WeakSet[torch.cuda.CUDAGraph]]] = {}
        self.streams: dict[torch.device, torch.cuda.Stream] = {}

    def record(
        self, run: Callable[[], Sequence[Any]], pool: Hashable, device: torch.device
    ) -> tuple[Sequence[Any], Callable[[], None]]:
        with torch.cuda.device(
            device
        ):  # kernels for another device than the stream's would run now, and be missing from the graph
            handle, graphs = self.pools.get((pool, device), (None, ()))
            if not graphs:  # the allocator refuses to record into a pool whose recordings have all been freed
                handle, graphs = self.pools[pool, device] = torch.cuda.graph_pool_handle(), weakref.WeakSet()
            stream = self.streams.setdefault(device, torch.cuda.Stream())
            graph = torch.cuda.CUDAGraph()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                graph.capture_begin(pool=handle, capture_error_mode="thread_local")
                try:
                    outputs = run()
                finally:
                    graph.capture_end()
            graphs.add(graph)
            torch.cuda.current_stream().wait_stream(stream)
        return outputs, graph.replay

    def give_back(self, value: Tensor, play: Callable[[], None]) -> Tensor:
        storage = value.untyped_storage()
        memory = torch.as_tensor(_Memory(storage.data_ptr(), storage.nbytes(), play), device=value.device)
        return memory.view(value.dtype).as_strided(value.shape, value.stride(), value.storage_offset())

    def mark(self, device: torch.device) -> torch.cuda.Event:
        made = torch.cuda.Event(enable_timing=True)
        with torch.cuda.device(device):
            made.record()
        return made

    def elapsed(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float | None:
        return begin.elapsed_time(end) if begin.query() and end.query() else None

    def occupy(self, device: torch.device, milliseconds: float) -> None:
        with torch.cuda.device(device):
            occupy_gpu(int(milliseconds * CYCLES))

    def memory(self, device: torch.device) -> tuple[int, int]:
        counts = torch.cuda.memory_stats_as_nested_dict(device)  # a quarter of what `memory_reserved` takes
        return counts["reserved_bytes"]["all"]["current"], total_memory(device)

    def release(self) -> None:
        torch.cuda.empty_cache()

    def forget(self) -> None:
        self.pools.clear()


class _Memory:
    """Bytes of a GPU without a claim to them, in the form in which libraries share memory. Tensors over them hold this
    object, and so the recording's graph, without which the pool's memory could be freed under a pending backward.
    """

    def __init__(self, address: int, nbytes: int, play: Callable[[], None]):
        self.play = play
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}
