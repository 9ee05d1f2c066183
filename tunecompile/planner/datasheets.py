"""GPUs by their datasheets, to plan on machines without them: memory, math rate, bandwidths, links.

Kernels do not reach a datasheet's peaks. The shares that they reach were measured on an H200 (`benchmarks/results/`,
`hardware.py`), and other GPUs are assumed to reach the same shares; `GpuSpec.measured` tells which is which.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch

from tunecompile._torch.card import AMPERE, CARDS, emulated
from tunecompile.errors import UnknownGpu
from tunecompile.planner.device_memory import HostGauge, budget_bytes
from tunecompile.planner.hardware import Rates, measure_rates

#: share of the datasheet's operations that a lone product of 8192 x 8192 x 8192 reaches: 790 TFLOP/s on an H200
MATMUL = 0.80

#: share of the memory's bandwidth that element-wise kernels reach: 4.15 TB/s on an H200
#: (`benchmarks/results/kernels.json`)
STREAM = 0.86
COPY = 0.86  #: share of PCIe's bandwidth that copies from pinned memory reach: 55 GB/s on an H200

#: share of NVLink's bandwidth that NCCL's rings reach: 360 of 450 GB/s on an H100
#: (https://github.com/NVIDIA/nccl-tests)
RING = 0.80
BRIDGE = 0.60  #: share of PCIe's bandwidth that rings reach, where every byte passes a switch or the host

#: rate of causal attention, forward and backward, counted as if nothing were masked, over that of products: 1,200
#: TFLOP/s on an H200
ATTENTION = 1.52

#: tokens of a row at which attention reaches half of that rate. cuDNN on an H200: 851 TFLOP/s at 2,048 tokens, 1,215 at
#: 16,384
SHORT = 840
WIDE = 7200  #: the same for heads wider than 256 elements (`causal_attention`): 265 TFLOP/s at 2,048 tokens on an H200
NARROW = 0.74  #: factor for heads of 64 elements: 633 TFLOP/s at 2,048 tokens
HOST = 64 << 30  #: bytes of host memory for each GPU, where none are given
CONTEXT = 860 << 20  #: bytes of CUDA's context and libraries: 850 to 910 MiB in the processes of `benchmarks/results/`


@dataclass(frozen=True)
class GpuSpec:
    """One type of GPU, by its datasheet. Bandwidths between GPUs and to the host are those of one direction."""

    name: str  #: as `--gpu` takes it
    title: str  #: as its maker calls it
    tflops: float  #: 1e12 dense operations a second, in bf16 (a T4: fp16) with sums in fp32
    bandwidth: float  #: of its memory, in 1e12 bytes a second
    memory: int  #: bytes that torch would report
    nvlink: float  #: in 1e9 bytes a second; 0 where there is none
    pcie: float  #: in 1e9 bytes a second
    source: str  #: the datasheet
    measured: bool = False  #: whether the shares that kernels reach of these figures were measured on this very type

    @property
    def dtype(self) -> torch.dtype:
        """Of activations: the half precision that it computes in."""
        return torch.bfloat16 if CARDS[self.name].capability >= AMPERE else torch.float16

    @property
    def rates(self) -> Rates:
        """The rates that kernels reach, a millisecond each; attention's rate is that of long rows."""
        flops = MATMUL * self.tflops * 1e9
        return Rates(flops, COPY * self.pcie * 1e6, STREAM * self.bandwidth * 1e9, ATTENTION * flops, launches=True)

    def attention(self, length: int, width: int) -> float:
        """Attention's operations a millisecond, as if nothing were masked; `width`: elements of a head."""
        short = SHORT if width <= 256 else WIDE
        return self.rates.attention * length / (length + short) * (NARROW if width <= 64 else 1.0)

    @property
    def link(self) -> float:
        """Bytes a millisecond that a ring of GPUs in one machine reaches."""
        return (RING * self.nvlink if self.nvlink else BRIDGE * self.pcie) * 1e6


def _gpu(
    name: str,
    title: str,
    tflops: float,
    bandwidth: float,
    nvlink: float,
    pcie: float,
    source: str,
    measured: bool = False,
) -> GpuSpec:
    """A datasheet, with the memory that `CARDS` has for the name."""
    return GpuSpec(name, title, tflops, bandwidth, CARDS[name].memory, nvlink, pcie, source, measured)


_DATASHEETS = "https://www.nvidia.com/en-us/data-center"
_ADA = "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
#: by name
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("b200", "NVIDIA B200 SXM", 2250, 8.0, 900, 64, f"{_DATASHEETS}/hgx"),
        _gpu("h200", "NVIDIA H200 SXM", 989, 4.8, 450, 64, f"{_DATASHEETS}/h200", measured=True),
        _gpu("h100", "NVIDIA H100 SXM", 989, 3.35, 450, 64, f"{_DATASHEETS}/h100"),
        _gpu("h100-pcie", "NVIDIA H100 PCIe", 756, 2.0, 0, 64, f"{_DATASHEETS}/h100"),
        _gpu("h100-nvl", "NVIDIA H100 NVL", 835, 3.9, 300, 64, f"{_DATASHEETS}/h100"),
        _gpu("a100-80", "NVIDIA A100 SXM 80 GB", 312, 2.039, 300, 32, f"{_DATASHEETS}/a100"),
        _gpu("a100-40", "NVIDIA A100 SXM 40 GB", 312, 1.555, 300, 32, f"{_DATASHEETS}/a100"),
        _gpu("l40s", "NVIDIA L40S", 362, 0.864, 0, 32, f"{_DATASHEETS}/l40s"),
        _gpu("l4", "NVIDIA L4", 121, 0.3, 0, 32, f"{_DATASHEETS}/l4"),
        _gpu("a10", "NVIDIA A10", 125, 0.6, 0, 32, f"{_DATASHEETS}/products/a10-gpu"),
        _gpu("t4", "NVIDIA T4", 65, 0.32, 0, 16, f"{_DATASHEETS}/tesla-t4"),
        _gpu(
            "rtx6000-ada",
            "NVIDIA RTX 6000 Ada",
            364,
            0.96,
            0,
            32,
            "https://www.nvidia.com/en-us/products/workstations/rtx-6000",
        ),
        _gpu(
            "rtx5090",
            "NVIDIA GeForce RTX 5090",
            209.5,
            1.792,
            0,
            64,
            "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf",
        ),
        _gpu("rtx4090", "NVIDIA GeForce RTX 4090", 165, 1.008, 0, 32, _ADA),
        _gpu(
            "rtx3090",
            "NVIDIA GeForce RTX 3090",
            71,
            0.936,
            0,
            32,
            "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf",
        ),
    )
}
#: figures that a user may give in place of the datasheet's
NUMBERS = ("tflops", "bandwidth", "memory", "nvlink", "pcie")


def find_gpu(text: str) -> GpuSpec:
    """The GPU that a user names.

    Args:
        text: a name such as `h200`, or a name and figures that differ, in the units of `GpuSpec`:
            `h100,memory=94GiB,bandwidth=3.9`.

    Returns:
        Its datasheet.

    Raises:
        UnknownGpu: there is no GPU of that name, or a figure cannot be read.
    """
    name, *given = (part.strip() for part in text.split(","))
    known = GPUS.get(name.lower())
    if known is None:
        raise UnknownGpu(given=name, reason="no datasheet is known by that name", known=", ".join(GPUS))
    changes = {}
    for part in given:
        key, _, value = part.partition("=")
        if key not in NUMBERS or not re.fullmatch(
            r"\d+(\.\d+)?" if key != "memory" else r"\d+(\.\d+)?\s*[GMT]i?B", value.strip()
        ):
            raise UnknownGpu(
                given=text,
                reason=f"{part!r} is no figure of a datasheet: {', '.join(NUMBERS)}, "
                "such as memory=94GiB or tflops=835",
                known=", ".join(GPUS),
            )
        changes[key] = budget_bytes(value, HostGauge()) if key == "memory" else float(value)
    if any(changes.get(figure) == 0 for figure in ("tflops", "bandwidth", "pcie")):
        raise UnknownGpu(given=text, reason="tflops, bandwidth and pcie are more than 0", known=", ".join(GPUS))
    return replace(
        known,
        **changes,
        title=f"{known.title} ({', '.join(given)})" if given else known.title,
        measured=known.measured and not given,
    )


def rates_of(device: torch.device, dtype: torch.dtype) -> Rates:
    """The rates of a device: measured, or by the datasheet of the card that it is to behave as."""
    return GPUS[emulated()].rates if emulated() and device.type == "cuda" else measure_rates(device, dtype)


@dataclass(frozen=True)
class DatasheetGauge:
    """The memory of a GPU that is absent and empty, in bytes: a `Gauge`."""

    gpu: GpuSpec

    def allocated(self) -> int:
        """Always 0 bytes."""
        return 0

    failures = allocated

    def peak(self) -> tuple[int, int]:
        """Always 0 bytes."""
        return 0, 0

    def release(self) -> None:
        """Nothing to return."""

    forget_peak = release

    def outside(self) -> int:
        """Bytes of CUDA's context and libraries."""
        return CONTEXT

    def available(self) -> int:
        """Bytes beside the context."""
        return self.gpu.memory - CONTEXT

    def total(self) -> int:
        """Bytes of the GPU."""
        return self.gpu.memory
