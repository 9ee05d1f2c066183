"""The slot of a module that owns layers: its calls in a training step decide on padding."""

from __future__ import annotations

from typing import Any

import torch

from tunecompile._torch.autograd import in_backward, others_trace
from tunecompile._torch.modules import call_original
from tunecompile.integrations.transformers import is_cache
from tunecompile.runtime.unpad.unpad import Unpadding


class OwnerSlot:
    """The slot of the owner, which calls of it run."""

    def __init__(self, padding: Unpadding, evaluation: Unpadding):
        self.padding, self.evaluation = padding, evaluation

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owner, step = self.padding.owner, self.padding.step
        if others_trace() or in_backward():  # a checkpoint repeats the owner's call
            return call_original(owner, *args, **kwargs)
        step.evaluates = False
        if not owner.training:
            return (
                call_original(owner, *args, **kwargs) if torch.is_grad_enabled() else self.evaluation.call(args, kwargs)
            )
        if not torch.is_grad_enabled():
            return self.padding.score(args, kwargs)
        recovery = step.recovery
        if recovery is None:
            output = self.padding.call(args, kwargs)
        else:
            output = recovery.attempt(lambda: self.padding.call(args, kwargs), restarts=True)
        return _without_cache(output) if step.makes_cache else output


def _without_cache(output: Any) -> Any:
    """A model's output without the cache that it made: layers left it empty."""
    if not hasattr(output, "items") or not any(map(is_cache, output.values())):
        return output
    return type(output)(**{name: value for name, value in output.items() if not is_cache(value)})
