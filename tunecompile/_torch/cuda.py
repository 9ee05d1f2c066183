"""CUDA: attention's kernels in order, the allocator's segments and errors, a stream kept busy, work without a wait."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Sequence

import torch

from tunecompile._torch.lookup import lookup

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_configured = lookup("torch._C._accelerator_getAllocatorSettings", lambda: "")
_configure = lookup("torch._C._accelerator_setAllocatorSettings")
_sleep = lookup("torch.cuda._sleep", lambda cycles: None)
_cudnn_attention = lookup("torch.ops.aten._scaled_dot_product_cudnn_attention")


def grow_segments() -> bool:
    """Let torch's CUDA allocator map pages to segments that grow, which leaves less memory unused between blocks.

    0.4 GiB instead of 1.0 under a budget of 10 GiB (8B, 4x2048). The user's configuration stands, vLLM exports memory
    to other processes in a way that requires whole segments (vllm#42609), and on some of AMD's cards (gfx1201) such
    memory gave NaN.

    Returns:
        Whether this call turned it on.
    """
    configured = any(os.environ.get(name) for name in _VARIABLES) or _configured()
    if sys.platform != "linux" or torch.version.hip or configured or "vllm" in sys.modules or _configure is None:
        return False
    if torch.cuda.get_allocator_backend() != "native":
        return False
    _configure("expandable_segments:True")
    try:
        torch.empty(1 << 25, dtype=torch.uint8, device="cuda")  # some virtual GPUs have no such mapping
    except torch.OutOfMemoryError:
        pass
    except RuntimeError:
        _configure("expandable_segments:False")
        return False
    return True


@contextlib.contextmanager
def attention_order(names: Sequence[str]) -> Iterator[None]:
    """Inside, F.scaled_dot_product_attention runs the first of these kernels that supports its arguments, and no other.

    Args:
        names: of "cudnn", "flash", "efficient" and "math".
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = {
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }
    with sdpa_kernel([backends[name] for name in names], set_priority=True):
        yield


def load_attention(device: torch.device) -> None:
    """Have cuDNN load and compile what its attention needs, 2 to 5 s, by a small call: for a thread beside a trace.

    It is called by its name, since which kernels attention may take is a setting of the process, and draws no random
    number.
    """
    if _cudnn_attention is None or not torch.backends.cuda.cudnn_sdp_enabled():
        return
    with contextlib.suppress(Exception), torch.cuda.device(device):  # a GPU that it does not support, say
        sizes = (1, 1, 128, 128)  # cuDNN compiles for each width of heads, and this is the usual one
        q, k, v = (torch.zeros(sizes, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        made = _cudnn_attention(q, k, v, None, True, 0.0, True)[0]
        torch.autograd.grad(made, (q, k, v), torch.zeros_like(made))


def where_set(flags: torch.Tensor, count: int) -> torch.Tensor:
    """Where `count` flags [N] are set, in order. (`nonzero` waits for the device.)"""
    return torch.argsort((~flags).to(torch.int8), stable=True)[:count]  # no boolean sort on every device


def requested(error: torch.OutOfMemoryError) -> int:
    """Bytes that could not be allocated; 0 where the error does not say."""
    found = re.search(r"allocate (\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB)", str(error))
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0


def full_gpu(error: torch.OutOfMemoryError) -> int | None:
    """The number of the full GPU; None where the error does not say."""
    found = re.search(r"\bGPU (\d+) has a total capacity", str(error))
    return int(found[1]) if found else None


def occupy_gpu(cycles: int = 2_000_000) -> None:
    """The current stream waits for about a millisecond, while the host goes on."""
    _sleep(cycles)


def start_copy_to_host(values: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
    """Copy values of a GPU into pinned memory, without a wait.

    Returns:
        (the copy, the event behind which it holds the values: of the GPU that has them, whichever is current).
    """
    pinned = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
    copy = pinned.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(values.device))
    return copy, copied
