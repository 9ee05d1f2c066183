"""Which code calls a model's layers, and which labels its loss reads: taken from the functions that are under way.

Hooks at the model's entry cannot tell. Later hooks change the arguments; a wrapper that was given labels may compute a
loss of its own from hidden states, at any position; and after a call that failed no hook is called.
"""

from __future__ import annotations

import functools
import inspect
from itertools import chain
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from tunecompile._torch.dynamo import under_way
from tunecompile.integrations.loss_caller.sentence_transformers import PACKAGE, pools_real_tokens
from tunecompile.notes import Note, note

_LOSSES = (
    "transformers.",
    "trl.trainer.utils",
    "liger_kernel.",
)  #: whose forwards that take labels read labelled rows only
_GENERATION = "transformers.generation"
_TRAINERS = ("transformers.trainer", "trl.")
_ROUTER_LOSS = "load_balancing_loss_func"  #: of each mixture of transformers
_LOSS_ONLY = "prediction_loss_only"  #: the argument of their `prediction_step`
_IDS = "input_ids"
_BETWEEN = {
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "deepspeed",
    "tunecompile",
    "contextlib",
    "functools",
}  #: who hands on, unread, what layers return


def causal_labels() -> tuple[Tensor | None, Note | None, nn.Module | None]:
    """The labels of the forward that is under way, and its module, if its loss is known to read labelled rows only; or
    the reason why that is not known. Without either, the module's tokens are pooled, and padding is not read.
    """
    frames = under_way()
    for frame in frames:
        if (model := _takes_labels(frame)) is not None:
            given = isinstance(frame.f_locals.get("labels"), Tensor)
            pooled = None if given else pools_real_tokens(frames)
            return _trusted(frame, model) if pooled is None else (None, None, pooled)
        if (home := _home(frame)).startswith(PACKAGE) and (model := pools_real_tokens(chain([frame], frames))):
            return None, None, model
        if home.partition(".")[0] not in _BETWEEN:
            return None, note("unknown-caller", f"{home}.{frame.f_code.co_name}"), None
    return None, note("no-labels"), None


def padding_is_not_pooled() -> bool:
    """Whether the forward that is under way is known to be for embeddings, pooled of real tokens alone."""
    labels, unknown, _ = causal_labels()
    return labels is None and unknown is None


def labels_are_given() -> bool:
    """Whether a module whose forward is under way got labels, whatever it does with them."""
    return any(
        _takes_labels(frame) is not None and isinstance(frame.f_locals.get("labels"), Tensor) for frame in under_way()
    )


def ids_of_embeddings(shape: torch.Size) -> Tensor | None:
    """The token ids [B, T] that the forward under way of one of transformers' models embeds; None where there is none.

    It takes ids or embeddings, never both, and so has made embeddings of these ids itself, of images among them.
    """
    for frame in under_way():
        if _takes(frame, _IDS) is not None and _home(frame).startswith("transformers."):
            ids = frame.f_locals.get(_IDS)
            if isinstance(ids, Tensor) and ids.shape == shape and not ids.is_floating_point():
                return ids
    return None


def loss_is_wanted() -> bool:
    """Whether the forward that is under way is one for a loss, as far as its callers show: a module was given labels,
    or a trainer evaluates. What generates tokens is not.
    """
    for frame in under_way():
        home = _home(frame)
        if home.startswith(_GENERATION):
            return False
        if _takes_labels(frame) is not None and isinstance(frame.f_locals.get("labels"), Tensor):
            return True
        if _is_evaluation_step(frame, home):
            return True
    return False


def logits_are_wanted() -> bool:
    """Whether a trainer that evaluates hands the logits of the forward that is under way to its user."""
    steps = (frame for frame in under_way() if _is_evaluation_step(frame, _home(frame)))
    frame = next(steps, None)
    return frame is not None and frame.f_locals.get(_LOSS_ONLY) is False


def router_logits_are_masked() -> bool:
    """Whether nobody reads router logits of padding in the forward that is under way: it has them for a loss under its
    mask, and is called in a step of a trainer's, which takes the loss alone.
    """
    frames = under_way()
    forward = next((frame for frame in frames if _takes_labels(frame) is not None), None)
    if forward is None or not _masks_routers(forward):
        return False
    for frame in frames:
        home = _home(frame)
        if frame.f_code.co_name == "training_step" and home.startswith(_TRAINERS):
            return True
        if home.partition(".")[0] not in _BETWEEN | {"trl"}:
            return False
    return False


def _masks_routers(frame: FrameType) -> bool:
    """Whether a forward calls a router's loss that takes the mask of padding. (All that can, give it.)"""
    code = frame.f_code
    if _ROUTER_LOSS in code.co_varnames and _home(frame).startswith("trl."):  # which has Mixtral's, for all
        return True
    loss = frame.f_globals.get(_ROUTER_LOSS) if _ROUTER_LOSS in code.co_names else None
    return loss is not None and "attention_mask" in inspect.signature(loss).parameters


def _is_evaluation_step(frame: FrameType, home: str) -> bool:
    """Whether it is `Trainer.prediction_step`, or a subclass's of TRL."""
    return frame.f_code.co_name == "prediction_step" and home.startswith(_TRAINERS)


def given_beside() -> dict[str, Any]:
    """Arguments without a parameter of their own (`**kwargs`) that the forward which takes labels was given.

    Some models keep them from their layers.
    """
    for frame in under_way():
        if _takes_labels(frame) is not None:
            code = frame.f_code
            place = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
            named = code.co_varnames[place] if code.co_flags & inspect.CO_VARKEYWORDS else ""
            return dict(frame.f_locals.get(named) or {})
    return {}


def _trusted(frame: FrameType, model: nn.Module) -> tuple[Tensor | None, Note | None, nn.Module | None]:
    if not (home := _home(frame)).startswith(_LOSSES):
        return None, note("unknown-forward", type(model).__name__, home=home), None
    loss = getattr(model, "loss_function", None)
    if loss is not None and not (home := home_of(loss)).startswith(_LOSSES):
        return None, note("unknown-loss-function", home or type(loss).__name__), None
    if frame.f_locals.get("shift_labels") is not None:
        return None, note("shift-labels"), None
    labels = frame.f_locals.get("labels")
    return (labels, None, model) if isinstance(labels, Tensor) else (None, note("no-labels"), None)


def _takes_labels(frame: FrameType) -> nn.Module | None:
    """The module whose method this is, if labels are among its parameters."""
    return _takes(frame, "labels")


def _takes(frame: FrameType, name: str) -> nn.Module | None:
    """The module whose method this is, if it has a parameter of this name."""
    code = frame.f_code
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    if name not in parameters or parameters[0] != "self":
        return None
    model = frame.f_locals.get("self")
    return model if isinstance(model, nn.Module) else None


def _home(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def liger_kinds(model: nn.Module) -> list[str]:
    """Classes of modules that run Liger's kernels (`use_liger_kernel=True`), by name."""
    found = (
        m for m in model.modules() if home_of(vars(m).get("forward") or type(m).forward).startswith("liger_kernel.")
    )
    return sorted({type(module).__name__ for module in found})


def home_of(function: Any) -> str:
    """The module that a function was written in. (`__module__` is the wrapped function's.)"""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(getattr(function, "__func__", function), "__globals__", {}).get("__name__", ""))
