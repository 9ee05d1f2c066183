"""A model's forward that scores tokens by itself (TRL's), with our scores in it."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tunecompile.errors import summary
from tunecompile.integrations import trl
from tunecompile.integrations.bitsandbytes import STATE, from_4_bits
from tunecompile.integrations.trl import OUTPUTS, ScoreCall, Scores
from tunecompile.notes import Note, note
from tunecompile.runtime.loss_head.slot import Head
from tunecompile.runtime.loss_head.token_scores import STATISTICS, token_scores
from tunecompile.runtime.step.state import Step


class FusedForward:
    """Stands in the model's `forward`, over another one, which it calls. It never takes part in copies of the model,
    whose forward it calls unchanged."""

    def __init__(self, model: nn.Module, step: Step, head: Head):
        self.model, self.step, self.head = weakref.ref(model), step, head
        self.before = model.__dict__["forward"]  #: what stood there
        self.active = True
        self.refused: list[Note] = []
        self.known: dict[tuple, Note | None] = {}  #: why scores are not ours, by the options of the call
        self.ours = trl.with_scores(self.before, self.score, self.refuse)
        #: for evaluations: what a call has shown decides how the next one selects rows, and so in which order it adds
        self.evaluated = trl.with_scores(self.before, self.score, self.refuse)
        if self.ours is None:
            self.refuse(note("fused-head-without-function"))
        self.method = types.MethodType(_standing(self), model)

    def refuse(self, reason: Note) -> None:
        """TRL's own function is called, for this reason."""
        if reason not in self.refused:
            self.refused.append(reason)

    def score(self, call: ScoreCall, theirs: Callable[[ScoreCall], Scores]) -> Scores | Note | None:
        """The scores; or why they are to be TRL's own, or None where the layers run by the model's own code."""
        if not self.step.active and not self.step.scoring:
            return None
        if reason := _unfit(call):
            return reason
        key = (call.hidden.device.type, call.bias is None, *call.options)
        if key not in self.known:
            self.known[key] = _differ(theirs, call)
        if reason := self.known[key]:
            return reason
        for budget in self.step.budgets if self.step.active else ():
            budget.settle()
        self.head.tally.rewritten = self.head.tally.found
        return self.head.attempt(lambda: _scores(call))


def _standing(fused: FusedForward) -> Callable:
    """The function that stands in the model's forward."""
    before = fused.before
    inside = getattr(before, "__func__", None)

    @functools.wraps(inside or before)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self is not fused.model():  # a copy
            return before(*args, **kwargs) if inside is None else inside(self, *args, **kwargs)
        if not fused.active or fused.ours is None or not trl.requests_scores(kwargs):
            return before(*args, **kwargs)
        fused.step.scores_tokens = True
        try:
            return (fused.ours if self.training else fused.evaluated)(*args, **kwargs)
        finally:
            fused.step.scores_tokens = False

    return forward


def _differ(theirs: Callable[[ScoreCall], Scores], call: ScoreCall) -> Note | None:
    """Why TRL's function is not known to compute what ours does, by a small problem, which it may not take."""
    try:
        return None if trl.same_scores(_scores, theirs, call) else note("fused-head-computes-else")
    except Exception as error:  # of any kernel that a version of TRL has
        return note("fused-head-not-compared", summary(error))


def _unfit(call: ScoreCall) -> Note | None:
    """Why a head cannot be ours."""
    weight = call.weight
    if getattr(weight, STATE, None) is not None:
        return None
    if type(weight) not in (Tensor, nn.Parameter) or weight.dim() != 2 or hasattr(weight, "ds_id"):
        return note("fused-head-weight", type(weight).__name__)
    if not weight.is_floating_point() or weight.is_meta or not call.temperature:
        return note("fused-head-weight", str(weight.dtype).removeprefix("torch."))
    return None


def _scores(call: ScoreCall) -> Scores:
    """In the dtype of autocast, or of the hidden states, as TRL computes them."""
    device = call.hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else call.hidden.dtype
    scale = call.logit_scale / call.temperature
    softcap = (call.softcap or 0.0) / call.temperature
    bias = None if call.bias is None else call.bias.to(dtype)
    state = getattr(call.weight, STATE, None)
    weight = call.weight if state is None else from_4_bits(call.weight, state)  # which TRL's function does not read
    wanted = [name for name in STATISTICS if name in call.outputs]
    log_probs, values = token_scores(call.hidden.to(dtype), weight.to(dtype), bias, call.labels, scale, softcap, wanted)
    return log_probs, *(values.get(name) for name in OUTPUTS[1:])
