"""Python loops over tokens, or chunks of them, in models' own code: what Dynamo would unroll.

An unrolled loop is a graph with some operations for each token, which takes minutes to compile, and one more for every
other length. So a layer that goes from token to token runs eagerly, and one that goes from chunk to chunk is compiled
for one length. Which loop a layer runs is not to be read from its source, where functions for one token from a cache
stand beside those for a row: lines are counted in a call of the layer, and in a second one of another length.
"""

from __future__ import annotations

import contextlib
import copy
import dis
import inspect
import sys
from collections import Counter, UserDict
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from tunecompile._torch.cuda import attention_order
from tunecompile.integrations.kernel_functions.substitute import knows_documents
from tunecompile.notes import Note, note

SHORTEST = 8  #: tokens of a row, below which a count says nothing, and an unrolled loop is short
_OTHERS = ("torch.", "peft.", "bitsandbytes.", "accelerate.", "deepspeed.", "tunecompile.")  #: whose modules have none
_AT_ONCE = ("flash", "efficient", "math")  #: kernels of attention that nothing is compiled for: cuDNN's took 4 to 7 s
_SIZES = {"shape", "size"}
Line = tuple[CodeType, int]


class TokenLoops:
    """Loops of the layers of a region: over tokens, and over chunks of them."""

    def __init__(self) -> None:
        self.known = False  #: whether nothing is left to look for
        self.codes: set[CodeType] | None = None  #: where loops may be
        self.first: tuple[int, Counter[Line]] | None = None  #: a length, and how often lines ran then
        self.over_tokens: Note | None = None
        self.over_chunks: Note | None = None  #: it is compiled for the first length alone

    def refuse(self, layer: nn.Module, call: Callable, args: tuple, kwargs: dict, new: bool) -> Note | None:
        """Return why a call is not to be compiled.

        Args:
            layer: of the region.
            call: calls it by its own code.
            args, kwargs: of its call.
            new: whether it may be called once more, to look for loops.
        """
        if self.known and self.over_chunks is None:
            return self.over_tokens
        hidden = next((x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dim() == 3), None)
        if hidden is None:
            return None
        if new and not self.known:
            self._look(layer, call, args, kwargs, hidden)
        chunks = self.over_chunks if self.first is not None and hidden.shape[1] != self.first[0] else None
        return self.over_tokens or chunks

    def _look(self, layer: nn.Module, call: Callable, args: tuple, kwargs: dict, hidden: Tensor) -> None:
        if self.codes is None:
            self.codes = set() if knows_documents(layer) else codes_with_loops(layer)
        length = hidden.shape[1]
        if not self.codes or sys.gettrace() is not None:  # a debugger stays
            self.known = True
        elif length >= SHORTEST and (self.first is None or self.first[0] != length):
            counts = _counted(self.codes, layer, call, args, kwargs, hidden.device)
            lines = [line for line, count in counts.items() if 0 <= length - count < 2]
            if lines:
                self.known, self.over_tokens = True, note("loop-over-tokens", _first(lines))
            elif self.first is None:
                self.first = length, counts
            else:
                before, self.known = self.first[1], True
                lines = [line for line, count in counts.items() if count != before[line] and before[line]]
                self.over_chunks = note("loop-over-chunks", _first(lines), length=self.first[0]) if lines else None


def _first(lines: Iterable[Line]) -> str:
    name, number = min((code.co_filename, number) for code, number in lines)
    return f"{Path(name).name}:{number}"


def _counted(
    codes: Collection[CodeType], layer: nn.Module, call: Callable, args: tuple, kwargs: dict, device: torch.device
) -> Counter[Line]:
    """How often each line runs in a call."""
    with _without_traces(layer, device), attention_order(_AT_ONCE), lines_counted(codes) as counts:
        args, kwargs = _copied(args), _copied(kwargs)
        with contextlib.suppress(Exception):  # the call that follows raises it, too
            call(*args, **kwargs)
    return counts


def _copied(value: Any) -> Any:
    """Tensors, and what holds them, for a call that may write to both: keys for other layers into a mapping, say."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, (dict, UserDict)):
        made = copy.copy(value)
        for key, entry in value.items():
            made[key] = _copied(entry)
        return made
    if isinstance(value, (list, tuple)):
        return tree_map(_copied, value, is_leaf=lambda each: each is not value)
    return value


@contextlib.contextmanager
def _without_traces(layer: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, a call of the layer leaves neither gradients nor random numbers drawn, nor its buffers changed."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in layer.buffers()]
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
        yield
        for buffer, value in buffers:
            buffer.copy_(value)
    torch.clear_autocast_cache()  # of weights that were cast without a gradient


def codes_with_loops(layer: nn.Module) -> set[CodeType]:
    """Code in the files of a layer's classes that loops, and reads sizes for a range, or takes a tensor apart."""
    kinds = {type(module) for module in layer.modules()}
    found: set[CodeType] = set()
    for kind in kinds:
        for base in kind.__mro__:
            home = sys.modules.get(base.__module__)
            if home is not None and issubclass(base, nn.Module) and not f"{base.__module__}.".startswith(_OTHERS):
                found.update(code for each in _functions(base, home) for code in _nested(each) if _loops(code))
    return found


def _functions(kind: type, home: Any) -> Iterator[CodeType]:
    """The code of a class's methods, and of functions in its file or in files beside it."""
    package = kind.__module__.rpartition(".")[0]
    for function in (*vars(kind).values(), *vars(home).values()):
        written = inspect.unwrap(function) if isinstance(function, FunctionType) else None
        if isinstance(written, FunctionType):
            name = str(written.__globals__.get("__name__", ""))
            if name == kind.__module__ or (package and name.rpartition(".")[0] == package):
                yield written.__code__


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _loops(code: CodeType) -> bool:
    names = set(code.co_names)
    if "unbind" not in names and not ("range" in names and _SIZES & names):
        return False
    return any(each.opname == "FOR_ITER" for each in dis.get_instructions(code))


@contextlib.contextmanager
def lines_counted(codes: Collection[CodeType]) -> Iterator[Counter[Line]]:
    """Inside, this thread counts the lines that it runs of some code."""
    counts: Counter[Line] = Counter()

    def of_line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            counts[frame.f_code, frame.f_lineno] += 1
        return of_line

    def of_call(frame: FrameType, event: str, _: Any) -> Any:
        return of_line if frame.f_code in codes else None

    sys.settrace(of_call)
    try:
        yield counts
    finally:
        sys.settrace(None)
