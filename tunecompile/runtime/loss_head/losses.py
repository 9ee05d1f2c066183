"""Losses of deferred logits, as ops on the hidden states."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tunecompile.ir.logit_chain import Chain, LossCall, Unfit
from tunecompile.notes import note
from tunecompile.ops import linear_cross_entropy, linear_cross_entropy_rows
from tunecompile.ops.linear_cross_entropy import NO_LABEL, mean_of_labelled
from tunecompile.runtime.loss_head.deferred import LOSSES, MASKS, LazyTensor, handles
from tunecompile.runtime.loss_head.logits import Logits, deferred


@handles(LOSSES, F.cross_entropy, F.nll_loss)
def loss(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Compute `cross_entropy` or `nll_loss` of deferred logits."""
    call = LossCall(*args, **kwargs)
    if (recipe := deferred(call.input)) is None:
        return NotImplemented
    if recipe.late:
        raise Unfit(note("logits-read-late"))
    chain, dtype = recipe.chain, result_dtype(func, recipe.meta.dtype, recipe.hidden.device.type)
    call.check(recipe.meta, call.target, dtype)
    if chain.normalized != (func is F.nll_loss):
        raise Unfit(note("log-probs-normalised-again" if chain.normalized else "nll-without-log-probs"))
    if recipe.meta.shape[:1] != call.target.shape:
        raise Unfit(note("rows-and-labels"))
    return computed(recipe, chain, recipe.trained, call).to(dtype)


def computed(recipe: Logits, chain: Chain, trained: bool, call: LossCall) -> Tensor:
    """Return a loss of a chain, in fp32 (fp64 for fp64). It requires a gradient if `trained`.

    Raises:
        Unfit: the user's own code computes with more digits.
    """
    if call.reduction == "none" and recipe.meta.dtype == torch.float64 != recipe.product.dtype:
        raise Unfit(note("row-loss-in-fp64"))
    recipe.head.tally.rewritten = recipe.head.tally.found
    recipe.head.note_loss_of(recipe.hidden)
    with torch.set_grad_enabled(torch.is_grad_enabled() and trained):
        return recipe.head.try_alone(lambda: _of_rows(recipe, chain, call))


def _of_rows(recipe: Logits, chain: Chain, call: LossCall) -> Tensor:
    """Of those with a label alone, where they are known to be few.

    Where the head's hooks have to run, the op takes the place of the head's forward; they run once, however often the
    op is retried between them.
    """
    hidden, target, rows = recipe.rows(chain), call.target.to(recipe.hidden.device), None
    labelled = recipe.head.labelled_evaluated if recipe.evaluated else recipe.head.labelled
    if call.ignore_index != NO_LABEL and (rows := labelled.rows(target, call.ignore_index)) is not None:
        hidden, target = hidden[rows], target[rows]
    op = linear_cross_entropy_rows if call.reduction == "none" else linear_cross_entropy

    def run(hidden: Tensor) -> Tensor:
        return op(*_arguments(recipe, chain, hidden, target, call))[0]

    around, attempt = recipe.head.gathered, recipe.head.attempt
    made = run(hidden) if around is None else around.call(lambda args, _: attempt(lambda: run(*args)), (hidden,), {})
    if call.reduction == "none":
        return made if rows is None else made.new_zeros(call.target.shape).index_copy(0, rows, made)
    return mean_of_labelled(made, target, call.ignore_index) if call.reduction == "mean" else made


def _arguments(recipe: Logits, chain: Chain, hidden: Tensor, target: Tensor, call: LossCall) -> tuple:
    """The arguments of the ops."""
    if recipe.late:
        recipe.head.read_late()
    product, dtype = recipe.head.now(recipe.product), recipe.product.dtype
    with torch.autocast(hidden.device.type, enabled=False):  # the head ran under its own, which the loss need not share
        inner, outer = product.inner(hidden), product.outer()
    hidden, weight = hidden.to(dtype), product.weight.to(dtype)
    bias = None if product.bias is None else product.bias.to(dtype)
    if chain.bias is not None:
        bias = chain.bias.bias if bias is None else bias + chain.bias.bias
    train_hidden, *trained = (
        torch.is_grad_enabled() and each is not None and each.requires_grad for each in (hidden, weight, bias)
    )
    options = chain.scale, chain.softcap, call.ignore_index, call.label_smoothing
    return hidden, weight, bias, inner, outer, target, *options, train_hidden, any(trained)


@handles(MASKS, F.cross_entropy, F.nll_loss)
def leaves_padding(lazy: LazyTensor, args: tuple, kwargs: dict) -> bool:
    """Return whether a loss certainly leaves out all rows at padding, whose hidden states were dropped and are zero.

    For a loss in the model's forward the labels were checked before; for others this waits for the device.
    """
    if lazy.recipe.head.looked_at():
        return True
    call, recipe = LossCall(*args, **kwargs), lazy.recipe
    try:
        rows = recipe.rows(recipe.chain).detach() if isinstance(recipe, Logits) else None
    except Unfit:
        rows = None
    if rows is None or not isinstance(call.target, Tensor) or lazy.dim() != 2 or call.target.is_floating_point():
        return False
    labelled = (call.target != call.ignore_index).to(rows.device)
    return rows.shape[:1] == labelled.shape and not bool(((rows == 0).all(-1) & labelled).any())


def result_dtype(func: Callable, dtype: torch.dtype, device: str) -> torch.dtype:
    """Return the dtype of a function of logits; autocast may choose it, and its choice differs by device."""
    return (
        _under_autocast(func, dtype, device, torch.get_autocast_dtype(device))
        if torch.is_autocast_enabled(device)
        else dtype
    )


@functools.cache
def _under_autocast(func: Callable, dtype: torch.dtype, device: str, autocast: torch.dtype) -> torch.dtype:
    logits = torch.zeros((1, 2), dtype=dtype, device=device)
    return func(logits, *((torch.zeros(1, dtype=torch.int64, device=device),) if func in LOSSES else (-1,))).dtype
