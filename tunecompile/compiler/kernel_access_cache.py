"""A cache of the tensors that Triton kernels read and write, so that torch analyses each kernel once.

Why and where torch repeats the analysis: tunecompile/_torch/triton_analysis.py.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping
from typing import Any

import torch

from tunecompile._torch.fake_tensors import Expr
from tunecompile._torch.inductor import is_a_tensor
from tunecompile._torch.triton_analysis import Analysis
from tunecompile.ir.shape_rule_cache import ProcessCache


class AccessCache:
    """Results of torch's analysis, by kernel and by what distinguishes its arguments."""

    def __init__(self, known: dict[Hashable, tuple[Any, Any]] | None = None) -> None:
        self._known: dict[Hashable, tuple[Any, Any]] = {} if known is None else known

    def answer(self, analyse: Analysis, kernel: Any, kwargs: Mapping[str, Any], descriptors: Mapping[str, Any]) -> Any:
        """The result of an analysis, cached or made now.

        Args:
            analyse: torch's analysis.
            kernel: a Triton kernel.
            kwargs: its arguments by name.
            descriptors: its TMA descriptors by argument.

        Returns:
            A copy of the result, which the caller may change.
        """
        if (arguments := access_key(kernel, kwargs, descriptors)) is None:
            return analyse(kernel, kwargs, descriptors)
        key = getattr(analyse, "__name__", ""), id(_plain(kernel)[0]), arguments
        if key not in self._known:
            # The kernel is kept, too, so that no other object gets its id.
            self._known[key] = analyse(kernel, kwargs, descriptors), kernel
        return copy.copy(self._known[key][0])


#: of this process: kinds of layers launch the same templates, and sizes that become symbols change nothing
ACCESSES = AccessCache(ProcessCache(1024))


def access_key(kernel: Any, kwargs: Mapping[str, Any], descriptors: Mapping[str, Any]) -> Hashable | None:
    """A key that is equal for arguments of which Triton makes the same IR; None where that is not known.

    Torch generates the IR with tensors of the same dtype in place of all tensors, and with one number in place of
    symbols. Of the numbers that are no constants, Triton specialises on 1 alone.
    """
    if descriptors:
        return None
    kernel, chosen = _plain(kernel)
    parameters = getattr(kernel, "params", ())
    numbers = {parameter.name for parameter in parameters if not parameter.is_constexpr}
    key = tuple((name, *_kind(value, name in numbers)) for name, value in sorted({**kwargs, **chosen}.items()))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _plain(kernel: Any) -> tuple[Any, Mapping[str, Any]]:
    """The kernel that an autotuned one tunes, and the constants of the choice that torch analyses, its first one.

    Torch makes a new autotuned kernel for each launch that is given `num_warps` or `num_stages`. Tracing sees that one,
    lowering the plain kernel.
    """
    configs = getattr(kernel, "configs", None)
    if configs is None:
        return kernel, {}
    return kernel.fn, configs[0].kwargs if configs else {}


def _kind(value: Any, number: bool) -> tuple[Any, ...]:
    """What Triton's IR depends on of one argument. number: it is a parameter that is no constant."""
    if is_a_tensor(value):
        return "tensor", value.dtype
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, Expr)):
        return ("number",)
    if number and type(value) is int and 1 < value < 2**31:
        return ("number",)
    return type(value), value
