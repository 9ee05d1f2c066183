"""A layer's own hooks, called around its compiled code: a graph would end at each hook that Dynamo skips."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from tunecompile._torch.modules import HOOKS, call_original

_FABRIC = ("lightning.fabric.wrappers", "lightning_fabric.wrappers")


def call_around(layer: nn.Module, run: Callable[[tuple, dict], Any], args: tuple, kwargs: dict) -> Any:
    """Call a layer with its hooks, and with `run` for its forward.

    While `run` runs, the layer has its own forward, and its hooks.

    Returns:
        The output of `run`, as the hooks return it.
    """
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
    """Set the forward that was set on this layer alone; None: remove it."""
    if own is None:
        layer.__dict__.pop("forward", None)
    else:
        layer.__dict__["forward"] = own


@contextmanager
def aside(
    layer: nn.Module, inside: tuple[nn.Module, ...] = (), stays: Callable[[Callable], bool] = lambda hook: True
) -> Iterator[None]:
    """Inside, the layer has no hooks, and modules inside it have only some of theirs.

    Args:
        layer: that loses all its hooks.
        inside: modules that lose some.
        stays: whether a hook of a module inside stays.
    """
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


def of_fabric(hook: Any) -> bool | None:
    """Whether a hook on an output, which reads no gradient, may tell the user to call `fabric.backward`.

    Fabric has one on every output of a model that it set up, and some strategies and precisions require that call.

    Returns:
        None if it is not Fabric's.
    """
    own = hook.func if isinstance(hook, functools.partial) else None
    if getattr(own, "__name__", "") != "_backward_hook" or getattr(own, "__module__", "") not in _FABRIC:
        return None
    return bool(hook.args and hook.args[0])
