"""What is known of a call of the module that owns layers, as it begins."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable

import torch
from torch import nn

from tunecompile._torch.autograd import others_trace
from tunecompile.integrations.transformers import gives_cache
from tunecompile.runtime.step.mode import StepFacts


def read_facts(
    owner: nn.Module,
    args: tuple,
    kwargs: dict,
    elsewhere: bool = False,
    evaluates: Callable[[], bool] = lambda: False,
) -> StepFacts:
    """The facts of a call.

    Args:
        owner: of the layers.
        args, kwargs: of the call.
        elsewhere: whether another thread trains.
        evaluates: of a forward in eval mode without gradients, whether it is an evaluation that can be compiled.
    """
    traced, gradients = others_trace(), torch.is_grad_enabled()
    forward = not (traced or gradients or elsewhere)
    return StepFacts(
        owner.training,
        gradients,
        traced,
        elsewhere,
        scores=forward and scores(owner, args, kwargs),
        evaluates=forward and not owner.training and evaluates(),
    )


def facts_without_call(module: nn.Module) -> StepFacts:
    """The facts where nothing is known of a call's arguments: it trains, or runs by its own code."""
    return StepFacts(module.training, torch.is_grad_enabled(), others_trace())


def scores(owner: nn.Module, args: tuple, kwargs: dict) -> bool:
    """Whether this forward computes log-probabilities that are compared with those of training steps (a reference model
    in DPO, the old policy in GRPO): the same code has to compute them, or its rounding becomes part of the loss.
    Generation is recognised by its cache.
    """
    if not owner.training or torch.is_grad_enabled() or torch.is_inference_mode_enabled() or others_trace():
        return False
    if not takes_cache(owner):
        return True
    asked = kwargs.get("use_cache")
    caches = getattr(getattr(owner, "config", None), "use_cache", True) if asked is None else asked
    return not caches and not gives_cache(kwargs) and len(args) < 3


#: of owners' forwards; to read a signature takes longer than to decide on a call
_parameters: weakref.WeakKeyDictionary[nn.Module, frozenset[str]] = weakref.WeakKeyDictionary()


def takes_cache(owner: nn.Module) -> bool:
    """Whether its forward knows `use_cache`."""
    return "use_cache" in _parameters_of(owner)


def takes_ids(owner: nn.Module) -> bool:
    """Whether a module that owns layers is given token ids, and no states of several lengths."""
    return "input_ids" in _parameters_of(owner)


def _parameters_of(owner: nn.Module) -> frozenset[str]:
    if owner not in _parameters:
        _parameters[owner] = frozenset(inspect.signature(owner.forward).parameters)
    return _parameters[owner]
