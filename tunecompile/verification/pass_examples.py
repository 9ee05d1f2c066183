"""Examples of a pass, findings about it, and the yardstick by which results are judged."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

FACTOR = 2.0  #: a result may be this many times as far from fp64's as the plain function's
CLOSE = (
    16  #: multiples of the dtype's resolution: a result nearer than this is right, however near the plain function's is
)
Answer = tuple[str, bool, str]  #: what should hold, whether it does, and the figures


@dataclass(frozen=True)
class Example:
    """A plain torch function that a pass has to find, and its arguments.

    Several examples show several spellings, shapes and layouts.
    """

    function: Callable[..., Any]  #: computes the subgraph by plain torch calls
    #: (floating dtype) -> tensors of it, and other arguments; those that require a gradient are trained
    args: Callable[[torch.dtype], Sequence[Any]]
    name: str = ""  #: in findings; empty: the function's
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)  #: in which the pass has to find it

    def __str__(self) -> str:
        return self.name or getattr(self.function, "__name__", "example")


@dataclass(frozen=True)
class Finding:
    """One property that should hold for one example, and whether it does. Printable."""

    net: str  #: "pass", "spelling", "near miss", "op" or "model"
    example: str  #: name of the example
    asked: str  #: what should hold
    passed: bool  #: whether it does
    detail: str = ""  #: figures, or the error

    @property
    def text(self) -> str:
        """The finding without its verdict."""
        return f"{self.net}, {self.example}: {self.asked}" + (f" ({self.detail})" if self.detail else "")

    def __str__(self) -> str:
        return f"{'passed' if self.passed else 'FAILED'}  {self.text}"


def gradients(function: Callable, args: Sequence[Any]) -> list[Tensor | None]:
    """Results of a function, and gradients of its arguments.

    Args:
        function: of `args`.
        args: those that require a gradient get one.

    Returns:
        All tensors that the function returns, then the gradients of a loss in which every element has a weight of its
        own.
    """
    leaves = [
        arg.detach().clone().requires_grad_() if isinstance(arg, Tensor) and arg.requires_grad else arg for arg in args
    ]
    made = [value for value in tree_leaves(function(*leaves)) if isinstance(value, Tensor)]
    losses = [(value.double() * _weights(value)).sum() for value in made if value.is_floating_point()]
    trained = [loss for loss in losses if loss.requires_grad]
    if trained:
        torch.autograd.backward(trained)
    found = [leaf.grad for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    return [*(value.detach() for value in made), *found]


def _weights(value: Tensor) -> Tensor:
    """Another weight for each element of a result, in fp64."""
    return torch.cos(torch.arange(value.numel(), dtype=torch.float64, device=value.device)).view(value.shape)


def in_fp64(args: Sequence[Any]) -> list[Any]:
    """The same numbers in fp64."""

    def wide(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return value.detach().double().requires_grad_(value.requires_grad)

    return tree_map(wide, list(args))


def distance(value: Tensor | None, exact: Tensor | None) -> float:
    """The relative distance in the norm; infinite where one is missing, has another shape or is no number."""
    if value is None or exact is None or value.shape != exact.shape:
        return 0.0 if value is exact else float("inf")
    error = float((value.double() - exact.double()).norm() / exact.double().norm().clamp_min(1e-30))
    return float("inf") if math.isnan(error) else error


def as_exact(
    made: Sequence[Tensor | None], plain: Sequence[Tensor | None], exact: Sequence[Tensor | None], dtype: torch.dtype
) -> tuple[bool, str]:
    """Judge results by the plain function's own distance to fp64.

    Args:
        made: results and gradients under test.
        plain: the plain function's.
        exact: those in fp64.
        dtype: that was computed in.

    Returns:
        Whether they are right, and the errors of the worst.
    """
    for value, other in zip(made, plain):
        if value is not None and other is not None and (value.dtype, value.shape) != (other.dtype, other.shape):
            wanted = f"{other.dtype} {tuple(other.shape)}"
            return False, f"a result is {value.dtype} {tuple(value.shape)}, and should be {wanted}"
    floor = CLOSE * torch.finfo(dtype).eps
    errors = [(distance(value, e), distance(other, e)) for value, other, e in zip(made, plain, exact, strict=True)]
    own, plains = max(errors, key=lambda pair: pair[0] / max(pair[1], floor), default=(0.0, 0.0))
    return own <= max(FACTOR * plains, floor), f"error {own:.1e}, the plain function's {plains:.1e}"
