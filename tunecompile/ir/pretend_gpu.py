"""Lower graphs of fake CPU tensors as if they were on a GPU, for estimates on any machine.

A fake tensor may have a CUDA device, but a torch without CUDA ends the process when one of them requires a gradient. So
these stay on the CPU, and code that chooses between GPU and CPU calls `on_gpu`.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch

from tunecompile._torch.card import acting_as

_pretending = contextvars.ContextVar("pretending", default=False)


def on_gpu(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on a GPU, or is to be treated as if it were."""
    return tensor.is_cuda or pretending()


def pretending() -> bool:
    """Return whether all tensors are to be treated as if they were on a GPU."""
    return _pretending.get()


@contextlib.contextmanager
def as_on_gpu(card: str | None = None) -> Iterator[None]:
    """Treat all tensors as if they were on a GPU. Code that is compiled inside must not run.

    Args:
        card: its name in `tunecompile._torch.card`; None for one that takes all that templates can do.
    """
    before = _pretending.set(True)
    try:
        with _driver(), acting_as(card):
            yield
    finally:
        _pretending.reset(before)


class _Target:
    """A stand-in for Triton's driver. torch reads no more of it to find out which arguments a kernel writes."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0


@contextlib.contextmanager
def _driver() -> Iterator[None]:
    """Install `_Target` where there is no GPU, since Triton has no driver there."""
    if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        yield
        return
    from triton.runtime import driver

    before = vars(driver).get("_active", vars(driver).get("active"))  # `_active` in Triton 3.9, `active` before
    active: Any = driver  # typed for drivers alone
    active.set_active(_Target())
    try:
        yield
    finally:
        active.set_active(before)
