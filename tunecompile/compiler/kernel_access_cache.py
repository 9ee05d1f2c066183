"""What a Triton kernel writes, asked of its IR once.

Torch has to know for each launch in a graph which tensors it changes, and asks three times or more: when the launch is traced, when it is lowered, and
when mutations are followed. Each time Triton's IR is generated anew, 20 to 50 ms: 3.7 s of a first step of 20 s (8B QLoRA, H200). An answer depends
on nothing but the kernel, its constants and its arguments' types (pytorch#193227 means to keep them in torch).
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch

from tunecompile._torch.fake_tensors import Expr
from tunecompile._torch.inductor import is_a_tensor, triton_kernel_wrap

_ANALYSES = ("identify_accessed_tensors", "identify_mutated_tensors")  #: what torch calls it, newest first


class AccessCache:
    """By kernel, and by what tells its arguments apart."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[Any, Any]] = {}

    def ask(self, analyse: Callable, kernel: Any, kwargs: Mapping[str, Any], descriptors: Mapping[str, Any]) -> Any:
        """What `analyse` says of it, now or once before. A caller may change what it gets."""
        if (alike := told_apart(kernel, kwargs, descriptors)) is None:
            return analyse(kernel, kwargs, descriptors)
        key = analyse.__name__, id(kernel), alike
        if key not in self._known:
            self._known[key] = analyse(kernel, kwargs, descriptors), kernel  # which keeps its id from being another's
        return copy.copy(self._known[key][0])


def told_apart(kernel: Any, kwargs: Mapping[str, Any], descriptors: Mapping[str, Any]) -> Hashable | None:
    """Equal for arguments of which Triton makes the same IR: torch generates it with tensors of the same type in place of all and one number in place of
    symbols, and of the numbers that are no constants Triton looks at none but 1. None where that is not known."""
    if descriptors:
        return None
    parameters = getattr(kernel, "params", None) or getattr(
        getattr(kernel, "fn", None), "params", ()
    )  # or of what it tunes
    numbers = {parameter.name for parameter in parameters if not parameter.is_constexpr}
    alike = tuple((name, *_kind(value, name in numbers)) for name, value in sorted(kwargs.items()))
    try:
        hash(alike)
    except TypeError:
        return None
    return alike


def _kind(value: Any, number: bool) -> tuple:
    if is_a_tensor(value):
        return "tensor", value.dtype
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, Expr)) or (
        number and type(value) is int and 1 < value < 2**31
    ):
        return ("number",)
    return type(value), value


@contextlib.contextmanager
def asked_once(answers: AccessCache) -> Iterator[None]:
    """Inside, torch's questions are answered from `answers` where they were asked before."""
    asked = {name: getattr(triton_kernel_wrap, name) for name in _ANALYSES if hasattr(triton_kernel_wrap, name)}
    for name, analyse in asked.items():
        setattr(triton_kernel_wrap, name, functools.wraps(analyse)(functools.partial(answers.ask, analyse)))
    try:
        yield
    finally:
        for name, analyse in asked.items():
            setattr(triton_kernel_wrap, name, analyse)
