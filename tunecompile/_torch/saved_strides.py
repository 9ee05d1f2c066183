"""Saved tensors that hooks of the caller give back in other strides than the backward was compiled for.

Code of Inductor addresses its inputs by the strides that it was made for, and refuses others. Hooks that copy what is
saved (to numpy, to pinned memory, into fewer bits) give back dense tensors in the place of slices and transposes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tunecompile._torch.autograd import innermost_hooks

_KEEP_STRIDES = ("torch.utils.checkpoint", "tunecompile.")  #: modules whose hooks give back what they took


class _Seen:
    """Whether any layer ran under hooks of the caller. From then on strides are compared, which takes a while."""

    hooks = False


def notice_hooks() -> None:
    """Before a layer's call: see whether hooks of the caller take its saved tensors."""
    if not _Seen.hooks and (found := innermost_hooks()) is not None:
        _Seen.hooks = not getattr(found[0], "__module__", "").startswith(_KEEP_STRIDES)


def hooks_were_seen() -> bool:
    """Whether any layer ran under hooks of the caller. Graphs that come from AOTAutograd's cache compare no strides."""
    return _Seen.hooks


def with_strides(run: Callable[[list], Any], fakes: Sequence[Any]) -> Callable[[list], Any]:
    """`run`, on inputs in the strides that it was compiled for.

    Args:
        run: takes its inputs in a list.
        fakes: the inputs that it was compiled for.
    """
    expected = _Expected(fakes)

    def call(inputs: list) -> Any:
        if _Seen.hooks:
            expected.restore(inputs)
        return run(inputs)

    return call


class _Expected:
    """The strides of all inputs, for the sizes of a call."""

    def __init__(self, fakes: Sequence[Any]) -> None:
        #: of each tensor its strides: numbers, or expressions of symbols
        self.strides = {
            at: tuple(_expression(stride) for stride in fake.stride())
            for at, fake in enumerate(fakes)
            if isinstance(fake, torch.Tensor) and fake.layout is torch.strided
        }
        self.symbols: dict[
            Any, tuple[int, int | None]
        ] = {}  #: symbol -> the input, or a size of it, that has its value
        for at, fake in enumerate(fakes):
            for dim, size in (
                [(None, fake)] if isinstance(fake, torch.SymInt) else enumerate(getattr(fake, "shape", ()))
            ):
                if (expression := _expression(size)) is not size and expression.is_symbol:
                    self.symbols.setdefault(expression, (at, dim))
        self.known: dict[tuple[int, ...], dict[int, tuple[int, ...]]] = {}  #: by the values of symbols

    def restore(self, inputs: list) -> None:
        """Copy the tensors whose strides differ."""
        for at, strides in self._of(inputs).items():
            tensor = inputs[at]
            if tensor.stride() != strides and any(
                size > 1 and has != wanted for size, has, wanted in zip(tensor.shape, tensor.stride(), strides)
            ):
                inputs[at] = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(
                    tensor.detach()
                )

    def _of(self, inputs: list) -> dict[int, tuple[int, ...]]:
        values = tuple(int(inputs[at]) if dim is None else inputs[at].shape[dim] for at, dim in self.symbols.values())
        if values not in self.known:
            given = dict(zip(self.symbols, values))
            self.known[values] = {
                at: tuple(int(s) if isinstance(s, int) else int(s.subs(given)) for s in strides)
                for at, strides in self.strides.items()
            }
        return self.known[values]


def _expression(size: Any) -> Any:
    """A number as it is; of a symbolic size its expression."""
    return size if isinstance(size, int) else size.node.expr
