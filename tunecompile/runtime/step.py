"""What `optimize` hangs into a model: hooks at its entry, and the flag that all its layers read."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tunecompile._torch.autograd import others_trace
from tunecompile._torch.dynamo import is_compiling
from tunecompile._torch.modules import fill_own
from tunecompile.integrations.peft_trace import substitute
from tunecompile.runtime.dynamic_shapes import batch_tokens
from tunecompile.runtime.memory.budget import RuntimePlanner
from tunecompile.runtime.memory.oom_recovery import Recovery
from tunecompile.runtime.unpad.unpad import scores

log = logging.getLogger("tunecompile")
T = TypeVar("T")
FULL = (
    'tunecompile: memory ran out, and no budget was given. optimize(model, memory="auto") plans steps that fit: layers compute again, or have wait on the host, '
    'as little as that takes. tunecompile.estimate(model, shape, memory="auto") says what such a step takes'
)


def _forget(*_args: Any, **_kwargs: Any) -> None:
    """What a copy of the model holds in place of our hook: copies are not optimized."""


def _get_forget() -> Any:
    return _forget


class NotCopied:
    """Copies and pickles of a model leave this behind."""

    def __reduce__(self) -> Any:
        return _get_forget, ()


@dataclass
class Step:
    """Whether the running step is a training step. Decided once, at the model's entry, and read by every region: a layer that
    decided for itself would run a re-entrant checkpoint's first forward and its recompute in different ways."""

    active: bool = False
    scoring: bool = False  #: whether it is a forward without gradients of a model in training: of a reference, say
    entered: bool = False  #: whether any step has begun at all
    in_eval: bool = False  #: whether a forward with gradients ran in eval mode
    outer: bool = False  #: whether the user ever compiled the model as a whole, around us
    transformed: bool = False  #: whether a step ran under a transform of `torch.func`, or in forward mode
    budgets: tuple[
        RuntimePlanner, ...
    ] = ()  #: of the model's layers, where the user gave one: for each device that they are on
    recovery: Recovery | None = None  #: from running out of memory, where there may be a budget
    full: bool = False  #: whether memory ran out where there is none

    @property
    def budget(self) -> RuntimePlanner | None:
        """The first device's."""
        return self.budgets[0] if self.budgets else None

    def budget_of(self, slot: Any) -> RuntimePlanner | None:
        """What gives a layer its plan, if anything does."""
        return next((budget for budget in self.budgets if id(slot) in budget.places), None)

    def telling(self, call: Callable[[], T]) -> T:
        """`call`. Where memory runs out without a budget, the user hears once of what makes room."""
        try:
            return call()
        except torch.OutOfMemoryError:
            if self.recovery is None and not self.full:
                self.full = True
                log.warning("%s", FULL)
            raise

    def enter(self, module: nn.Module) -> None:
        """A call of the module that owns the layers begins."""
        self.entered = True
        self.active = module.training and torch.is_grad_enabled() and not others_trace()
        if is_compiling():
            self.outer = True  # written and never read there, where Dynamo would guard on it
        elif others_trace():
            self.transformed = True
        elif not module.training and torch.is_grad_enabled():
            self.in_eval = True


class EntryHook(NotCopied):
    """Forward pre-hook of the module that owns the layers: takes the decision, and keeps a cache out of the training step."""

    def __init__(self, state: Any, owner: nn.Module, counts: bool):
        self.state, self.counts = state, counts
        self.takes_cache = "use_cache" in inspect.signature(owner.forward).parameters

    def __call__(
        self, module: nn.Module, args: tuple, kwargs: dict | None = None
    ) -> tuple[tuple, dict] | None:  # none where it was taken out meanwhile
        step = self.state.step
        step.enter(module)
        step.scoring = scores(module, self.takes_cache, args, kwargs or {})
        if step.active or step.scoring:
            substitute()
            self.state.follow_checkpointing()
            self.state.follow_modules()
        if not step.active:
            return None
        self.state.follow_head()
        self.state.follow_tables()
        self.state.follow_weights()
        self.state.follow_budget()
        if self.counts:
            self.state.pulse.beat(batch_tokens(args, kwargs or {}))
        if (
            kwargs is not None
            and self.takes_cache
            and kwargs.get("use_cache") is None
            and kwargs.get("past_key_values") is None
            and len(args) < 3
        ):
            # A cache holds each layer's index, which would compile every layer anew until Dynamo gives up.
            return args, {**kwargs, "use_cache": False}
        return None


class ReplicaHook(NotCopied):
    """Forward pre-hook of the optimized model: a replica of `nn.DataParallel` shares our slots, which would call the original's layers. It runs as it would
    without us."""

    def __init__(self, state: Any):
        self.state = state

    def __call__(self, module: nn.Module, args: tuple) -> None:
        if getattr(module, "_is_replica", False):
            self.state.replicated = True
            for part in module.modules():  # replicas are shallow copies: the original keeps its slots
                fill_own(part, None)


class VerifyHook(NotCopied):
    """Forward pre-hook of the optimized model: before its first training step, that step is verified on the same batch."""

    def __init__(self, state: Any):
        self.state = state

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if module is self.state.model:
            self.state.verify_once(args, kwargs)


class PassThrough:
    """Stands for a layer's `_gradient_checkpointing_func`: the compiled region recomputes by its own plan. Copies of the model,
    which are not optimized, get the function itself."""

    def __init__(self, function: Any):
        self.function = function

    def __call__(self, function: Any, *args: Any, **_options: Any) -> Any:
        return function(*args)

    def __reduce__(self) -> Any:
        return _identity, (self.function,)


def only_checkpoints(function: Any) -> bool:
    """Whether it is torch's, with options."""
    while isinstance(function, functools.partial):
        function = function.func
    return function is checkpoint


def _identity(value: Any) -> Any:
    return value
