"""Outputs of modules inside layers that transformers collects by hooks (router logits), where Dynamo traces.

transformers' hooks ask a `ContextVar` whether anything is collected, which Dynamo cannot trace, and append to one list
for all layers, whose length would be guarded. They stay on their modules once any output was requested, and a graph
would end at each in every later step. While a layer is traced, another hook appends to a list of that layer's, which is
empty before each call.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

HOME = "transformers.utils.output_capturing"  #: where its hooks come from
_HIDDEN = "hidden_states"  #: its hook takes the first layer's input, too, and is left to itself


class Capture:
    """In place of one of transformers' hooks."""

    def __init__(self, hook: Any, key: str, index: int):
        self.hook, self.key, self.index = hook, key, index
        self.wanted = False
        self.found: list[Tensor] = []
        self.__module__ = HOME  # to those who look where a hook comes from

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not torch.compiler.is_compiling() or (self.wanted and self.key == _HIDDEN):
            return self.hook(module, args, output)
        if self.wanted:
            value = output[self.index] if isinstance(output, tuple) else output
            if value is not None:
                self.found.append(value)
        return None


@dataclass(frozen=True)
class Collected:
    """What one call of a layer collected."""

    asked: int = 0  #: hooks
    lists: frozenset[int] = frozenset()  #: ids of those that take values while the layer runs
    places: list[tuple[list, int]] = field(
        default_factory=list
    )  #: transformers' lists, and how many values are its own


def collects_attention(owner: nn.Module | None) -> bool:
    """Whether a model of transformers takes attention weights from modules inside its layers, where it is asked."""
    kinds = getattr(type(owner), "_can_record_outputs", None)
    return isinstance(kinds, dict) and "attentions" in kinds


@contextlib.contextmanager
def collecting(
    hooks: Iterable[dict[int, Any]], repeats: bool, leave: Callable[[Tensor], Tensor] | None = None
) -> Iterator[Collected]:
    """Around one call of a layer, compiled: what its hooks find goes where transformers collects.

    Args:
        hooks: dictionaries of the hooks inside the layer.
        repeats: whether the call repeats one of a forward: it computes the same outputs again, which are dropped.
        leave: makes outputs for the batch of those that a layer on a row of documents has; None where it runs on the
            batch.

    Yields:
        How many hooks are asked, and what was collected once the call is over.
    """
    captures = replace(hooks)
    if not captures:
        yield Collected()
        return
    active = captures[0].hook.__globals__["_active_collector"].get()
    for capture in captures:
        if not repeats:
            capture.wanted = active is not None and capture.key in active
        capture.found.clear()
    try:
        collected = Collected(
            sum(capture.wanted for capture in captures), frozenset(id(capture.found) for capture in captures)
        )
        yield collected
        for capture in captures if active is not None and not repeats else ():
            if capture.wanted:
                active[capture.key].extend(capture.found if leave is None else map(leave, capture.found))
                collected.places.append((active[capture.key], len(capture.found)))
    finally:
        for capture in captures:
            capture.found.clear()


def take_back(collected: Collected) -> None:
    """Drop what a call collected: the layer runs again."""
    for values, count in collected.places:
        del values[len(values) - count :]


def replace(hooks: Iterable[dict[int, Any]]) -> list[Capture]:
    """Replace transformers' hooks, until `give_back`; all that are in their places now."""
    found: list[Capture] = []
    for held in hooks:
        for number, hook in held.items():
            if type(hook) is not Capture and getattr(hook, "__module__", None) == HOME:
                made = _of(hook)
                held[number] = hook if made is None else made  # the dictionary keeps its size and its order
            if type(held[number]) is Capture:
                found.append(held[number])
    return found


def _of(hook: Any) -> Capture | None:
    """None where transformers writes its hooks in another way."""
    if not inspect.isfunction(hook) or "_active_collector" not in hook.__globals__:
        return None
    values = inspect.getclosurevars(hook).nonlocals
    key, index = values.get("key"), values.get("index")
    return Capture(hook, key, index) if isinstance(key, str) and isinstance(index, int) else None


def give_back(hooks: Iterable[dict[int, Any]]) -> None:
    """Put transformers' own hooks back."""
    for held in hooks:
        for number, hook in held.items():
            if type(hook) is Capture:
                held[number] = hook.hook
