"""What records and replays the work of a device: CUDA graphs, or whatever stands in for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch


class Recorder(Protocol):
    """Records what a function does on the device, and does it again without the function."""

    device: str

    def record(
        self, run: Callable[[], Sequence[Any]], pool: str, device: torch.device
    ) -> tuple[Sequence[Any], Callable[[], None]]:
        """(outputs in fixed memory, replay); the outputs hold their values after `replay()`. Recordings of one pool share scratch."""

    def mark(self, device: torch.device) -> Any:
        """A point in the device's work: after all that was launched."""

    def elapsed(self, begin: Any, end: Any) -> float | None:
        """Milliseconds of the device's between two marks; None as long as they are not known."""

    def memory(self, device: torch.device) -> tuple[int, int]:
        """Bytes that are taken from the device by this process, and that exist."""

    def release(self) -> None:
        """Give back what is held for nothing: recordings cannot use it."""

    def forget(self) -> None:
        """All recordings are gone, or will be."""


class CudaRecorder:
    """Recordings run one after the other on one stream, so they may share scratch memory."""

    device = "cuda"

    def __init__(self) -> None:
        self.pools: dict[tuple, Any] = {}
        self.streams: dict[torch.device, torch.cuda.Stream] = {}

    def record(
        self, run: Callable[[], Sequence[Any]], pool: str, device: torch.device
    ) -> tuple[Sequence[Any], Callable[[], None]]:
        with torch.cuda.device(
            device
        ):  # kernels for another device than the stream's would run now, and be missing from the graph
            handle = self.pools.setdefault((pool, device), torch.cuda.graph_pool_handle())
            stream = self.streams.setdefault(device, torch.cuda.Stream())
            graph = torch.cuda.CUDAGraph()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                graph.capture_begin(pool=handle, capture_error_mode="thread_local")
                try:
                    outputs = run()
                finally:
                    graph.capture_end()
            torch.cuda.current_stream().wait_stream(stream)
        return outputs, graph.replay

    def mark(self, device: torch.device) -> torch.cuda.Event:
        made = torch.cuda.Event(enable_timing=True)
        with torch.cuda.device(device):
            made.record()
        return made

    def elapsed(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float | None:
        return begin.elapsed_time(end) if begin.query() and end.query() else None

    def memory(self, device: torch.device) -> tuple[int, int]:
        return torch.cuda.memory_reserved(device), torch.cuda.get_device_properties(device).total_memory

    def release(self) -> None:
        torch.cuda.empty_cache()

    def forget(self) -> None:
        self.pools.clear()  # the allocator refuses to record into a pool whose recordings have all been freed
