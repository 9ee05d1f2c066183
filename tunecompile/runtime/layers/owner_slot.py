"""The slot of a module that owns layers: decides how its calls run, and has them run so."""

from __future__ import annotations

from functools import partial
from typing import Any

from tunecompile._torch.autograd import begins_in_backward, begun_in_backward, in_backward
from tunecompile._torch.dynamo import is_compiling
from tunecompile._torch.modules import call_original
from tunecompile.integrations.transformers import is_cache
from tunecompile.runtime.step.facts import read_facts
from tunecompile.runtime.step.mode import Mode, mode_of_step
from tunecompile.runtime.unpad.evaluation import Evaluation
from tunecompile.runtime.unpad.unpad import Unpadding


class OwnerSlot:
    """The slot of the owner, which calls of it run."""

    def __init__(self, padding: Unpadding, evaluation: Evaluation):
        self.padding, self.evaluation = padding, evaluation

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owner, step = self.padding.owner, self.padding.step
        if is_compiling():  # by others
            return call_original(owner, *args, **kwargs)
        if begins_in_backward():
            with begun_in_backward():
                return self(*args, **kwargs)
        evaluates = partial(self.evaluation.runs, args, kwargs)
        facts = read_facts(owner, args, kwargs, step.elsewhere, evaluates)
        mode = step.mode = mode_of_step(facts)
        if mode is Mode.EAGER or in_backward():  # a checkpoint repeats the owner's call
            self.padding.flat &= mode is not Mode.EAGER
            return call_original(owner, *args, **kwargs)
        if mode is Mode.EVALUATE:
            return self.evaluation.call(args, kwargs)
        if mode is Mode.SCORE:
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
