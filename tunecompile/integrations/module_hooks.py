"""A layer's own hooks, called around what is compiled of it: a graph would end at each of those that Dynamo is kept out of, as engines' are."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from tunecompile._torch.modules import HOOKS, call_original


def call_around(layer: nn.Module, run: Callable[[tuple, dict], Any], args: tuple, kwargs: dict) -> Any:
    """What the layer's hooks make of a call, with `run` for its forward. While that runs, the layer has its own forward, and its hooks."""
    own = vars(layer).get("forward")

    def forward(*args: Any, **kwargs: Any) -> Any:
        _put(layer, own)
        return run(args, kwargs)

    layer.__dict__["forward"] = forward
    try:
        return call_original(layer, *args, **kwargs)
    finally:
        _put(layer, own)


def _put(layer: nn.Module, own: Callable | None) -> None:
    """The forward that was set on this layer alone, if one was."""
    if own is None:
        layer.__dict__.pop("forward", None)
    else:
        layer.__dict__["forward"] = own


@contextmanager
def aside(
    layer: nn.Module, inside: tuple[nn.Module, ...] = (), stays: Callable[[Callable], bool] = lambda hook: True
) -> Iterator[None]:
    """Without the layer's own hooks, and of those of modules inside only with those that stay."""
    found = [(module, name, hooks) for module in (layer, *inside) for name in HOOKS if (hooks := vars(module)[name])]
    for module, name, hooks in found:
        vars(module)[name] = (
            OrderedDict() if module is layer else OrderedDict((key, hook) for key, hook in hooks.items() if stays(hook))
        )
    try:
        yield
    finally:
        for module, name, hooks in found:
            vars(module)[name] = hooks
