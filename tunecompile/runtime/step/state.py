"""The running step, as the call of the module that owns the layers began it, and what is known of steps."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from tunecompile._torch.autograd import in_backward, others_trace
from tunecompile._torch.dynamo import is_compiling
from tunecompile.notes import note
from tunecompile.runtime.memory.accounting import PlannedLayer
from tunecompile.runtime.memory.budget import RuntimePlanner
from tunecompile.runtime.memory.oom_recovery import Recovery
from tunecompile.runtime.step.mode import Mode
from tunecompile.runtime.step.of_thread import of_thread

log = logging.getLogger("tunecompile")
T = TypeVar("T")


#: methods that run around what Dynamo traces, or that a head's loss takes the place of
_CALLS = ((nn.Module, "__call__"), (nn.Module, "_call_impl"), (nn.Linear, "forward"))


def _is_foreign(function: Any) -> bool:
    """Whether a function is of a package whose replacements are not known. (DeepSpeed's linears are.)"""
    home = str(getattr(function, "__module__", None) or "torch")
    return isinstance(function, types.FunctionType) and home.partition(".")[0] not in ("torch", "deepspeed")


def _forget(*_args: Any, **_kwargs: Any) -> None:
    """Stands in a copy of the model where the original has our hook: copies are not optimized."""


def _get_forget() -> Callable:
    return _forget


class NotCopied:
    """Base of hooks and state: copies and pickles of a model leave them behind."""

    def __reduce__(self) -> Any:
        return _get_forget, ()


@dataclass
class Step:
    """How the running step runs. Decided once, at the owner's entry, and read by every layer: one that decided by
    itself would run a re-entrant checkpoint's first forward and its recomputation in different ways.
    """

    mode: Mode = of_thread(Mode.EAGER)  # noqa: RUF009
    trained: bool = False  #: whether a training step has begun
    early: bool = False  #: whether an evaluation came before
    unverified: bool = False  #: whether the first training step is going to be verified
    #: whether the forward under way gives scores of labelled tokens, and no logits
    scores_tokens: bool = of_thread(False)
    rollout: Any = of_thread(None)  # noqa: RUF009 #: what runs the layers of a rollout's step that is under way
    repeats: bool = of_thread(False)  #: whether the owner's call is made once more, as it was
    makes_cache: bool = of_thread(False)  #: whether the model makes a cache: its masks follow from that
    drops_cache: bool = False  #: whether a cache that the model makes by default was ever kept from its layers
    entered: bool = False  #: whether any step has begun at all
    batches: int = 0  #: calls of modules that own layers
    #: whether the last of these was in a backward pass: a checkpoint around the whole model, or a loss that has the
    #: model embed once more (GradCache, Gao et al. 2021)
    in_backward: bool = of_thread(False)
    thread: int | None = None  #: the one whose training step began last
    images: bool = False  #: whether a tower ever ran whose images have any size
    in_eval: bool = False  #: whether a forward with gradients ran in eval mode
    outer: bool = False  #: whether the user ever compiled the model as a whole, around us
    transformed: bool = False  #: whether a step ran under a transform of `torch.func`, or in forward mode
    budgets: tuple[RuntimePlanner, ...] = ()  #: one for each device with layers, where `memory=` was given
    recovery: Recovery | None = None  #: from running out of memory, where there may be a budget
    full: bool = False  #: whether memory ran out where there is none
    known: dict[str, Any] = field(default_factory=dict)  #: the functions of `torch.nn.functional`
    #: the name of one of these, or of `_CALLS`, that somebody has replaced. Dynamo sets no guard on them, and the code
    #: of its graphs calls them by name: a function of the user's that calls the original would be called again inside
    #: itself
    replaced: str | None = None
    foreign: str | None = None  #: the same, of the functions alone
    state: Callable[[], Any] = lambda: None  #: what `optimize` attached, while it exists

    @property
    def active(self) -> bool:
        """Whether it is a training step."""
        return self.mode is Mode.TRAIN

    @property
    def scoring(self) -> bool:
        """Whether it is a forward without gradients that runs compiled: of a reference, or of an evaluation."""
        return self.mode.without_gradients

    @property
    def evaluates(self) -> bool:
        """Whether it is an evaluation: a forward in eval mode, for a loss."""
        return self.mode is Mode.EVALUATE

    @property
    def budget(self) -> RuntimePlanner | None:
        """The first device's."""
        return self.budgets[0] if self.budgets else None

    def budget_of(self, slot: PlannedLayer) -> RuntimePlanner | None:
        """The budget that plans a layer, if any does."""
        return next((budget for budget in self.budgets if id(slot) in budget.places), None)

    def _look_at_functions(self) -> None:
        """Comparing all functions of a module takes 0.01 ms."""
        if self.known != vars(F):
            self.known = dict(vars(F))
            self.foreign = next((f"{F.__name__}.{name}" for name, f in self.known.items() if _is_foreign(f)), None)
        called = (f"torch.nn.{kind.__name__}.{name}" for kind, name in _CALLS if _is_foreign(getattr(kind, name)))
        self.replaced = self.foreign or next(called, None)

    def telling(self, call: Callable[[], T]) -> T:
        """Run `call`. Where memory runs out without a budget, a warning names the option that makes room, once."""
        try:
            return call()
        except torch.OutOfMemoryError:
            if self.recovery is None and not self.full:
                self.full = True
                log.warning("tunecompile: %s", note("no-budget"))
            raise

    @property
    def elsewhere(self) -> bool:
        """Whether another thread than this one trains."""
        return not torch.compiler.is_dynamo_compiling() and self.thread not in (None, get_ident())

    def enter(self, module: nn.Module, mode: Mode) -> None:
        """A call of the module that owns the layers begins, which runs so."""
        self.entered = True
        if is_compiling():  # by others: what was read there, such as a count, Dynamo would guard on
            self.mode, self.outer = Mode.EAGER, True
            return
        self._look_at_functions()
        self.mode, self.in_backward = mode, in_backward()
        self.batches += 1
        if self.active and not self.in_backward:
            self.thread = get_ident()
        if others_trace():
            self.transformed = True
        elif not module.training and torch.is_grad_enabled():
            self.in_eval = True
