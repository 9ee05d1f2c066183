"""What stands in a model's `generate`: transformers' own, which is given our loop over tokens."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from tunecompile.integrations.generation import why_not_given
from tunecompile.runtime.rollouts.loop import Loop


class GenerateSlot:
    """Stands in `generate` of one model. Copies of the model call its own."""

    def __init__(self, model: nn.Module, loop: Loop):
        self.model, self.loop = weakref.ref(model), loop
        self.before = model.__dict__.get("generate")  #: what stood there, if anything did
        self.method = types.MethodType(_standing(self, type(model).generate), model)
        model.__dict__["generate"] = self.method

    def empty(self) -> None:
        """Put back what stood there, unless somebody has replaced it since."""
        model = self.model()
        if model is not None and model.__dict__.get("generate") is self.method:
            del model.__dict__["generate"]
            if self.before is not None:
                model.__dict__["generate"] = self.before


def _standing(slot: GenerateSlot, own: Callable) -> Callable:
    """The function that stands there."""
    names = list(inspect.signature(own).parameters)[1:]  # arguments may be given by position

    @functools.wraps(own)
    def generate(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = functools.partial(own, self) if slot.before is None else slot.before
        if self is not slot.model():  # a copy
            return own(self, *args, **kwargs)
        if (why := why_not_given(self, {**dict(zip(names, args, strict=False)), **kwargs})) is not None:
            slot.loop.left[why] = None
            return call(*args, **kwargs)
        return call(*args, custom_generate=slot.loop, **kwargs)

    return generate
