"""What a loss reads of a head: rows of its hidden states, and scale, soft-cap, bias and log-softmax of the product.

This is the one reader of the steps between a head and its loss, wherever they come from: nodes of a graph
(`passes.recognize.linear_cross_entropy`) or calls that were recorded in a step (`tunecompile.runtime.loss_head`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tunecompile.notes import Note, note


class Unfit(Exception):
    """A loss, or the steps before it, cannot be computed without logits.

    Args:
        reason: a note.
    """

    def __init__(self, reason: Note):
        super().__init__(reason)
        self.reason = reason


def spelled(names: str) -> list[Any]:
    """Return all that calls an operation: names of methods, as graphs have them, methods, functions and operators.

    Args:
        names: of the operation, with spaces between.
    """
    places = (Tensor, torch, F, torch.special, operator)
    found = [(name, *(getattr(place, name, None) for place in places)) for name in names.split()]
    return [call for group in found for call in group if call is not None and not isinstance(call, torch.dtype)]


_NAMES = {
    "cast": "float double half bfloat16 to type",
    "copy": "contiguous clone",
    "reshape": "view reshape flatten unsqueeze squeeze",
    "slice": "__getitem__",
    "multiply": "mul multiply __mul__ __rmul__",
    "divide": "div divide true_divide __truediv__",
    "tanh": "tanh",
}
CALLS: dict[Any, str] = {call: kind for kind, names in _NAMES.items() for call in spelled(names)}  #: -> kind of step


def calls(*kinds: str) -> list[Any]:
    """Return all calls of some kinds of steps."""
    return [call for call, kind in CALLS.items() if kind in kinds]


IN_PLACE = {Tensor.mul_: "multiply", Tensor.div_: "divide"}  #: steps of recorded calls alone, as are the next ones
_KINDS = {**CALLS, **IN_PLACE, torch.log_softmax: "normalize"}


@dataclass(frozen=True, eq=False)
class Step:
    """One call on logits: `call(logits, *args, **kwargs)`, by which `made` is known: its shape and dtype."""

    call: Any
    made: Tensor
    args: tuple = ()
    kwargs: dict = field(default_factory=dict)

    def __call__(self, value: Tensor) -> Tensor:
        return self.call(value, *self.args, **self.kwargs)


@dataclass(frozen=True, eq=False)
class AddBias:
    """The call of a step that adds a number a word, [V]. Equal only to itself, as chains are compared."""

    bias: Tensor

    def __call__(self, logits: Tensor) -> Tensor:
        return logits + self.bias


@dataclass(frozen=True)
class Chain:
    """Rows of softcap * tanh(scale * x / softcap), with x the head's product, [..., V], plus `bias`.

    Then log_softmax of it, if `normalized`.
    """

    rows: tuple[tuple[str, tuple], ...] = ()  #: ("slice", index) or ("reshape", sizes), without the vocabulary
    scale: float = 1.0
    softcap: float = 0.0  #: 0 for none; a tanh alone is one of 1
    normalized: bool = False
    bias: AddBias | None = None  #: besides the head's own

    @property
    def moves(self) -> tuple[tuple[str, tuple], ...]:
        """The steps on rows without the last reshapes, which leave their order alone."""
        count = max((i for i, (kind, _) in enumerate(self.rows, 1) if kind == "slice"), default=0)
        return self.rows[:count]

    @property
    def takes_one(self) -> bool:
        """Whether the last step on rows takes one row of a batch."""
        return bool(self.rows) and self.rows[-1][0] == "slice" and [type(part) for part in self.rows[-1][1]] == [int]

    def rows_of(self, hidden: Any, width: int) -> Any:
        """Return the hidden states of the chain's rows, in their order.

        Args:
            hidden: [..., H], or a node of a graph.
            width: H.

        Returns:
            [T, H].
        """
        for kind, move in self.moves:
            hidden = hidden[move] if kind == "slice" else hidden.reshape(*move, width)
        return hidden.reshape(-1, width)


def same_numbers(call: Any, before: Tensor, made: Tensor) -> bool:
    """Return whether a call's result has the same kind of numbers, in place: not their bits, and no whole ones."""
    kept = made.dtype == before.dtype or _KINDS.get(call) in ("cast", "normalize")
    return kept and made.is_floating_point() and made.device == before.device


def read(product: Tensor, steps: Iterable[Step]) -> Chain:
    """Return the chain that steps amount to.

    Args:
        product: of the head, [..., V]; its shape and dtype are read.
        steps: from there on.

    Raises:
        Unfit: a step is no part of a chain.
    """
    chain, before = Chain(), product
    for step in steps:
        if not same_numbers(step.call, before, step.made):
            raise Unfit(note("logits-of-another-kind"))
        chain, before = _then(chain, step, before.dim() - 1, product.shape[-1]), step.made
    return replace(chain, scale=chain.scale * chain.softcap) if chain.softcap else chain


def _then(chain: Chain, step: Step, dims: int, words: int) -> Chain:
    """The chain with a step of logits with `dims` dimensions before the one of `words`."""
    kind = "bias" if isinstance(step.call, AddBias) else _KINDS[step.call]
    if kind in ("cast", "copy"):
        return chain
    if kind in ("slice", "reshape"):
        move = _index(step.args[0], dims) if kind == "slice" else _sizes(step.made, words)
        return replace(chain, rows=(*chain.rows, (kind, move))) if move else chain
    if chain.normalized:
        raise Unfit(note("log-probs-changed"))
    return replace(chain, normalized=True) if kind == "normalize" else _scaled(chain, step, kind)


def _scaled(chain: Chain, step: Step, kind: str) -> Chain:
    if kind == "bias":
        if chain.softcap or chain.bias is not None or chain.scale != 1:
            raise Unfit(note("bias-not-of-product"))
        return replace(chain, bias=step.call)
    if kind == "tanh":
        if chain.softcap:
            raise Unfit(note("two-tanh"))
        return replace(chain, softcap=1.0)
    factor = step.args[0] if len(step.args) == 1 else None
    if not isinstance(factor, (int, float)) or step.kwargs or (kind == "divide" and not factor):
        raise Unfit(note("scale-not-constant"))
    before = chain.softcap or chain.scale  # behind a tanh, factors are of the softcap
    after = before * factor if kind == "multiply" else before / factor
    if chain.softcap and not after > 0:
        raise Unfit(note("softcap-not-positive"))
    return replace(chain, softcap=after) if chain.softcap else replace(chain, scale=after)


def _sizes(made: Tensor, words: int) -> tuple:
    """The sizes of the rows after a reshape. If the last dim stays the vocabulary, rows stay in order."""
    if not made.dim() or made.shape[-1] != words:
        raise Unfit(note("vocabulary-reshaped"))
    return tuple(made.shape[:-1])


def _index(index: Any, dims: int) -> tuple:
    """The part for the rows of an index into [rows..., V] that leaves the vocabulary whole; () for all rows."""
    parts = index if isinstance(index, tuple) else (index,)
    if sum(part is Ellipsis for part in parts) == 1:
        at = next(i for i, part in enumerate(parts) if part is Ellipsis)
        parts = (*parts[:at], *[slice(None)] * (dims + 2 - len(parts)), *parts[at + 1 :])
    whole = all(part == slice(None) for part in parts[dims:])
    if not whole or not all(isinstance(part, slice) or type(part) is int for part in parts):
        raise Unfit(note("slice-not-understood"))
    parts = parts[:dims]
    while parts and parts[-1] == slice(None):
        parts = parts[:-1]
    return parts


@dataclass(frozen=True)
class LossCall:
    """The arguments of `cross_entropy` or `nll_loss`."""

    input: Any
    target: Any
    weight: Any = None
    size_average: Any = None
    ignore_index: int = -100
    reduce: Any = None
    reduction: str = "mean"
    label_smoothing: float = 0.0

    def check(self, logits: Tensor, target: Tensor, dtype: torch.dtype) -> None:
        """See that the ops of `linear_cross_entropy` can compute it.

        Args:
            logits: the values of the arguments, or their shapes and dtypes.
            target: the same.
            dtype: in which the loss is computed.

        Raises:
            Unfit: they cannot.
        """
        kinds = ("mean", "sum", "none")
        if (
            any(each is not None for each in (self.weight, self.size_average, self.reduce))
            or self.reduction not in kinds
        ):
            raise Unfit(note("class-weights"))
        if target.dtype != torch.int64 or target.dim() != 1 or logits.dim() != 2:
            raise Unfit(note("not-one-class-a-row"))
        if self.reduction != "none" and dtype not in (torch.float32, torch.float64):
            raise Unfit(note("loss-in-dtype", detail=str(dtype)))
