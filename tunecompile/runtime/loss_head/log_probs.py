"""One number for each row of deferred logits: log-probabilities of labels, by log_softmax and gather, or logsumexp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tunecompile.ir.logit_chain import Chain, LossCall, Step, Unfit, calls, spelled
from tunecompile.notes import note
from tunecompile.ops.linear_cross_entropy import NO_LABEL
from tunecompile.runtime.loss_head.deferred import (
    LOSSES,
    RECORD,
    GradientProbe,
    LazyTensor,
    handles,
    lazily,
    pass_by,
    recipe_of,
)
from tunecompile.runtime.loss_head.logits import Logits, deferred, record, shape_of
from tunecompile.runtime.loss_head.losses import computed, result_dtype


@dataclass(eq=False)
class RowReduction:
    """The recipe of one number for each row: its logsumexp, or the logit or log-probability that `index` picks."""

    origin: Logits
    steps: tuple[Step, ...]  #: of the origin, when this was recorded
    chain: Chain  #: which they amount to
    reduce: Step
    index: Tensor | None  #: [rows..., 1]; None for logsumexp
    meta: Tensor  #: of another shape than `reduce` makes where views were recorded, which keep the order
    trained: bool
    real: Tensor | None = None
    line: tuple[GradientProbe, ...] = field(init=False, default_factory=lambda: (GradientProbe(),))

    head = property(attrgetter("origin.head"))
    hidden = property(attrgetter("origin.hidden"))
    padded = property(attrgetter("origin.padded"))
    evaluated = property(attrgetter("origin.evaluated"))

    def alike(self, other: Any, chain: Chain) -> bool:
        """Whether `other` is, without being computed yet, of the same logits, but for a `chain` of its own."""
        return (
            isinstance(other, RowReduction)
            and self.real is other.real is None
            and other.hidden is self.hidden
            and other.head is self.head
            and other.trained == self.trained
            and other.chain == chain
            and other.origin.meta.dtype == self.origin.meta.dtype
            and other.meta.shape == self.meta.shape
        )

    def materialize(self) -> Tensor:
        if self.real is not None:
            return self.real
        with torch.set_grad_enabled(self.trained):
            value = self._make()
        if not value.is_inference():
            self.real = value
        return value

    def _make(self) -> Tensor:
        if self.index is not None and self.chain.normalized:
            made = log_probabilities(self.origin, self.chain, self.index, self.meta, self.trained)
            return pass_by(made, self.line[:-1])
        if not self.origin.still(self.steps):
            return pass_by(self._taken_of(self.head.attempt(lambda: self.origin.compute(self.steps))), self.line[:-1])
        return pass_by(
            self._taken_of(self.origin.materialize()),
            [place for place in self.line[:-1] if place not in self.origin.line],
        )

    def _taken_of(self, logits: Tensor) -> Tensor:
        return self.reduce(logits).view(self.meta.shape)

    def recompute(self, hidden: Tensor) -> Tensor:
        return self._taken_of(self.origin.compute(self.steps, hidden))

    def read_at_padding(self) -> None:
        self.origin.read_at_padding()

    def read_by(self, func: Callable) -> None:
        if self.index is None or not self.chain.normalized:
            self.origin.read_by(func)


def _take(origin: Logits, chain: Chain, reduce: Step, index: Tensor | None = None) -> LazyTensor:
    trained = torch.is_grad_enabled() and origin.trained
    return lazily(RowReduction(origin, origin.steps, chain, reduce, index, reduce.made, trained))


def log_probabilities(origin: Logits, chain: Chain, index: Tensor, meta: Tensor, trained: bool) -> Tensor:
    """Return the log-probabilities that `index` picks, one a row, with the shape and dtype of `meta`.

    Raises:
        Unfit: the user's own code computes with more digits.
    """
    call = LossCall(origin, index.flatten(), ignore_index=NO_LABEL, reduction="none")
    return -computed(origin, chain, trained, call).view(meta.shape).to(meta.dtype)


def _bound(names: Sequence[str], args: tuple, kwargs: dict) -> dict[str, Any]:
    return {**dict(zip(names, args)), **kwargs}


# -- recorded --


@handles(RECORD, *spelled("log_softmax"))
def log_softmax(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Record log_softmax over the vocabulary."""
    given = _bound(("input", "dim", "_stacklevel" if func is F.log_softmax else "dtype", "dtype"), args, kwargs)
    recipe = deferred(given.get("input"))
    dtype = given.get("dtype")
    if (
        recipe is None
        or "out" in given
        or given.get("dim") not in (-1, recipe.meta.dim() - 1)
        or (dtype is not None and not dtype.is_floating_point)
    ):
        return NotImplemented
    if recipe.chain.normalized:
        raise Unfit(note("log-probs-normalised-again"))
    # autocast's own dtype is recorded, since the real values may be computed outside of it
    dtype = dtype or result_dtype(torch.log_softmax, recipe.meta.dtype, recipe.hidden.device.type)
    made = torch.empty(recipe.meta.shape, dtype=dtype, device="meta")
    return recipe.then(Step(torch.log_softmax, made, (-1,), {"dtype": dtype}), recipe)


@handles(RECORD, *spelled("logsumexp"))
def logsumexp(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Record logsumexp over the vocabulary."""
    given = _bound(("input", "dim", "keepdim"), args, kwargs)
    recipe = deferred(given.get("input"))
    if recipe is None or "out" in given or given.get("dim") not in (-1, recipe.meta.dim() - 1, (-1,), [-1]):
        return NotImplemented
    dtype = result_dtype(torch.logsumexp, recipe.meta.dtype, recipe.hidden.device.type)
    if (chain := recipe.chain).normalized or dtype != recipe.meta.dtype:
        return NotImplemented
    options = -1, bool(given.get("keepdim", False))
    return _take(recipe, chain, Step(torch.logsumexp, torch.logsumexp(recipe.meta, *options), options))


@handles(RECORD, *spelled("gather take_along_dim"))
def gather(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Record a gather of logits, whose logsumexp may be subtracted later, or of one batch row's log-probabilities."""
    if (found := _picks(func, args, kwargs)) is None or (found[1].normalized and not found[1].takes_one):
        return NotImplemented
    recipe, chain, index = *found[:2], found[2].clone()  # the user may write into it
    return _take(recipe, chain, Step(torch.gather, recipe.meta.new_empty(index.shape), (-1, index)), index)


def _picks(func: Callable, args: tuple, kwargs: dict) -> tuple[Logits, Chain, Tensor] | None:
    """The logits, their chain and the index of a call that takes one value of each row."""
    along = func in (torch.take_along_dim, Tensor.take_along_dim)
    given = _bound(("input", "indices", "dim") if along else ("input", "dim", "index"), args, kwargs)
    recipe, index = deferred(given.pop("input", None)), given.pop("indices" if along else "index", None)
    if recipe is None or given != {"dim": given.get("dim")} or given["dim"] not in (-1, recipe.meta.dim() - 1):
        return None
    if (
        not isinstance(index, Tensor)
        or isinstance(index, LazyTensor)
        or index.dtype != torch.int64
        or index.device != recipe.hidden.device
        or index.shape != (*recipe.meta.shape[:-1], 1)
    ):
        return None
    if recipe.meta.dtype == torch.float64 != recipe.product.dtype:
        raise Unfit(note("log-probs-in-fp64"))
    return recipe, recipe.chain, index


@handles(RECORD, *spelled("unbind"))
def unbind(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Record one row at a time; a loop over a batch calls it, too."""
    given = _bound(("input", "dim"), args, kwargs)
    recipe = deferred(given.get("input"))
    if recipe is None or given.get("dim", 0) != 0 or recipe.meta.dim() < 2:
        return NotImplemented
    return tuple(record(Tensor.__getitem__, (given["input"], i), {}) for i in range(recipe.meta.shape[0]))


def _seen(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Record a view of a row reduction, which keeps the rows' order."""
    recipe = recipe_of(args[0]) if args else None
    if not isinstance(recipe, RowReduction) or recipe.real is not None:
        return record(func, args, kwargs)
    meta = shape_of(func, recipe.meta, args[1:], kwargs)
    if meta is None or meta.dtype != recipe.meta.dtype or not meta.is_contiguous():
        return NotImplemented
    return lazily(replace(recipe, meta=meta, trained=torch.is_grad_enabled() and recipe.trained))


RECORD.update(dict.fromkeys(calls("reshape", "copy"), _seen))


# -- computed --


@handles(LOSSES, *spelled("gather take_along_dim"))
def log_probability(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Compute the log-probabilities that a gather picks."""
    if (found := _picks(func, args, kwargs)) is None or not found[1].normalized:
        return NotImplemented
    recipe, chain, index = found
    return log_probabilities(recipe, chain, index, recipe.meta.new_empty(index.shape), recipe.trained)


@handles(LOSSES, *spelled("sub __sub__ subtract"))
def difference(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Compute the log-probability of each label as its logit minus its row's logsumexp."""
    picked, total = map(recipe_of, args) if len(args) == 2 and not kwargs else (None, None)
    if not isinstance(picked, RowReduction) or picked.index is None or (chain := picked.chain).normalized:
        return NotImplemented
    if not picked.alike(total, chain) or total.index is not None:
        return NotImplemented
    return log_probabilities(picked.origin, chain, picked.index, picked.meta, picked.trained)


# -- a batch, row by row --


def _joined(args: tuple, kwargs: dict) -> tuple[list[RowReduction], Chain] | None:
    """The reductions of all rows of a batch in order, and the batch's chain, if a call stacks just these."""
    if len(args) != 1 or kwargs not in ({}, {"dim": 0}):  # torch takes nothing but a list or a tuple
        return None
    parts = [recipe_of(part) for part in args[0]]
    first = parts[0] if parts else None
    if not isinstance(first, RowReduction) or not first.chain.takes_one:
        return None
    whole = replace(first.chain, rows=first.chain.rows[:-1])
    for i, part in enumerate(parts):
        one = replace(whole, rows=(*whole.rows, ("slice", (i,))))
        if not first.alike(part, one) or (part.index is None) != (first.index is None):
            return None
    rows = first.origin.meta.shape[:-1].numel()
    return (parts, whole) if len(first.origin.rows(whole)) == len(parts) * rows else None


@handles(RECORD, torch.stack)
def stacked_sums(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Record the logsumexp of a whole batch, where its rows' are stacked."""
    if (joined := _joined(args, kwargs)) is None or (first := joined[0][0]).index is not None:
        return NotImplemented
    source, chain = first.origin.source, joined[1]
    if first.meta.shape != first.reduce.made.shape or source is None or not source.deferred or source.chain != chain:
        return NotImplemented
    options = first.reduce.args
    return _take(source, chain, Step(torch.logsumexp, torch.logsumexp(source.meta, *options), options))


@handles(LOSSES, torch.stack)
def stacked_log_probabilities(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Compute the log-probabilities of a whole batch, where its rows' are stacked."""
    if (joined := _joined(args, kwargs)) is None or not joined[1].normalized:
        return NotImplemented
    (first, *_), chain = joined
    index = torch.stack([part.index for part in joined[0]])
    return log_probabilities(
        first.origin, chain, index, first.meta.new_empty((len(joined[0]), *first.meta.shape)), first.trained
    )
