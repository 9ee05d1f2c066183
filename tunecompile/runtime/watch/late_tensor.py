"""Tensors that are made when somebody reads them: until then they have a shape, and no values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_SHAPE = {getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda", "layout")}
_SHAPE |= {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__hash__}


class LateTensor(Tensor):
    """A tensor whose values a function makes at the first use of them.

    Args:
        shape: of the tensor.
        dtype: of its elements.
        device: where it will be.
        make: returns the tensor.
    """

    shown = _SHAPE  #: what is answered without the values

    @staticmethod
    def __new__(cls, shape: tuple, dtype: torch.dtype, device: torch.device, make: Callable[[], Tensor]):
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)

    def __init__(self, shape: tuple, dtype: torch.dtype, device: torch.device, make: Callable[[], Tensor]):
        self.make: Callable[[], Tensor] | None = make
        self.made: Any = None

    def real(self) -> Tensor:
        """Return the tensor."""
        if (make := self.make) is not None:
            self.made, self.make = make(), None
        return self.made

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in cls.shown:
            return super().__torch_function__(func, types, args, kwargs or {})
        return func(*_real(args), **_real(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*_real(args), **_real(kwargs or {}))

    def __reduce_ex__(self, protocol):
        return self.real().__reduce_ex__(protocol)


def _real(tree: Any) -> Any:
    return pytree.tree_map(lambda each: each.real() if isinstance(each, LateTensor) else each, tree)
