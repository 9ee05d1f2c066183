"""Which dimensions of a layer's arguments follow the batch's rows and length: symbolic from the second shape on."""

from __future__ import annotations

import itertools
import math
from collections import UserDict, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tunecompile._torch.dynamo import mark_dynamic
from tunecompile.runtime.unpad.flat_batch import LONGEST, OFFSETS, PLACES, ROW_OFFSETS, ROWS, TREE
from tunecompile.runtime.unpad.masks.given import is_mask


def tensors_in(args: tuple, kwargs: dict) -> Iterator[tuple[Any, Tensor]]:
    """(position or name, tensor) of all tensor arguments, also of those in a tuple (the two tables of RoPE), and behind
    them those in a mapping (keys and values of other layers).
    """
    mappings = []
    for where, value in (*enumerate(args), *kwargs.items()):
        if isinstance(value, Tensor):
            yield where, value
        elif isinstance(value, tuple):
            yield from (((where, i), item) for i, item in enumerate(value) if isinstance(item, Tensor))
        elif isinstance(value, (dict, UserDict)):
            mappings.append((where, value))
    for name, mapping in mappings:
        for key, value in mapping.items():
            yield from (((name, key, at), item) for at, item in tensors_in((value,), {}))


def _of_heads(tensor: Tensor, total: int) -> bool:
    """Whether it is [1, H, N, D], with so many tokens."""
    return tensor.dim() == 4 and tensor.shape[0] == 1 and tensor.shape[2] == total


def batch_tokens(args: tuple, kwargs: dict) -> int:
    """Tokens of a call: rows times length of its batch, as far as its shapes tell."""
    return math.prod(DynamicShapes.of(list(tensors_in(args, kwargs))))


@dataclass
class _Shapes:
    """What the calls of one layer have shown.

    Layers of one code may differ in a size that never changes: heads of Gemma 4 are wider in every sixth layer, and so
    are its tables of RoPE.
    """

    lengths: tuple[int, ...] = ()  #: of the last call
    last: tuple[torch.Size, ...] = ()
    masks: tuple[Any, ...] | None = None  #: which arguments of the first call were masks of bools, of pairs of tokens
    alike: bool = True  #: whether the same ones were in the last call
    shapes: dict[Any, torch.Size] = field(default_factory=dict)  #: of each argument, when it was seen last
    following: dict[Any, set[int]] = field(default_factory=dict)  #: dimensions that are one of the lengths
    others: dict[Any, set[int]] = field(default_factory=dict)  #: dimensions that change by themselves

    def look(self, tensors: Sequence[tuple[Any, Tensor]], sizes: tuple[int, ...]) -> None:
        """Learn from shapes that differ from those of the last call."""
        shapes = tuple([tensor.shape for _, tensor in tensors])
        if shapes == self.last and all(where in self.shapes for where, _ in tensors):
            return
        self.last, self.lengths = shapes, _lengths(tensors, sizes)
        masks = tuple([where for where, tensor in tensors if is_mask(tensor)])
        self.masks = masks if self.masks is None else self.masks
        self.alike = masks == self.masks
        for where, tensor in tensors:
            self._learn(where, tensor)

    def _learn(self, where: Any, tensor: Tensor) -> None:
        shape, before = tensor.shape, self.shapes.get(where)
        equal = {dim for dim, size in enumerate(shape) if size in self.lengths}
        self.shapes[where] = shape
        if before is None or len(before) != len(shape):
            self.following[where], self.others[where] = equal, set() if equal or not _is_list(tensor) else {0}
            return
        changed = {dim for dim, size in enumerate(shape) if size != before[dim]}
        self.following[where] = (self.following[where] & (equal | changed)) | (changed & equal)
        self.others[where] |= changed - equal


@dataclass
class DynamicShapes:
    """Which dimensions of which arguments follow the batch.

    The first lengths are compiled with constant sizes, for calls with a mask or for those without, as the first one
    was. From the second on, all dimensions that follow are symbolic together; left alone, Dynamo would learn them
    one at a time, with a recompilation each. Which ones follow is learnt from the shapes seen: a dimension that equals
    a length by chance drops out when lengths change and it does not.
    """

    first: tuple[int, ...] | None = None  #: lengths, see `_lengths`, that are compiled with constant sizes
    seen: defaultdict[int, _Shapes] = field(default_factory=lambda: defaultdict(_Shapes))  #: by the place of a layer

    @staticmethod
    def of(tensors: Sequence[tuple[Any, Tensor]]) -> tuple[int, ...]:
        """Rows and length: the leading sizes of the first argument that has any."""
        for _, tensor in tensors:
            if tensor.dim() > 1:
                return tuple(
                    tensor.shape[:2] if tensor.dim() > 2 or not tensor.is_floating_point() else tensor.shape[:1]
                )
        return ()

    def mark(self, tensors: Sequence[tuple[Any, Tensor]], sizes: tuple[int, ...], layer: int = 0) -> None:
        """Mark the dimensions of one call's arguments that follow the batch, whose rows and length are `sizes`.

        They are left alone in calls of the first lengths, with the masks of the first call.

        layer: the place of the layer that is called.
        """
        seen = self._look(tensors, sizes, layer)
        if self.first is None:
            self.first = seen.lengths
        _mark(tensors, seen, seen.lengths != self.first or not seen.alike)

    def mark_all(self, tensors: Sequence[tuple[Any, Tensor]], sizes: tuple[int, ...], layer: int = 0) -> None:
        """As `mark`, with the first lengths as all others."""
        _mark(tensors, self._look(tensors, sizes, layer), True)

    def _look(self, tensors: Sequence[tuple[Any, Tensor]], sizes: tuple[int, ...], layer: int) -> _Shapes:
        seen = self.seen[layer]
        seen.look(tensors, sizes)
        return seen


def _mark(tensors: Sequence[tuple[Any, Tensor]], seen: _Shapes, following: bool) -> None:
    for where, tensor in tensors:
        dims = seen.others[where] | seen.following[where] if following else seen.others[where]
        if dims:
            mark_dynamic(tensor, sorted(dims))


def _lengths(tensors: Sequence[tuple[Any, Tensor]], sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Rows and length, and the lengths of other states, [rows, length, width] as the hidden states: of an encoder's.

    Of feature maps the rows alone: heights and widths are symbols once they change. (Swin's windows took minutes to
    trace with symbols for both, though rows alone had changed.)
    """
    first = next((tensor for _, tensor in tensors if tensor.dim() > 1), None)
    if first is not None and first.dim() > 3:
        return sizes[:1]
    wide = [tensor.shape for _, tensor in tensors if tensor.dim() == 3 and tensor.is_floating_point()]
    return sizes + tuple([shape[1] for shape in wide[1:] if shape[0] == sizes[0] and shape[2] == wide[0][2]])


def has_streams(tensors: Sequence[tuple[Any, Tensor]], sizes: tuple[int, ...]) -> bool:
    """Whether other states come beside the hidden states, with a length of their own: a text's beside an image's."""
    return len(_lengths(tensors, sizes)) > 2


def mark_streams(tensors: Sequence[tuple[Any, Tensor]], sizes: tuple[int, ...]) -> None:
    """Mark rows and lengths of several streams, and of what is about their tokens, joined or not: images of one size
    and texts of one length are rare together, so they are symbolic from the first batch on.
    """
    rows, *lengths = _lengths(tensors, sizes)
    joined = {sum(some) for count in (1, 2) for some in itertools.combinations(lengths, count)}
    width = next(tensor.shape[-1] for _, tensor in tensors if tensor.dim() == 3)
    for _, tensor in tensors:
        shape, is_state = tensor.shape, tensor.dim() == 3 and tensor.shape[-1] == width and tensor.is_floating_point()
        is_mask = not tensor.is_floating_point() or (tensor.dim() > 2 and shape[-1] == shape[-2])
        inner = range(1, tensor.dim() - (not is_mask))
        if is_state and shape[1] not in lengths:  # several vectors for each row, as those that scale norms
            inner = range(0)
        dims = [dim for dim in inner if shape[dim] in joined]
        if tensor.dim() and shape[0] in (rows, *(joined if tensor.dim() == 2 else ())):
            dims.insert(0, 0)
        if dims:
            mark_dynamic(tensor, dims)


def _is_list(tensor: Tensor) -> bool:
    """Whether these are offsets of sequences or images, say, whose number is no length."""
    return tensor.dim() == 1 and not tensor.is_floating_point()


def mark_patches(tensors: Sequence[tuple[Any, Tensor]]) -> None:
    """Mark a tower's row of patches, [N, H] or [1, N, H], and what has as many rows: images of one size are rare, so N
    is symbolic from the first batch on, like the number of images.
    """
    patches = tensors[0][1].shape[-2]
    for _, tensor in tensors:
        rows = [dim for dim, size in enumerate(tensor.shape[:-1]) if size == patches]
        if rows or _is_list(tensor):
            mark_dynamic(tensor, rows[0] if rows else 0)


def mark_flat(tensors: Sequence[tuple[Any, Tensor]], total: int) -> None:
    """Mark a flattened batch, [1, N]: N differs nearly every time, so it is symbolic from the first batch on, like the
    number of rows.
    """
    for where, tensor in tensors:
        pairs = zip(tensor.shape, tensor.shape[1:])
        found = (dim + 1 for dim, sizes in enumerate(pairs) if sizes == (1, total))
        is_table = tensor.dim() == 2 and tensor.shape[0] == total  # a tower's tables have no row for its one row
        dim = _OF_ROWS.get(where, 0 if is_table else next(found, None))
        if dim is None and _of_heads(tensor, total):
            dim = 2
        if dim is not None:
            mark_dynamic(tensor, dim)


#: by name, the dimensions of what says where tokens of a flattened batch belong
_OF_ROWS = {OFFSETS: 0, LONGEST: 0, PLACES: 0, TREE: 1, **dict(zip((ROW_OFFSETS, *ROWS), (0, 0, 1, [0, 1])))}
