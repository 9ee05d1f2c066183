"""What is known of the call that is under way, for the thread that it runs in.

A model may train in one thread and generate or score in another (asynchronous rollouts): neither is to see the other's
call. Autograd's own threads, which repeat layers of a checkpoint, begin no call: they see the latest one.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar, cast

import torch

from tunecompile._torch.autograd import in_backward

T = TypeVar("T")


def of_thread(default: T) -> T:
    """In the body of a class: an attribute of a call, which is `default` until it is set."""
    return cast(Any, _OfThread(default))


class _Own(threading.local):
    values: dict[str, Any] | None = None  #: of this thread, once it began a call


class _OfThread:
    """A thread has its own value from the first attribute on that it sets outside a backward pass."""

    def __init__(self, default: Any):
        self.default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None or torch.compiler.is_dynamo_compiling():  # by the user, around us: nothing is read then
            return self.default
        own, latest = _held(instance)
        return (latest if own.values is None else own.values).get(self.name, self.default)

    def __set__(self, instance: Any, value: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            return
        own, latest = _held(instance)
        if own.values is None and not in_backward():
            own.values = {}
        if own.values is not None:
            own.values[self.name] = value
        latest[self.name] = value


def _held(instance: Any) -> tuple[_Own, dict[str, Any]]:
    """(this thread's values, the latest ones) of an object."""
    try:
        return vars(instance)["_calls"]
    except KeyError:
        return vars(instance).setdefault("_calls", (_Own(), {}))
