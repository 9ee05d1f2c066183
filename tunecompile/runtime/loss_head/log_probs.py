"""One number for each row of deferred logits: log-probabilities of labels, by log_softmax and gather, or logsumexp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tunecompile.notes import note
from tunecompile.runtime.loss_head.deferred import (
    LOSSES,
    RECORD,
    GradientProbe,
    LazyTensor,
    Unfit,
    handles,
    lazily,
    pass_by,
    recipe_of,
)
from tunecompile.runtime.loss_head.logit_chain import Chain, understand
from tunecompile.runtime.loss_head.logits import (
    CASTS,
    COPIES,
    PRODUCTS,
    QUOTIENTS,
    RESHAPES,
    SLICES,
    TANH,
    Logits,
    LogitStep,
    record,
    shape_of,
)
from tunecompile.runtime.loss_head.losses import each_row, result_dtype


@dataclass(eq=False)
class RowReduction:
    """The recipe of one number for each row: its logsumexp, or the logit or log-probability that `index` picks."""

    origin: Logits
    steps: tuple[LogitStep, ...]  #: of the origin, when this was recorded
    reduce: LogitStep
    index: Tensor | None  #: [rows..., 1]; None for logsumexp
    meta: Tensor
    trained: bool
    views: tuple[LogitStep, ...] = ()
    real: Tensor | None = None
    line: tuple[GradientProbe, ...] = field(init=False, default_factory=lambda: (GradientProbe(),))

    @property
    def head(self) -> Any:
        return self.origin.head

    @property
    def hidden(self) -> Tensor:
        return self.origin.hidden

    @property
    def padded(self) -> bool:
        return self.origin.padded

    @property
    def evaluated(self) -> bool:
        return self.origin.evaluated

    @property
    def chain(self) -> Chain:
        return understand(self.origin, self.steps)

    def materialize(self) -> Tensor:
        if self.real is not None:
            return self.real
        with torch.set_grad_enabled(self.trained):
            value = self._make()
        if not value.is_inference():
            self.real = value
        return value

    def _make(self) -> Tensor:
        if self.index is not None and (chain := self.chain).normalized:
            return pass_by(log_probabilities(self.origin, chain, self.index, self.meta, self.trained), self.line[:-1])
        if not self.origin.still(self.steps):
            return pass_by(self._taken_of(self.head.attempt(lambda: self.origin.compute(self.steps))), self.line[:-1])
        return pass_by(
            self._taken_of(self.origin.materialize()),
            [place for place in self.line[:-1] if place not in self.origin.line],
        )

    def _taken_of(self, logits: Tensor) -> Tensor:
        value = self.reduce(logits)
        for view in self.views:
            value = view(value)
        return value

    def recompute(self, hidden: Tensor) -> Tensor:
        return self._taken_of(self.origin.compute(self.steps, hidden))

    def read_at_padding(self) -> None:
        self.origin.read_at_padding()

    def read_by(self, func: Callable) -> None:
        if self.index is None or not self.chain.normalized:
            self.origin.read_by(func)


def _take(origin: Logits, reduce: LogitStep, index: Tensor | None = None) -> LazyTensor:
    meta = reduce(origin.meta) if index is None else origin.meta.new_empty(index.shape)
    return lazily(RowReduction(origin, origin.steps, reduce, index, meta, torch.is_grad_enabled() and origin.trained))


def log_probabilities(origin: Logits, chain: Chain, index: Tensor, meta: Tensor, trained: bool) -> Tensor:
    """Return the log-probabilities that `index` picks, one a row, with the shape and dtype of `meta`.

    Raises:
        Unfit: the user's own code computes with more digits.
    """
    return -each_row(origin, chain, index.flatten(), trained).view(meta.shape).to(meta.dtype)


def _bound(names: Sequence[str], args: tuple, kwargs: dict) -> dict[str, Any]:
    return {**dict(zip(names, args)), **kwargs}


def _deferred(value: Any) -> Logits | None:
    recipe = recipe_of(value)
    return recipe if isinstance(recipe, Logits) and recipe.deferred else None


# -- recorded --


@handles(RECORD, F.log_softmax, torch.log_softmax, Tensor.log_softmax, torch.special.log_softmax)
def log_softmax(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Record log_softmax over the vocabulary."""
    given = _bound(("input", "dim", "_stacklevel" if func is F.log_softmax else "dtype", "dtype"), args, kwargs)
    recipe = _deferred(given.get("input"))
    dtype = given.get("dtype")
    if (
        recipe is None
        or "out" in given
        or given.get("dim") not in (-1, recipe.meta.dim() - 1)
        or (dtype is not None and not dtype.is_floating_point)
    ):
        return NotImplemented
    if understand(recipe).normalized:
        raise Unfit(note("log-probs-normalised-again"))
    # autocast's own dtype is recorded, since the real values may be computed outside of it
    dtype = dtype or result_dtype(torch.log_softmax, recipe.meta.dtype, recipe.hidden.device.type)
    return recipe.then(
        LogitStep(torch.log_softmax, (-1,), {"dtype": dtype}),
        torch.empty(recipe.meta.shape, dtype=dtype, device="meta"),
        recipe,
    )


@handles(RECORD, torch.logsumexp, Tensor.logsumexp, torch.special.logsumexp)
def logsumexp(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Record logsumexp over the vocabulary."""
    given = _bound(("input", "dim", "keepdim"), args, kwargs)
    recipe = _deferred(given.get("input"))
    if recipe is None or "out" in given or given.get("dim") not in (-1, recipe.meta.dim() - 1, (-1,), [-1]):
        return NotImplemented
    if (
        understand(recipe).normalized
        or result_dtype(torch.logsumexp, recipe.meta.dtype, recipe.hidden.device.type) != recipe.meta.dtype
    ):
        return NotImplemented
    return _take(recipe, LogitStep(torch.logsumexp, (-1, bool(given.get("keepdim", False)))))


@handles(RECORD, torch.gather, Tensor.gather, torch.take_along_dim, Tensor.take_along_dim)
def gather(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Record a gather of logits, whose logsumexp may be subtracted later, or of one batch row's log-probabilities."""
    if (found := _picks(func, args, kwargs)) is None or (found[1].normalized and _piece(found[0].steps) is None):
        return NotImplemented
    index = found[2].clone()  # the user may write into it
    return _take(found[0], LogitStep(torch.gather, (-1, index)), index)


def _picks(func: Callable, args: tuple, kwargs: dict) -> tuple[Logits, Chain, Tensor] | None:
    """The logits, their chain and the index of a call that takes one value of each row."""
    along = func in (torch.take_along_dim, Tensor.take_along_dim)
    given = _bound(("input", "indices", "dim") if along else ("input", "dim", "index"), args, kwargs)
    recipe, index = _deferred(given.pop("input", None)), given.pop("indices" if along else "index", None)
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
    return recipe, understand(recipe), index


@handles(RECORD, Tensor.unbind, torch.unbind)
def unbind(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Record one row at a time; a loop over a batch calls it, too."""
    given = _bound(("input", "dim"), args, kwargs)
    recipe = _deferred(given.get("input"))
    if recipe is None or given.get("dim", 0) != 0 or recipe.meta.dim() < 2:
        return NotImplemented
    return tuple(record(Tensor.__getitem__, (given["input"], i), {}) for i in range(recipe.meta.shape[0]))


def _seen(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Record a view of a row reduction, which keeps the rows' order."""
    recipe = recipe_of(args[0]) if args else None
    if not isinstance(recipe, RowReduction) or recipe.real is not None:
        return record(func, args, kwargs)
    if (meta := shape_of(func, recipe.meta, args[1:], kwargs)) is None or meta.dtype != recipe.meta.dtype:
        return NotImplemented
    return lazily(
        replace(
            recipe,
            meta=meta,
            trained=torch.is_grad_enabled() and recipe.trained,
            views=(*recipe.views, LogitStep(func, args[1:], kwargs)),
        )
    )


RECORD.update(dict.fromkeys(RESHAPES | COPIES, _seen))


# -- computed --


@handles(LOSSES, torch.gather, Tensor.gather, torch.take_along_dim, Tensor.take_along_dim)
def log_probability(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Compute the log-probabilities that a gather picks."""
    if (found := _picks(func, args, kwargs)) is None or not found[1].normalized:
        return NotImplemented
    recipe, chain, index = found
    return log_probabilities(recipe, chain, index, recipe.meta.new_empty(index.shape), recipe.trained)


@handles(LOSSES, torch.sub, Tensor.sub, Tensor.__sub__, torch.subtract, Tensor.subtract)
def difference(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Compute the log-probability of each label as its logit minus its row's logsumexp."""
    picked, total = map(recipe_of, args) if len(args) == 2 and not kwargs else (None, None)
    if not isinstance(picked, RowReduction) or not isinstance(total, RowReduction):
        return NotImplemented
    if picked.real is not None or total.real is not None:
        return NotImplemented
    same = (
        picked.steps == total.steps
        and picked.hidden is total.hidden
        and picked.head is total.head
        and picked.trained == total.trained
    )
    if (
        not same
        or picked.index is None
        or total.index is not None
        or picked.meta.shape != total.meta.shape
        or (chain := picked.chain).normalized
    ):
        return NotImplemented
    return log_probabilities(picked.origin, chain, picked.index, picked.meta, picked.trained)


# -- a batch, row by row --

_WHOLE = (
    CASTS | PRODUCTS | QUOTIENTS | TANH | {torch.log_softmax, Tensor.contiguous, Tensor.clone, torch.clone}
)  #: shapes stay as they are


def _piece(steps: tuple[LogitStep, ...]) -> int | None:
    """The position in `steps` that takes one row of a batch, if all later steps also apply to the whole batch."""
    for at in reversed(range(len(steps))):
        if steps[at].function in SLICES and type(steps[at].args[0]) is int:
            return at
        if steps[at].function not in _WHOLE:
            return None
    return None


def _joined(args: tuple, kwargs: dict) -> tuple[list[RowReduction], int] | None:
    """The reductions of all rows of a batch in order, and the step that takes a row, if a call stacks just these."""
    if len(args) != 1 or kwargs not in ({}, {"dim": 0}):  # torch takes nothing but a list or a tuple
        return None
    parts = [recipe_of(part) for part in args[0]]
    if (
        not parts
        or not all(isinstance(part, RowReduction) and part.real is None for part in parts)
        or (at := _piece(parts[0].steps)) is None
    ):
        return None
    first = parts[0]
    kinds = [(step.function, step.args, step.kwargs) for step in first.steps[at + 1 :]]
    for i, part in enumerate(parts):
        alike = part.hidden is first.hidden and part.steps[:at] == first.steps[:at] and part.trained == first.trained
        rest = [(step.function, step.args, step.kwargs) for step in part.steps[at + 1 :]]
        if (
            not alike
            or _piece(part.steps) != at
            or part.steps[at].args != (i,)
            or rest != kinds
            or part.meta.shape != first.meta.shape
        ):
            return None
        if (part.index is None) != (first.index is None) or (
            part.index is None and part.reduce.args != first.reduce.args
        ):
            return None
    whole = understand(first.origin, first.steps[:at])
    return (parts, at) if whole.hidden.shape[0] == len(parts) else None


@handles(RECORD, torch.stack)
def stacked_sums(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Record the logsumexp of a whole batch, where its rows' are stacked."""
    if (joined := _joined(args, kwargs)) is None or (first := joined[0][0]).index is not None:
        return NotImplemented
    source = first.origin.source
    if (
        any(part.views for part in joined[0])
        or source is None
        or not source.deferred
        or source.steps != first.steps[: joined[1]]
    ):
        return NotImplemented
    return _take(source, first.reduce)


@handles(LOSSES, torch.stack)
def stacked_log_probabilities(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Compute the log-probabilities of a whole batch, where its rows' are stacked."""
    if (
        (joined := _joined(args, kwargs)) is None
        or not (first := joined[0][0]).index is not None
        or not first.chain.normalized
    ):
        return NotImplemented
    parts, at = joined
    chain = understand(first.origin, (*first.steps[:at], *first.steps[at + 1 :]))
    meta = first.meta.new_empty((len(parts), *first.meta.shape))
    return log_probabilities(first.origin, chain, torch.stack([part.index for part in parts]), meta, first.trained)
