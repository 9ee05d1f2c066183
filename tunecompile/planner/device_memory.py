"""How many bytes a device holds, and the budgets that `optimize(memory=...)` accepts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from tunecompile._torch.card import total_memory
from tunecompile._torch.distributed import local_part
from tunecompile.errors import UnknownBudget

Spec = int | float | str | None
_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
MARGIN = 0.05  #: share of a budget left for fragmentation, until a step has shown how much that is
CONTEXT = 1 << 30  #: bytes that a process holds beside torch's allocator at most; more is other processes' memory


class Gauge(Protocol):
    """The memory of one device, in bytes."""

    def allocated(self) -> int:
        """Bytes in tensors now."""
        ...

    def peak(self) -> tuple[int, int]:
        """The most bytes in tensors, and the most held by torch's allocator, since `forget_peak` or the start."""
        ...

    def release(self) -> None:
        """Return unused blocks of torch's allocator to the device."""
        ...

    def failures(self) -> int:
        """Allocations that failed since the process began."""
        ...

    def forget_peak(self) -> None:
        """Start counting the peak anew."""
        ...

    def outside(self) -> int:
        """Bytes that this process holds beside torch's allocator: context and libraries."""
        ...

    def available(self) -> int:
        """Bytes that torch's allocator could hold if it took all that is free."""
        ...

    def total(self) -> int:
        """Bytes of the device."""
        ...


@dataclass(frozen=True)
class CudaGauge:
    """The memory of a GPU, by the books of torch's allocator and of the driver."""

    device: torch.device

    def allocated(self) -> int:
        """Bytes in tensors now."""
        counts = torch.cuda.memory_stats_as_nested_dict(self.device)  # a quarter of what `memory_allocated` takes
        return counts["allocated_bytes"]["all"]["current"] if counts else 0

    def peak(self) -> tuple[int, int]:
        """The most bytes in tensors and in the allocator."""
        return torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)

    def release(self) -> None:
        """Return unused blocks."""
        torch.cuda.empty_cache()

    def failures(self) -> int:
        """Allocations that failed."""
        return torch.cuda.memory_stats(self.device).get("num_ooms", 0)

    def forget_peak(self) -> None:
        """Start counting the peak anew."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def outside(self) -> int:
        """Bytes of context and libraries."""
        free, total = torch.cuda.mem_get_info(self.device)
        return min(total - free - torch.cuda.memory_reserved(self.device), CONTEXT)

    def available(self) -> int:
        """Free bytes and those the allocator holds, within `set_per_process_memory_fraction`."""
        free = torch.cuda.mem_get_info(self.device)[0] + torch.cuda.memory_reserved(self.device)
        whole = torch.cuda.get_device_properties(self.device).total_memory
        return min(free, int(torch.cuda.get_per_process_memory_fraction(self.device) * whole))

    def total(self) -> int:
        """Bytes of the GPU."""
        return total_memory(self.device)


def shown(nbytes: int) -> str:
    """Bytes as text: `1.50 GiB`, `12.00 MiB`."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.2f} MiB"


@dataclass
class HostGauge:
    """The memory of a CPU, whose allocator counts nothing: a budget there bounds the activations that layers save."""

    def allocated(self) -> int:
        """Always 0 bytes: not known."""
        return 0

    outside = failures = allocated

    def peak(self) -> tuple[int, int]:
        """Always 0 bytes: not known."""
        return 0, 0

    def release(self) -> None:
        """Nothing to return."""

    forget_peak = release

    def available(self) -> int:
        """Bytes of the machine."""
        return self.total()

    def total(self) -> int:
        """Bytes of the machine."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def gauge_of(device: torch.device) -> Gauge:
    """The gauge of a device."""
    return CudaGauge(device) if device.type == "cuda" else HostGauge()


def budget_bytes(spec: Spec, on: Gauge) -> int | Literal["auto"] | None:
    """A budget as bytes.

    Args:
        spec: "20GiB", "500 MB", a share of the device such as 0.8, bytes as an integer, "auto" or None.
        on: the device that a share is of.

    Returns:
        Bytes; "auto" and None as they are.

    Raises:
        UnknownBudget: the spec is none of these, or no positive amount.
    """
    if spec is None:
        return None
    if spec == "auto":
        return "auto"
    if isinstance(spec, float) and 0 < spec <= 1:
        return int(spec * on.total())
    if isinstance(spec, int) and not isinstance(spec, bool) and spec > 1:
        return spec
    parts = (
        re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B)\s*", spec, re.IGNORECASE) if isinstance(spec, str) else None
    )
    if parts is not None and (amount := int(float(parts[1]) * _UNITS[parts[2].upper()])) > 0:
        return amount
    raise UnknownBudget(given=repr(spec))


def host_budget_bytes(spec: Spec) -> int | None:
    """`host_memory=` as bytes of pinned memory: 0 for none; None, for None and "auto", for half of what is available.

    Raises:
        UnknownBudget: as `budget_bytes` does.
    """
    limit = 0 if spec == 0 else budget_bytes(spec, HostGauge())
    return limit if isinstance(limit, int) else None


def part_bytes(tensor: Tensor) -> int:
    """Bytes that this process holds of a tensor: of a DTensor its local part."""
    part = local_part(tensor)
    return part.numel() * part.element_size()


def gradient_bytes(trained: Iterable[Tensor]) -> int:
    """Bytes of the gradients of trained parameters on this process."""
    return sum(map(part_bytes, trained))


def moment_bytes(trained: Iterable[Tensor]) -> int:
    """Bytes of AdamW's two moments, each in the parameter's shape and dtype."""
    return 2 * gradient_bytes(trained)
