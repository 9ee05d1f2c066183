"""The meaning of recorded steps: rows of the hidden states, and scale, soft-cap and log-softmax of the product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tunecompile.notes import note
from tunecompile.runtime.loss_head.deferred import Unfit
from tunecompile.runtime.loss_head.logits import (
    PRODUCTS,
    PRODUCTS_IN_PLACE,
    QUOTIENTS,
    QUOTIENTS_IN_PLACE,
    RESHAPES,
    SLICES,
    TANH,
    AddBias,
    Logits,
    LogitStep,
)

_MULTIPLY = PRODUCTS | PRODUCTS_IN_PLACE
_SCALE = _MULTIPLY | QUOTIENTS | QUOTIENTS_IN_PLACE


@dataclass(frozen=True)
class Chain:
    """hidden [..., H] -> softcap * tanh(scale * x / softcap), with x the head's product, [..., V], plus `bias`.

    Then log_softmax of it, if `normalized`.
    """

    hidden: Tensor
    scale: float = 1.0
    softcap: float = 0.0
    tanh: bool = False
    normalized: bool = False
    bias: Tensor | None = None  #: [V], besides the head's own

    @property
    def rows(self) -> Tensor:
        """The hidden states of the chain's rows, in their order: [T, H]."""
        return self.hidden.reshape(-1, self.hidden.shape[-1])


def understand(recipe: Logits, steps: Sequence[LogitStep] | None = None) -> Chain:
    """Return the chain that `steps` amount to; by default all steps of the recipe.

    Raises:
        Unfit: a step is not part of a chain.
    """
    chain, vocabulary = Chain(recipe.hidden), recipe.product.vocabulary
    for step in recipe.steps if steps is None else steps:
        if step.function in _SCALE:
            chain = _scaled(chain, step)
        elif step.function in TANH:
            chain = _bent(chain)
        elif isinstance(step.function, AddBias):
            chain = _with_bias(chain, step.function.bias)
        elif step.function in SLICES:
            chain = replace(chain, hidden=chain.hidden[_rows(step.args[0], chain.hidden.dim() - 1)])
        elif step.function in RESHAPES:
            chain = replace(chain, hidden=_reshaped(chain.hidden, step, vocabulary))
        elif step.function is torch.log_softmax:
            chain = replace(chain, normalized=True)
    if chain.tanh and not chain.softcap:
        raise Unfit(note("tanh-not-scaled-back"))
    if chain.softcap:  # softcap * tanh(scale' * x) with scale' = scale / softcap
        chain = replace(chain, scale=chain.scale * chain.softcap)
    return chain


def _bent(chain: Chain) -> Chain:
    if chain.tanh or chain.normalized:
        raise Unfit(note("two-tanh") if chain.tanh else note("log-probs-changed"))
    return replace(chain, tanh=True)


def _with_bias(chain: Chain, bias: Tensor) -> Chain:
    if chain.tanh or chain.normalized or chain.bias is not None or chain.scale != 1:
        raise Unfit(note("bias-not-of-product"))
    return replace(chain, bias=bias)


def _scaled(chain: Chain, step: LogitStep) -> Chain:
    factor = step.args[0] if step.args else None
    if not isinstance(factor, (int, float)) or step.kwargs:
        raise Unfit(note("scale-not-constant"))
    multiply = step.function in _MULTIPLY
    if chain.normalized:
        raise Unfit(note("log-probs-changed"))
    if chain.tanh and (not multiply or chain.softcap):
        raise Unfit(note("changed-after-softcap"))
    if chain.tanh:
        return replace(chain, softcap=float(factor))
    return replace(chain, scale=chain.scale * factor if multiply else chain.scale / factor)


def _rows(index: object, dims: int) -> tuple:
    """The part for the rows of an index into [rows..., V] that leaves the vocabulary whole."""
    parts = index if isinstance(index, tuple) else (index,)
    if sum(part is Ellipsis for part in parts) == 1:
        at = next(i for i, part in enumerate(parts) if part is Ellipsis)
        parts = (*parts[:at], *[slice(None)] * (dims + 2 - len(parts)), *parts[at + 1 :])
    whole = all(part == slice(None) for part in parts[dims:])
    if not whole or not all(isinstance(part, slice) or type(part) is int for part in parts):
        raise Unfit(note("slice-not-understood"))
    return parts[:dims]


def _reshaped(hidden: Tensor, step: LogitStep, vocabulary: int) -> Tensor:
    """The hidden states after a reshape of the logits. If the last dim stays the vocabulary, rows stay in order."""
    shape = step(torch.empty((*hidden.shape[:-1], vocabulary), device="meta")).shape
    if not shape or shape[-1] != vocabulary:
        raise Unfit(note("vocabulary-reshaped"))
    return hidden.reshape(*shape[:-1], hidden.shape[-1])
