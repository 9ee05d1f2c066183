"""CUDA: attention's kernels in order, the allocator's segments, a stream that is kept busy."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

import torch


def grow_segments() -> None:
    """Let torch's CUDA allocator map pages to segments that grow, and so leave less between blocks unused: 0.4 GiB instead of 1.0 under a
    budget of 10 GiB (8B, 4x2048). What the user configured stands, and vLLM exports memory to other processes in a way that wants whole segments
    (vllm#42609)."""
    configured = (
        any(
            os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
        )
        or getattr(torch._C, "_accelerator_getAllocatorSettings", lambda: "")()
    )
    if sys.platform != "linux" or configured or "vllm" in sys.modules or torch.cuda.get_allocator_backend() != "native":
        return
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    try:
        torch.empty(1 << 25, dtype=torch.uint8, device="cuda")  # of virtual GPUs, some have no such mapping
    except torch.OutOfMemoryError:
        pass
    except RuntimeError:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


@contextlib.contextmanager
def attention_order(names: Sequence[str]):
    """F.scaled_dot_product_attention takes the first of these ("cudnn", "flash", "efficient", "math") that supports its arguments, and no other."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = {
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }
    with sdpa_kernel([backends[name] for name in names], set_priority=True):
        yield


def occupy_gpu(cycles: int = 2_000_000) -> None:
    """The current stream waits for about a millisecond, while the host goes on."""
    torch.cuda._sleep(cycles)
