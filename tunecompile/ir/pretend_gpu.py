"""A GPU that is not there: graphs of fake CPU tensors are lowered as if these lay on one, for estimates on any machine.

Fake tensors may claim to lie on a GPU, but a torch without CUDA ends the process when one of them needs a gradient. So they stay on the CPU, and what
chooses between a GPU's code and a CPU's asks here.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch

_imagined = contextvars.ContextVar("imagined", default=False)


def on_gpu(tensor: torch.Tensor) -> bool:
    """Whether it lies on a GPU, or is to be taken for one that does."""
    return tensor.is_cuda or _imagined.get()


@contextlib.contextmanager
def as_on_gpu() -> Iterator[None]:
    """Inside, all tensors are taken to lie on a GPU. Nothing that is compiled inside may run."""
    before = _imagined.set(True)
    try:
        with _driver():
            yield
    finally:
        _imagined.reset(before)


class _Target:
    """What torch asks Triton's driver for, to find out which of its arguments a kernel writes: no more than that is ever asked."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0


@contextlib.contextmanager
def _driver() -> Iterator[None]:
    """Triton has no driver on a machine without a GPU."""
    if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        yield
        return
    from triton.runtime import driver

    before = vars(driver).get("_active", vars(driver).get("active"))  # as Triton 3.9 and older ones call it
    driver.set_active(_Target())
    try:
        yield
    finally:
        driver.set_active(before)
