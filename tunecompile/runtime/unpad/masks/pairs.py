"""Masks of all pairs of tokens in long rows, kept as what they were computed of.

A mask [B, 1, T, T] of 131,072 tokens takes 16 GiB as bools, and layers that are told where documents begin do not read
it. So while a model makes its masks, comparisons of a column with a row are recorded in place of being computed, and
so are the operations on them that treat each pair by itself. What comes out is a tensor by its shape, dtype and device.
Its values are computed where anybody reads them: a layer that is not compiled, a hook, an operation that is not in the
table. Which function makes the mask is not asked: one of the user's is recorded as transformers' are.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tunecompile._torch.autograd import plain_functions
from tunecompile._torch.fake_tensors import StorageWeakRef

SMALL = 16  #: how many times smaller than the mask is what it is computed of
BLOCK = 1 << 24  #: pairs that are computed at once where a recorded mask is read


def _functions(*names: str) -> frozenset[Callable]:
    """As torch's functions and as methods."""
    found = (getattr(home, name, None) for home in (Tensor, torch) for name in names)
    return frozenset(each for each in found if each is not None)


_COMPARISONS = _functions(
    "le", "lt", "ge", "gt", "eq", "ne", "__le__", "__lt__", "__ge__", "__gt__", "__eq__", "__ne__"
)
_LOGIC = _functions(
    *("logical_and", "logical_or", "logical_xor", "__and__", "__or__", "__xor__", "__rand__", "__ror__", "__rxor__"),
    *("bitwise_and", "bitwise_or", "bitwise_xor"),
)
_DISTANCES = _functions("sub", "__sub__")
BEGINNINGS = _COMPARISONS | _LOGIC | _DISTANCES  #: of bools, or of integers
_EACH_PAIR = BEGINNINGS | _functions(
    *("logical_not", "bitwise_not", "__invert__", "where", "masked_fill", "add", "mul", "rsub", "neg", "abs"),
    *("__add__", "__mul__", "__rsub__", "__radd__", "__rmul__", "__neg__", "__abs__"),
    *("float", "half", "bfloat16", "double", "bool", "int", "long"),
)
_WHERE = _functions("where")
_METADATA = frozenset(
    (
        *_functions("size", "dim", "numel", "stride", "element_size", "is_floating_point", "is_complex", "get_device"),
        *(Tensor.__len__, Tensor.__hash__, Tensor.__repr__),
        *(
            getattr(Tensor, name).__get__
            for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "grad_fn", "grad")
        ),
        *(getattr(Tensor, name).__get__ for name in ("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized")),
    )
)


@dataclass(frozen=True, eq=False)
class Recorded:
    """An operation that treats each pair by itself, and what it was given: tensors far smaller than its result, other
    recorded operations, numbers and dtypes.
    """

    func: Callable
    args: tuple
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def value(self) -> Tensor:
        """All pairs."""
        return self._at(lambda given: given, {}).expand(self.shape)

    def diagonal(self, offset: int) -> Tensor:
        """The pairs of each token and the one `offset` places behind it, with a dimension less."""
        shape = self.shape

        def along(given: Tensor) -> Tensor:
            return given.expand(shape).diagonal(offset, -2, -1)  # no memory: sizes of 1 are expanded

        return self._at(along, {}).expand(*shape[:-2], min(shape[-2] + min(offset, 0), shape[-1] - max(offset, 0)))

    def block(self, rows: slice, queries: slice) -> Tensor:
        """The pairs of some rows of the batch and some queries."""

        def among(given: Tensor) -> Tensor:
            given = given.reshape((1,) * (len(self.shape) - given.dim()) + given.shape)
            given = given[rows] if given.shape[0] != 1 else given
            return given[..., queries, :] if given.shape[-2] != 1 else given

        some = len(range(*rows.indices(self.shape[0]))), *self.shape[1:-2], len(range(*queries.indices(self.shape[-2])))
        return self._at(among, {}).expand(*some, self.shape[-1])

    def _at(self, where: Callable[[Tensor], Tensor], known: dict[int, Tensor]) -> Tensor:
        """For the places that `where` takes of what broadcasts to the whole."""
        if id(self) not in known:
            known[id(self)] = self.func(*(self._given(each, where, known) for each in self.args))
        return known[id(self)]

    def _given(self, given: Any, where: Callable[[Tensor], Tensor], known: dict[int, Tensor]) -> Any:
        if isinstance(given, Recorded):
            return given._at(where, known)
        return where(given) if isinstance(given, Tensor) and given.dim() else given


class MaskCell:
    """What tensors of one recorded mask share: its values, once somebody has read them."""

    def __init__(self, recorded: Recorded, base: MaskCell | None = None):
        self.recorded, self.base = recorded, base
        self.made: Tensor | None = None

    @property
    def version(self) -> int:
        """How often its values were written to."""
        if self.made is not None:
            return self.made._version
        return 0 if self.base is None else self.base.version

    def real(self) -> Tensor:
        """The values; the same tensor at each call."""
        if self.made is None:
            with torch.no_grad(), plain_functions():
                made = self.recorded.value() if self.base is None else self.base.real().expand(self.recorded.shape)
            self.made = made
        return self.made


class PairMask(Tensor):
    """A mask whose values are computed when they are read."""

    @staticmethod
    def __new__(cls, cell: MaskCell):
        like = cell.recorded
        return Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)

    def __init__(self, cell: MaskCell):
        self.cell = cell

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in _METADATA:
            return super().__torch_function__(func, types, args, kwargs or {})
        made = None if kwargs else _recorded(func, args)
        return func(*real_masks(args), **real_masks(kwargs or {})) if made is None else made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        """Reached where Python's overrides are off."""
        if func is torch.ops.aten.detach.default:
            return PairMask(args[0].cell)
        return func(*real_masks(args), **real_masks(kwargs or {}))

    def __reduce_ex__(self, protocol):
        return self.cell.real().__reduce_ex__(protocol)

    def __deepcopy__(self, memo):
        return self.cell.real().clone()

    def __repr__(self, *, tensor_contents=None):
        return f"PairMask(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


def real_masks(tree: Any) -> Any:
    """Arguments, with the values of recorded masks in their place."""
    if isinstance(tree, PairMask):
        return tree.cell.real()
    if type(tree) in (tuple, list):
        return type(tree)(real_masks(each) for each in tree)
    return {name: real_masks(each) for name, each in tree.items()} if type(tree) is dict else tree


def identity(mask: Tensor) -> MaskRef | StorageWeakRef:
    """Equal for a mask and what shares its memory. It has `expired()`."""
    if not isinstance(mask, PairMask):
        return StorageWeakRef(mask.untyped_storage())
    cell = mask.cell
    while cell.base is not None:
        cell = cell.base
    return MaskRef(cell)


class MaskRef(weakref.ref):
    """To the values of a recorded mask."""

    def expired(self) -> bool:
        """Whether nothing holds it any more."""
        return self() is None


def version(mask: Tensor) -> int:
    """How often a mask was written to."""
    return mask.cell.version if isinstance(mask, PairMask) else mask._version


def diagonal(mask: Tensor, offset: int) -> Tensor:
    """Of a mask [B, 1, T, T]: the pairs of each token and the one `offset` places behind it, [B, T - |offset|]."""
    source = _source(mask)
    found = source.diagonal(offset, -2, -1) if isinstance(source, Tensor) else source.diagonal(offset)
    return found[:, 0]


def blocks(mask: Tensor, at_once: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """A mask [B, 1, T, T] in parts of about so many pairs: rows of the batch, queries, and their pairs [b, q, T]."""
    source = _source(mask)
    (batch, _, queries, keys), at_once = mask.shape, at_once if isinstance(source, Tensor) else min(at_once, BLOCK)
    some = max(1, min(queries, at_once // max(keys, 1)))
    rows = max(1, at_once // max(queries * keys, 1)) if some == queries else 1
    for row in range(0, batch, rows):
        for query in range(0, queries, some):
            part = slice(row, row + rows), slice(query, query + some)
            values = source[part[0], :, part[1]] if isinstance(source, Tensor) else source.block(*part)
            yield (*part, values[:, 0])


def _source(mask: Tensor) -> Tensor | Recorded:
    if not isinstance(mask, PairMask):
        return mask
    return mask.cell.recorded if not mask.cell.version else mask.cell.real()


def begun(func: Callable, args: tuple, pairs: int) -> PairMask | None:
    """An operation on a column and a row, recorded; None where it is on others, or makes neither bools nor integers."""
    if len(args) != 2 or not all(isinstance(x, Tensor) for x in args) or any(isinstance(x, PairMask) for x in args):
        return None
    if args[0].numel() * args[1].numel() < pairs:
        return None
    if args[0].is_floating_point() and func not in _COMPARISONS:
        return None
    return _record(func, args)


def _recorded(func: Callable, args: tuple) -> PairMask | None:
    """What an operation on a recorded mask makes, without its values; None where they have to be read."""
    if func is Tensor.expand:
        return _expanded(args)
    if func is Tensor.detach:
        return PairMask(args[0].cell)
    if func is Tensor.contiguous and len(args) == 1:
        return args[0]
    if func is Tensor.__getitem__:
        return PairMask(args[0].cell) if _is_all(args[0], args[1]) else None
    if func is Tensor.to and len(args) == 2 and isinstance(args[0], PairMask):
        mask, to = args
        if isinstance(to, torch.dtype):
            return mask if to == mask.dtype else _record(func, args)
        return mask if isinstance(to, (str, torch.device)) and torch.device(to) == mask.device else None
    alone = func in _WHERE and len(args) != 3  # of one argument, it returns indices
    return _record(func, args) if func in _EACH_PAIR and not alone else None


def _is_all(mask: Any, index: Any) -> bool:
    """Whether an index leaves nothing out: a model that may cut rows writes `mask[:, :, -0:, :]` for all of them."""
    index = index if isinstance(index, tuple) else (index,)  # of another tensor, it has a mask in it
    if len(index) > mask.dim() or not all(type(each) is slice for each in index):
        return False
    return all(each.indices(size) == (0, size, 1) for each, size in zip(index, mask.shape))


def _expanded(args: tuple) -> PairMask | None:
    mask, sizes = args[0], args[1:]
    sizes = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
    if len(sizes) != mask.dim() or not all(isinstance(size, int) for size in sizes):
        return None
    shape = torch.Size(old if new == -1 else new for old, new in zip(mask.shape, sizes))
    if any(old not in (1, new) for old, new in zip(mask.shape, shape)):
        return None  # an error of torch's
    recorded = mask.cell.recorded
    wider = Recorded(_same, (recorded,), shape, recorded.dtype, recorded.device)
    return PairMask(mask.cell if shape == recorded.shape else MaskCell(wider, mask.cell))


def _same(given: Tensor) -> Tensor:
    return given


def _record(func: Callable, args: tuple) -> PairMask | None:
    """None where an argument is neither small nor recorded, needs a gradient, or lies elsewhere."""
    tensors = [x for x in args if isinstance(x, Tensor)]
    others = (x for x in args if not isinstance(x, Tensor))
    if not all(isinstance(x, (bool, int, float, torch.dtype)) for x in others):
        return None
    device = max(tensors, key=Tensor.dim).device
    if any(x.requires_grad or (x.device != device and x.dim()) for x in tensors) or device.type == "meta":
        return None
    try:
        shape = torch.broadcast_shapes(*(x.shape for x in tensors))
    except RuntimeError:
        return None  # an error of torch's
    if len(shape) < 2 or any(_is_large(x, math.prod(shape)) for x in tensors):
        return None
    like = (
        (x.dtype, bool(x.dim())) if isinstance(x, Tensor) else x if isinstance(x, torch.dtype) else type(x)
        for x in args
    )
    dtype = _dtype(func, tuple(like), torch.get_default_dtype())
    given = tuple(_kept(x) if isinstance(x, Tensor) else x for x in args)
    return PairMask(MaskCell(Recorded(func, given, shape, dtype, device)))


def _is_large(given: Tensor, pairs: int) -> bool:
    """Whether it may not be kept beside the mask: it is as large, or its values were made and written to."""
    if isinstance(given, PairMask):
        return given.cell.version > 0
    return given.numel() * SMALL > pairs or type(given) is not Tensor


def _kept(given: Tensor) -> Tensor | Recorded:
    """A small tensor is copied: somebody may write to it before the mask is read."""
    if isinstance(given, PairMask):
        return given.cell.recorded
    return given.detach().clone()


@functools.lru_cache(maxsize=256)
def _dtype(func: Callable, like: tuple, default: torch.dtype) -> torch.dtype:
    """Of the result; like: (dtype, whether it has dimensions) in place of each tensor, and the type of each number.

    default: torch's, of what bools and a number make.
    """

    def example(x: Any) -> Any:
        if isinstance(x, tuple):
            return torch.zeros([1] * x[1], dtype=x[0], device="cpu")
        return x() if isinstance(x, type) else x

    with plain_functions():
        return func(*map(example, like)).dtype
