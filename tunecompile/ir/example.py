"""Arguments of a call of each op that says `example=`: what trials, tests, offline compiles and benchmarks run it with.

By default sizes are the least that every template takes, and no multiples of a tile: masked ends are tried, too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tunecompile.ir.eager_call import outputs
from tunecompile.ir.op import Op

ROWS, WIDTH = 5, 1064


class Draw:
    """Draws the tensors of an example: the same values each time, and the user's random state stays as it is.

    Args:
        device: where they lie. On "meta" they have no values, and may be of any size.
        dtype: of what is in the model's precision.
        rows: tokens, of ops that treat each by itself.
        width: of their hidden states.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, rows: int = ROWS, width: int = WIDTH):
        self.device, self.dtype, self.rows, self.width = device, dtype, rows, width
        self.generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return numbers around 0, with the deviation `scale`."""
        return self._draw(torch.randn, shape, lambda made: (made * scale).to(self.device, dtype or self.dtype))

    def hidden(self) -> torch.Tensor:
        """Return hidden states, [rows, width]."""
        return self.normal(self.rows, self.width)

    def codes(self, *shape: int, upto: int = 256) -> torch.Tensor:
        """Return bytes below `upto`."""
        draw = lambda size, **how: torch.randint(0, upto, size, dtype=torch.uint8, **how)  # noqa: E731
        return self._draw(draw, shape, lambda made: made.to(self.device))

    def order(self, count: int) -> torch.Tensor:
        """Return a permutation, int64 [count]."""
        return torch.randperm(count, generator=self.generator, device="cpu").to(self.device)

    def numbers(self, *values: int | list[int]) -> torch.Tensor:
        """Return these as int32."""
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def _draw(self, draw: Callable, shape: tuple[int, ...], place: Callable) -> torch.Tensor:
        if self.device.type == "meta":
            return place(draw(shape, device="meta"))
        return place(draw(shape, generator=self.generator, device="cpu"))


def arguments_of(op: Op, draw: Draw) -> list | None:
    """Return the arguments of an op's example, or None where it has none.

    Args:
        op: an op; the arguments of a backward follow from those of its forward.
        draw: makes the tensors.
    """
    owner = op.owner or op
    if owner.example is None:
        return None
    given, formula = owner.example(draw), owner.formula
    if owner is op or formula is None:
        return given
    made = outputs(owner.reference(*given))
    known = dict(zip(owner.parameters, given)) | {f"out{i}": value for i, value in enumerate(made)}
    gradients = [draw.normal(*each.shape, dtype=each.dtype) for each in made[: formula.differentiable]]
    return [*gradients, *(known[name] for name in formula.saves)]
