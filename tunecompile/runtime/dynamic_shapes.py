"""Which dimensions of a layer's arguments follow the batch's rows and length: symbolic from the second shape on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tunecompile._torch.dynamo import mark_dynamic
from tunecompile.integrations.varlen_attention import LONGEST, OFFSETS


def tensors_in(args: tuple, kwargs: dict) -> Iterator[tuple[Any, Tensor]]:
    """(position or name, tensor) of all tensor arguments, also of those in a tuple (the two tables of RoPE)."""
    for where, value in (*enumerate(args), *kwargs.items()):
        if isinstance(value, Tensor):
            yield where, value
        elif isinstance(value, tuple):
            yield from (((where, i), item) for i, item in enumerate(value) if isinstance(item, Tensor))


def batch_tokens(args: tuple, kwargs: dict) -> int:
    """Tokens of a call: rows times length of its batch, as far as its shapes tell."""
    return math.prod(DynamicShapes.of(list(tensors_in(args, kwargs))))


@dataclass
class DynamicShapes:
    """Which dimensions of which arguments follow the batch's rows and length.

    The first shape is compiled with constant sizes. From the second on, all dimensions that follow are symbolic
    together; left alone, Dynamo would learn them one at a time, with a recompilation each. Which ones follow is learnt
    from the shapes seen: a dimension that equals the length by chance drops out at the next shape. It never comes back,
    since Dynamo recompiles for a new mark.
    """

    first: tuple[int, ...] | None = None
    last: tuple[int, ...] | None = None
    following: dict[Any, dict[int, int]] = field(default_factory=dict)

    @staticmethod
    def of(tensors: Sequence[tuple[Any, Tensor]]) -> tuple[int, ...]:
        """Rows and length: the leading sizes of the first argument that has any."""
        for _, tensor in tensors:
            if tensor.dim() > 1:
                return tuple(
                    tensor.shape[:2] if tensor.dim() > 2 or not tensor.is_floating_point() else tensor.shape[:1]
                )
        return ()

    def mark(self, tensors: Sequence[tuple[Any, Tensor]], sizes: tuple[int, ...]) -> None:
        """Mark the dimensions of one call's arguments that follow `sizes`."""
        if sizes == self.first or not sizes:
            return
        if sizes != self.last:
            self._learn(tensors, sizes)
        if self.first is None:
            self.first = sizes
            return
        for where, tensor in tensors:
            dims = self.following.get(where)
            if dims:
                mark_dynamic(tensor, list(dims))

    def _learn(self, tensors: Sequence[tuple[Any, Tensor]], sizes: tuple[int, ...]) -> None:
        self.last = sizes
        for where, tensor in tensors:
            known = self.following.get(where)
            if known is None:  # which of rows and length a dimension follows: the one it equals
                known = {dim: sizes.index(size) for dim, size in enumerate(tensor.shape) if size in sizes}
            self.following[where] = {
                dim: axis for dim, axis in known.items() if dim < tensor.dim() and tensor.shape[dim] == sizes[axis]
            }


def mark_flat(tensors: Sequence[tuple[Any, Tensor]], total: int) -> None:
    """Mark a flattened batch, [1, N]: N differs nearly every time, so it is symbolic from the first batch on, like the
    number of rows.
    """
    for where, tensor in tensors:
        dim = 0 if where in (OFFSETS, LONGEST) else 1 if tensor.dim() > 1 and tensor.shape[:2] == (1, total) else None
        if dim is not None:
            mark_dynamic(tensor, dim)
