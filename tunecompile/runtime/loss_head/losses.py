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
from tunecompile.ops.linear_cross_entropy import mean_of_labelled
from tunecompile.runtime.loss_head.deferred import LOSSES, MASKS, LazyTensor, handles
from tunecompile.runtime.loss_head.logits import Logits, deferred

#: the ignore_index of reductions that count every row: any index out of range stays an error, -100 included
NO_LABEL = torch.iinfo(torch.int64).min


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
    given = call.target.to(recipe.hidden.device), call.ignore_index, call.label_smoothing
    if call.reduction == "none":
        return each_row(recipe, chain, recipe.trained, *given).to(dtype)
    return _computed(recipe, recipe.trained, lambda: _reduced(recipe, chain, call.reduction, *given)).to(dtype)


def each_row(
    recipe: Logits,
    chain: Chain,
    trained: bool,
    target: Tensor,
    ignore_index: int = NO_LABEL,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the loss of each row of a chain, in fp32 (fp64 for fp64): [T].

    Raises:
        Unfit: the user's own code computes with more digits.
    """
    if recipe.meta.dtype == torch.float64 != recipe.product.dtype:
        raise Unfit(note("row-loss-in-fp64"))
    return _computed(recipe, trained, lambda: _rows(recipe, chain, target, ignore_index, label_smoothing))


def _computed(recipe: Logits, trained: bool, call: Callable[[], Tensor]) -> Tensor:
    """A loss; it requires a gradient if the logits would."""
    recipe.head.tally.rewritten = recipe.head.tally.found
    recipe.head.note_loss_of(recipe.hidden)
    with torch.set_grad_enabled(torch.is_grad_enabled() and trained):
        return recipe.head.try_alone(call)


def _reduced(recipe, chain, reduction, target, ignore_index, label_smoothing) -> Tensor:
    hidden, rows = recipe.rows(chain), recipe.labelled.rows(target, ignore_index)
    hidden, target = (hidden, target) if rows is None else (hidden[rows], target[rows])
    total = _call(linear_cross_entropy, recipe, chain, hidden, target, ignore_index, label_smoothing)
    return mean_of_labelled(total, target, ignore_index) if reduction == "mean" else total


def _rows(recipe, chain, target, ignore_index, label_smoothing) -> Tensor:
    hidden, rows = recipe.rows(chain), None
    if ignore_index != NO_LABEL:
        rows = recipe.labelled.rows(target, ignore_index)
    if rows is None:
        return _call(linear_cross_entropy_rows, recipe, chain, hidden, target, ignore_index, label_smoothing)
    found = _call(linear_cross_entropy_rows, recipe, chain, hidden[rows], target[rows], ignore_index, label_smoothing)
    return found.new_zeros(target.shape).index_copy(0, rows, found)


def _call(op: Callable, recipe: Logits, chain: Chain, hidden: Tensor, *others: Any) -> Tensor:
    """The first result of an op on the hidden states.

    Where the head's hooks have to run, it takes the place of the head's forward; they run once, however often the op is
    retried between them.
    """

    def run(hidden: Tensor) -> Tensor:
        return op(*_arguments(recipe, chain, hidden, *others))[0]

    around = recipe.head.gathered
    return (
        run(hidden)
        if around is None
        else around.call(lambda args, _: recipe.head.attempt(lambda: run(*args)), (hidden,), {})
    )


def _arguments(
    recipe: Logits, chain: Chain, hidden: Tensor, target: Tensor, ignore_index: int, label_smoothing: float
) -> tuple:
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
    trained = torch.is_grad_enabled() and (weight.requires_grad or (bias is not None and bias.requires_grad))
    return (
        hidden,
        weight,
        bias,
        inner,
        outer,
        target,
        chain.scale,
        chain.softcap,
        ignore_index,
        label_smoothing,
        torch.is_grad_enabled() and hidden.requires_grad,
        trained,
    )


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
