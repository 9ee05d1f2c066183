"""Inductor's processes that compile Triton kernels, and what else of a first compilation can begin before it."""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from tunecompile._torch.cuda import load_attention
from tunecompile._torch.lookup import exist, lookup, need

_ASYNC_COMPILE = "torch._inductor.async_compile.AsyncCompile"
_async_compile = lookup(_ASYNC_COMPILE)
_CAN_QUEUE = exist(_ASYNC_COMPILE, f"{_ASYNC_COMPILE}._ready_future", f"{_ASYNC_COMPILE}.process_pool")

#: seconds in which kernels are sent to processes that are still coming up. They import what this process did, which
#: takes 3 s, or 14 where files are slow; if it takes longer than this, something is wrong with them
PATIENCE = 30.0


#: bytes of the pipe to these processes, which read it once they are up: of 64 KiB, what Linux gives, ten kernels are
#: full, and who sends one more waits. 1 MiB is what users may set
PIPE = 1 << 20


def start_compile_workers(device: torch.device | None) -> None:
    """Begin early with what a first compilation waits for.

    Inductor's processes need seconds to come up. Triton reads itself (for its cache's keys) and compiles its driver in
    C. cuDNN needs seconds for its first attention.

    Args:
        device: the model's GPU. None where it may get there later: Triton's driver would choose this process's GPU.
    """
    with contextlib.suppress(ImportError):  # only time is lost
        # workers see no `config_patches`
        with _in_environment(TORCHINDUCTOR_STATIC_LAUNCH_USER_DEFINED_TRITON_KERNELS="1"):
            need("torch._inductor.async_compile.maybe_warm_pool")()
        _send_at_once()
        if device is None:
            return
        for prepare in (_prepare_triton, load_attention):
            # no daemon: Python ends those in the middle of C++ code, and the process with them
            threading.Thread(target=prepare, args=(device,), name=f"tunecompile-{prepare.__name__}").start()


def _send_at_once() -> None:
    """Let Inductor send kernels to its processes while they come up.

    By itself it compiles in this process until then, one kernel after the other, and generates no code meanwhile: 5 s
    of a first step of 23 (H100). Sent early, they are compiled side by side as soon as the processes are there.
    """
    future = getattr(_async_compile, "_ready_future", None)
    if not _CAN_QUEUE or future is None or future.done():
        return
    with contextlib.suppress(ImportError, OSError, AttributeError):  # processes that this one forked have no such pipe
        fcntl: Any = importlib.import_module("fcntl")  # not on Windows
        fcntl.fcntl(_async_compile.process_pool().write_pipe.fileno(), fcntl.F_SETPIPE_SZ, PIPE)
    _async_compile._ready_future = ComingUp(future)


class ComingUp:
    """In the place of the job that tells torch that its processes are there; `done` is whether it may send kernels."""

    def __init__(self, future: Any) -> None:
        self._future, self._until = future, time.monotonic() + PATIENCE

    def done(self) -> bool:
        return self._future.done() or time.monotonic() < self._until

    def __getattr__(self, name: str) -> Any:
        return getattr(self._future, name)


def _prepare_triton(_: torch.device) -> None:
    with contextlib.suppress(Exception):  # who needs it fails with the reason
        import triton

        triton.runtime.driver.active.get_current_target()
        triton.runtime.cache.triton_key()


@contextlib.contextmanager
def _in_environment(**variables: str) -> Iterator[None]:
    """For processes that are started inside. Variables that the user set stay."""
    ours = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)
