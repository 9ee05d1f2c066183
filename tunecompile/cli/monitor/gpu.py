"""Read the state of the machine: GPUs from NVML, host memory from psutil, and telemetry of training processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil

from tunecompile.runtime import telemetry_files
from tunecompile.runtime.telemetry_files import Status


@dataclass(frozen=True)
class GpuReading:
    """A GPU, in bytes and per cent; None if the driver does not report a figure (for a GPU instance, say)."""

    index: int
    uuid: str
    name: str
    used: int | None
    total: int | None
    busy: int | None  #: per cent of the last sampling period in which a kernel ran


@dataclass(frozen=True)
class Process:
    """A training process: its telemetry, and its host memory in bytes."""

    status: Status
    resident: int | None


@dataclass(frozen=True)
class MachineSnapshot:
    """All figures at one time. `why_no_gpu` is set if `gpus` is empty."""

    time: float
    gpus: tuple[GpuReading, ...]
    why_no_gpu: str | None
    processes: tuple[Process, ...]
    host_used: int
    host_total: int


class Nvml:
    """The GPUs of this machine. Without a driver or nvidia-ml-py there are none, and `missing` says why."""

    def __init__(self) -> None:
        self.handles: list[Any] = []
        self.missing: str | None = None
        try:
            import pynvml
        except ImportError:
            self.missing = "no GPU figures: nvidia-ml-py is not installed (pip install 'tunecompile[monitor]')"
            return
        self.library = pynvml
        try:
            pynvml.nvmlInit()
            self.handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError as error:
            self.missing = f"no NVIDIA GPU here ({error})"
        if not self.handles and self.missing is None:
            self.missing = "no NVIDIA GPU here"

    def gpus(self) -> tuple[GpuReading, ...]:
        """A reading of each GPU."""
        return tuple(self._gpu(index, handle) for index, handle in enumerate(self.handles))

    def _gpu(self, index: int, handle: Any) -> GpuReading:
        nvml = self.library
        memory = self._read(nvml.nvmlDeviceGetMemoryInfo, handle)
        rates = self._read(nvml.nvmlDeviceGetUtilizationRates, handle)
        return GpuReading(
            index,
            _text(self._read(nvml.nvmlDeviceGetUUID, handle)),
            _text(self._read(nvml.nvmlDeviceGetName, handle)),
            memory and memory.used,
            memory and memory.total,
            rates and rates.gpu,
        )

    def _read(self, function: Callable[[Any], Any], handle: Any) -> Any:
        """A figure; None if the driver does not have it for this device."""
        try:
            return function(handle)
        except self.library.NVMLError:
            return None


def _text(found: str | bytes | None) -> str:
    """Text, which older releases return as bytes."""
    return found.decode() if isinstance(found, bytes) else found or ""


@dataclass
class MachineReader:
    """Makes snapshots of the machine."""

    nvml: Nvml = field(default_factory=Nvml)

    def look(self, now: float) -> MachineSnapshot:
        """A snapshot. Raises UnsafeFolder if another user could write to the telemetry folder."""
        host = psutil.virtual_memory()
        return MachineSnapshot(
            now,
            self.nvml.gpus(),
            self.nvml.missing,
            tuple(Process(found, _resident(found.pid)) for found in telemetry_files.read_all()),
            host.total - host.available,
            host.total,
        )


def _resident(pid: int) -> int | None:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).memory_info().rss
    return None
