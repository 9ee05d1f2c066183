"""Which functions ops are traced in place of: transformers' own, and those alone, where they give what ops give."""

from __future__ import annotations

import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tunecompile._torch.dynamo import is_compiling
from tunecompile._torch.fake_tensors import dispatch_mode
from tunecompile.integrations.kernel_functions.meanings import MEANINGS, agrees
from tunecompile.notes import Note, note

HOME = "transformers."  #: whose functions are known
WRAPPER = "transformers.integrations.hub_kernels"  #: which calls a kernel that is installed


@dataclass(frozen=True)
class Substitution:
    """What became of one function of a model's file."""

    name: str
    refused: Note | None = None  #: why it is traced as it is


def substitute(kinds: Iterable[type]) -> list[Substitution] | None:
    """Have ops traced in the place of known functions of the files where these modules' classes are.

    Functions that others have put there stay.

    Returns:
        None where nothing can be computed, and so compared, now.
    """
    if is_compiling() or dispatch_mode() is not None:  # by the user, around us
        return None
    files = {kind.__module__ for kind in kinds if kind.__module__.startswith(HOME)}
    found = []
    for file in sorted(files):
        module = sys.modules.get(file)
        for name in MEANINGS:
            function = getattr(module, name, None)
            if callable(function):
                refused = _refusal(function, file, name)
                if refused is None:
                    _taken[file, name] = function
                found.append(Substitution(f"{file}.{name}", refused))
    return found


def knows_documents(module: nn.Module) -> bool:
    """Whether something inside is written in a file whose functions are ops here, which keep documents apart.

    The files are looked for once, since adapters do not change them. Another function may take the place of one later.
    """
    if (files := _known.get(module)) is None:
        files = _known[module] = frozenset(type(inner).__module__ for inner in module.modules())
    taken = {file for file, _ in _taken} & files  # which may be more by now: not in every mode are functions compared
    return bool(taken) and not any(_has_others(file) for file in taken)


_known: weakref.WeakKeyDictionary[nn.Module, frozenset[str]] = weakref.WeakKeyDictionary()


_taken: dict[tuple[str, str], Any] = {}  #: (file, name) -> the function that an op is traced in place of
#: functions that go one token further, from a cache
_STEPWISE = {
    "causal_conv1d_update",
    "mamba2_selective_state_update",
    "mamba_selective_state_update",
    "recurrent_kimi_delta_attention",
    "torch_recurrent_gated_delta_rule",
}


def _has_others(file: str) -> bool:
    """Whether a file has functions with kernels of others behind them that are no ops, or are no ops now."""
    if _has_unknown(file):
        return True
    functions = ((name, getattr(sys.modules[file], name, None)) for name in MEANINGS)
    return any(
        callable(function) and (_taken.get((file, name)) is not function or behind(function) is None)
        for name, function in functions
    )


@functools.cache
def _has_unknown(file: str) -> bool:
    functions = {name: _written(value) for name, value in vars(sys.modules[file]).items()}
    wrapped = {
        name
        for name, function in functions.items()
        if isinstance(function, types.FunctionType)
        and function.__module__ == file
        and function.__globals__.get("__name__") == WRAPPER
    }
    return bool(wrapped - _STEPWISE - set(MEANINGS))


def _is_hub(function: Any) -> bool:
    return isinstance(function, nn.Module) and type(function).__module__.partition(".")[0] == "kernels"


def _written(function: Any) -> Any:
    """What the package `kernels` made a module of, or the value itself."""
    if not _is_hub(function):
        return function
    cells = getattr(type(function).forward, "__closure__", None) or ()
    return cells[0].cell_contents if len(cells) == 1 else None


def behind(function: Any) -> Any:
    """Return the function that the package `kernels` made a module of, in whose place it may call a kernel of the hub.

    Args:
        function: any value. What is no such module is returned as it is.

    Returns:
        None where a kernel stands in its place.
    """
    forward = vars(function).get("forward") if _is_hub(function) else None
    if forward is not None and getattr(forward, "__func__", None) is not type(function).forward:
        return None
    return _written(function)


def _refusal(function: Any, file: str, name: str) -> Note | None:
    """Why a function is traced as it is, or None."""
    own = behind(function)
    return note("kernel-function-replaced", f"{file}.{name}") if own is None else _register(own, file, name)


@functools.cache
def _register(function: Any, file: str, name: str) -> Note | None:
    """Once for a function of the process.

    Returns:
        Why it is traced as it is, or None.
    """
    if not is_own(function, sys.modules[file]):
        return note("kernel-function-replaced", f"{file}.{name}")
    meaning = MEANINGS[name]
    if not agrees(inspect.unwrap(function), meaning):
        return note("kernel-function-unknown", f"{file}.{name}")
    return trace_in_place_of(function, meaning.make, f"{file}.{name}")


def trace_in_place_of(function: types.FunctionType, make: Callable[[Callable], Callable], name: str) -> Note | None:
    """Have Dynamo trace what `make` makes of a function; why it cannot, or None.

    `make` is given the same function as another object, for which nothing is traced.
    """
    itself = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    itself.__kwdefaults__ = function.__kwdefaults__
    try:
        torch.compiler.substitute_in_graph(function, skip_signature_check=True)(make(itself))
    except (TypeError, ValueError):  # it has a substitute already, by another package
        return note("kernel-function-replaced", name)
    return None


def is_own(function: Any, module: types.ModuleType) -> bool:
    """Return whether a function is as transformers wrote it in this file, or with transformers' wrapper around it."""
    written = inspect.unwrap(function)
    if not isinstance(function, types.FunctionType) or getattr(written, "__globals__", None) is not vars(module):
        return False
    if written.__code__.co_filename != getattr(module, "__file__", None):
        return False
    return function is written or (
        function.__globals__.get("__name__") == WRAPPER and getattr(function, "__wrapped__", None) is written
    )
