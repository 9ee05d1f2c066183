"""What a device holds, and what `optimize(memory=...)` may be told."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

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
MARGIN = 0.05  #: of a budget, for what the allocator cannot use between blocks, until a step has shown how much that is


class Gauge(Protocol):
    """Bytes on one device."""

    def allocated(self) -> int:
        """In tensors now."""

    def peak(self) -> tuple[int, int]:
        """In tensors, and held by torch's allocator, at the most since the process began or somebody reset the counts."""

    def release(self) -> None:
        """Give back what torch's allocator holds for nothing."""

    def failures(self) -> int:
        """Allocations that failed since the process began."""

    def forget_peak(self) -> None:
        """Begin to count anew."""

    def outside(self) -> int:
        """Held by this process beside torch's allocator: context and libraries."""

    def available(self) -> int:
        """All that torch's allocator could hold, were it to take what is free."""

    def total(self) -> int:
        """Of the device."""


@dataclass(frozen=True)
class CudaGauge:
    device: torch.device

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def peak(self) -> tuple[int, int]:
        return torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)

    def release(self) -> None:
        torch.cuda.empty_cache()

    def failures(self) -> int:
        return torch.cuda.memory_stats(self.device).get("num_ooms", 0)

    def forget_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def outside(self) -> int:
        free, total = torch.cuda.mem_get_info(self.device)
        return min(
            total - free - torch.cuda.memory_reserved(self.device), CONTEXT
        )  # more than that is other processes'

    def available(self) -> int:
        free = torch.cuda.mem_get_info(self.device)[0] + torch.cuda.memory_reserved(self.device)
        return min(free, int(torch.cuda.get_per_process_memory_fraction(self.device) * self.total()))

    def total(self) -> int:
        return torch.cuda.get_device_properties(self.device).total_memory


CONTEXT = 1 << 30


def shown(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.2f} MiB"


@dataclass
class HostGauge:
    """Of a CPU, whose allocator keeps no books: a budget there bounds what layers hold for the backward pass."""

    def allocated(self) -> int:
        return 0

    outside = failures = allocated

    def peak(self) -> tuple[int, int]:
        return 0, 0

    def release(self) -> None:
        pass

    forget_peak = release

    def available(self) -> int:
        return self.total()

    def total(self) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def gauge(device: torch.device) -> Gauge:
    return CudaGauge(device) if device.type == "cuda" else HostGauge()


def budget_bytes(spec: Spec, on: Gauge) -> int | Literal["auto"] | None:
    """`memory=` as bytes: "20GiB", "500 MB", a share of the device such as 0.8, bytes as they are, "auto" or None.

    Raises:
        UnknownBudget: it is none of these, or no positive amount.
    """
    if spec is None or spec == "auto":
        return spec
    if isinstance(spec, float) and 0 < spec <= 1:
        return int(spec * on.total())
    if isinstance(spec, int) and not isinstance(spec, bool) and spec > 1:
        return spec
    if isinstance(spec, str) and (parts := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B)\s*", spec, re.IGNORECASE)):
        if (amount := int(float(parts[1]) * _UNITS[parts[2].upper()])) > 0:
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
    """That this process holds: of what is split among several (a DTensor), its part."""
    part = local_part(tensor)
    return part.numel() * part.element_size()


def gradient_bytes(trained: Iterable[Tensor]) -> int:
    return sum(map(part_bytes, trained))


def moment_bytes(trained: Iterable[Tensor]) -> int:
    """Of AdamW's two, each as the parameter."""
    return 2 * gradient_bytes(trained)
