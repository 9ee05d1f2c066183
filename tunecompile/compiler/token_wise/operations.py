"""Which operations leave tokens apart: a table of those that are known to, by the dimensions that count tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

ALL = 1 << 60  #: an end of a slice that leaves nothing out
TOKENS = 10007  #: a prime that divides no width, number of heads or size of a vocabulary


def tokens_of(tensor: Tensor) -> list[int]:
    """The dimensions that count tokens."""
    return [dim for dim, size in enumerate(tensor.shape) if size and size % TOKENS == 0]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


SHAPED = _names(
    """
    view reshape expand unflatten getitem new_zeros new_ones new_empty empty zeros ones narrow split
    tunecompile.document_mask sym_size size
    """
)
_BLANK = _names(
    """
    empty zeros ones full empty_strided new_empty new_zeros new_ones new_full new_empty_strided
    empty_like zeros_like ones_like full_like rand_like randn_like
    """
)
_ALIKE = _names(
    """
    clone _to_copy contiguous alias detach lift_fresh native_dropout bernoulli bernoulli_ dropout
    copy_ fill_ zero_ masked_fill masked_fill_ where _conj silu gelu
    """
)
_RESHAPED = _names("view _unsafe_view reshape unsqueeze squeeze unflatten flatten view_as_complex view_as_real")
_MOVED = _names("permute transpose t expand repeat select slice split split_with_sizes unbind cat stack")
_ALONG = _names(
    """
    sum mean amax amin max min var std var_mean argmax argmin any all prod logsumexp cumsum cumprod topk sort argsort
    linalg_vector_norm norm _softmax _log_softmax gather scatter scatter_ scatter_add scatter_add_ index_select
    flip glu
    """
)
_LOOKED_UP = _names("embedding index gather")
_PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2), "_scaled_mm": (0, 1), "_int_mm": (0, 1)}
_LAST = _names("native_layer_norm _fused_rms_norm rms_norm layer_norm gemv_4bit gemm_4bit")  #: along the last dimension


def leaves_apart(func: Any, args: tuple, kwargs: dict, given: Sequence[Tensor], made: Sequence[Tensor]) -> bool:
    """Whether an operation is known to leave tokens apart: no result of one token depends on another."""
    if any(len(tokens_of(x)) > 1 for x in (*given, *made)):
        return False
    name = func.__name__.partition(".")[0]
    inputs = [x for x in given if tokens_of(x)]
    if not inputs:
        return name in _BLANK or name == "expand"
    if name in _PRODUCTS:
        left, right = (args[place] for place in _PRODUCTS[name])
        return _is_row_wise(left, right) and all(map(tokens_of, made))
    if name in _LAST:
        last = len(args[1]) if isinstance(args[1], (tuple, list)) else 1
        return (
            tokens_of(inputs[0]) == tokens_of(args[0])
            and tokens_of(args[0])[0] < args[0].dim() - last
            and not (last > 1 and has_rows_behind(args[0]))
        )
    if name in _LOOKED_UP and not tokens_of(args[0]):  # in a table, each token by itself
        return all(map(tokens_of, made))
    if name in _RESHAPED:
        return all(_before(x) == _before(inputs[0]) for x in made)
    if name in _MOVED | _ALONG:
        return _avoids(func, args, kwargs, inputs, made, name)
    if torch.Tag.pointwise in func.tags or name in _ALIKE | _BLANK:
        return all(_from_right(x) == _from_right(y) for x in inputs for y in made if tokens_of(y)) and all(
            map(tokens_of, made)
        )
    return func.namespace == "prim" or name in ("sym_size", "sym_numel", "sym_stride", "is_same_size")


def _is_row_wise(left: Tensor, right: Tensor) -> bool:
    """Whether a product sums over no tokens, and over no rows."""
    a, b = tokens_of(left), tokens_of(right)
    if has_rows_behind(right) or (has_rows_behind(left) and left.shape[-1] == 1):
        return False
    return not (a and b) or a == b == [0]


def _before(tensor: Tensor) -> int:
    """How many rows of tokens there are: sizes ahead of the dimension of tokens."""
    where = tokens_of(tensor)
    return math.prod(tensor.shape[: where[0]]) if where else -1


def _from_right(tensor: Tensor) -> int:
    return tensor.dim() - tokens_of(tensor)[0]


def _avoids(func: Any, args: tuple, kwargs: dict, inputs: Sequence[Tensor], made: Sequence[Tensor], name: str) -> bool:
    """Whether an operation along a dimension, or several, runs along no dimension of tokens."""
    if name in _TURNS:
        kept = made[0].stride(-1) == inputs[0].stride(-1) and made[0].shape[-1] == inputs[0].shape[-1]
        return all(map(tokens_of, made)) and (kept or not has_rows_behind(inputs[0]) or _comes_back(made[0]))
    if name == "repeat":
        times = list(args[1])[: -_from_right(args[0]) + 1 or None]
        return all(time == 1 for time in times) and not has_rows_behind(args[0])
    if name == "expand":
        return all(tokens_of(x) and _from_right(x) == _from_right(inputs[0]) for x in made)
    parameters = [argument.name for argument in func._schema.arguments]
    bound = {**dict(zip(parameters, args)), **kwargs}
    defaults = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    dims: Any = next(({**defaults, **bound}.get(n) for n in ("dim", "dims") if n in parameters), None)
    if dims is None or dims == []:
        return False
    rank = made[0].dim() if name == "stack" else inputs[0].dim()
    along = {dim % rank for dim in (dims if isinstance(dims, (tuple, list)) else (dims,))}
    if name == "slice" and bound.get("step", 1) == 1:
        start, end, sizes = bound.get("start"), bound.get("end"), {inputs[0].shape[dim] for dim in along}
        from_first = start in (None, 0) or (start % TOKENS == 0 and -start in sizes)
        if from_first and (end is None or end >= ALL or (end % TOKENS == 0 and end in sizes)):
            return True
    if name == "stack":
        return not set(tokens_of(made[0])) & along
    return not any(_counts(x) & along for x in inputs) and all(map(tokens_of, made))


def _counts(tensor: Tensor) -> set[int]:
    """The dimension of tokens, and those that may be the one of rows, or hold it."""
    (tokens,) = tokens_of(tensor)
    behind = has_rows_behind(tensor)
    may_be = {dim for dim in range(tensor.dim()) if tensor.shape[dim] == 1 and (dim < tokens or behind)}
    return {tokens} | may_be | (set(range(tensor.dim() - 1)) if behind else set())


_TURNS = ("permute", "transpose", "t")
_BEHIND = "_rows_are_behind_tokens"  #: an attribute of fake tensors


def has_rows_behind(tensor: Tensor) -> bool:
    """Whether rows, of which there is one, may stand behind tokens, as [T, B, ...] has them, or in a dimension ahead
    of the last that they were joined to."""
    return getattr(tensor, _BEHIND, False)


def _comes_back(tensor: Tensor) -> bool:
    """Whether the result of a permutation has its rows ahead of its tokens."""
    (tokens,) = tokens_of(tensor)
    return 1 in tensor.shape[:tokens] and 1 not in tensor.shape[tokens:]


def mark_rows(func: Any, given: Sequence[Tensor], made: Sequence[Tensor]) -> None:
    """Follow the rows of layers that put tokens first."""
    turns = func.__name__.partition(".")[0] in _TURNS
    behind = any(map(has_rows_behind, given))
    for tensor in made:
        if not tokens_of(tensor) or (turns and _comes_back(tensor)):
            continue
        if behind or (turns and 1 not in tensor.shape[: tokens_of(tensor)[0]] and _is_ahead(given[0])):
            setattr(tensor, _BEHIND, True)


def _is_ahead(tensor: Tensor) -> bool:
    return bool(tokens_of(tensor)) and 1 in tensor.shape[: tokens_of(tensor)[0]]
