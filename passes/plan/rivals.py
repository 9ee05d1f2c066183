"""Other packages' kernels against ours: the faster one that is right runs, by measurement on the GPU at hand.

Each pair is measured once for a GPU, versions and sizes, and the times lie beside the other measured choices on disk.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tunecompile._torch.autograd import outside_compilation
from tunecompile._torch.fake_tensors import size_hint
from tunecompile._torch.known_bugs import installed
from tunecompile.compiler import tuning_cache
from tunecompile.compiler.partitioner import source_hash
from tunecompile.integrations.kernel_functions.packages import PACKAGES
from tunecompile.ir.eager_call import run_provider
from tunecompile.ir.op import Op, Provider
from tunecompile.ir.pretend_gpu import pretending

__all__ = ["prefer", "time_on_gpu"]

KIND, REPEATS = "rival", 5
MARGIN = 0.95  #: of our time that another's may take: choices shall not change by noise
_found: dict[tuple[str, torch.device, str], Provider | None] = {}


def prefer(
    op: Op,
    values: Sequence[Any],
    is_right: Callable[[Op, Provider, torch.device], bool],
    time: Callable[[Provider, list], float] | None = None,
) -> Provider | None:
    """Return another package's provider for a call, where it is right and faster than ours; None otherwise.

    Providers that are wrong are no longer the op's.

    Args:
        op: the op.
        values: the arguments of a call: fake tensors and constants.
        is_right: whether a provider passed its trial on a device.
        time: measures milliseconds of (provider, arguments); None for `time_on_gpu`.
    """
    if pretending() or not any(provider.name in PACKAGES for provider in op.providers):
        return None
    device = next(x.device for x in pytree.tree_leaves(list(values)) if isinstance(x, torch.Tensor))
    sizes = repr(pytree.tree_map(_size, list(values)))
    key = (op.name, device, sizes)
    if key not in _found:
        _found[key] = _fastest(op, values, sizes, device, is_right, time or time_on_gpu)
    return _found[key]


def _fastest(
    op: Op, values: Sequence[Any], sizes: str, device: torch.device, is_right: Callable, time: Callable
) -> Provider | None:
    able = [provider for provider in op.providers if provider.supports(*values)]
    ours = next((provider for provider in able if provider.name not in PACKAGES), None)
    for other in [provider for provider in able if provider.name in PACKAGES]:
        if not is_right(op, other, device):
            op.providers.remove(other)
        elif ours is not None and _faster(op, other, ours, values, sizes, device, time):
            return other
    return None


def _size(value: Any) -> Any:
    """Dtype and sizes of a tensor; another value as it is."""
    return (value.dtype, *map(size_hint, value.shape)) if isinstance(value, torch.Tensor) else value


def _faster(
    op: Op, other: Provider, ours: Provider, values: Sequence[Any], sizes: str, device: torch.device, time: Callable
) -> bool:
    about = {"op": op.name, "provider": other.name, "version": str(installed(PACKAGES[other.name]))}
    about |= {"sizes": sizes, "source": source_hash()} | (tuning_cache.machine(device) if device.type == "cuda" else {})
    found = tuning_cache.read(KIND, about, _sound)
    if found is None:
        try:
            with torch.no_grad(), outside_compilation():
                real = pytree.tree_map(_real, list(values))
                found = [time(provider, real) for provider in (other, ours)]
        except Exception:  # only speed is lost
            return False
        found = tuning_cache.keep(KIND, about, found, _sound)
    return found[0] < MARGIN * found[1]


def _sound(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(x, float) for x in value)


def _real(value: Any) -> Any:
    """A tensor like a fake one, with values that let no state grow."""
    if not isinstance(value, torch.Tensor):
        return value
    shape = [size_hint(n) for n in value.shape]
    return torch.empty(shape, dtype=value.dtype, device=value.device).uniform_(-0.1, 0.0)


def time_on_gpu(provider: Provider, arguments: list) -> float:
    """Return milliseconds of a call, the median of some."""
    used, times = (True,) * 16, []
    for turn in range(REPEATS + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run_provider(provider.run, arguments, used)
        end.record()
        end.synchronize()
        if turn > 1:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)
