"""Deferred logits of a linear by itself: no model, no compiler, a few milliseconds a loss."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tunecompile.compiler.pass_manager import MatchCount
from tunecompile.runtime.loss_head.linear_head import LinearHead
from tunecompile.runtime.loss_head.slot import Head, defer

ROWS, TOKENS, WIDTH, WORDS = 2, 5, 6, 11
#: logits, labels of each token -> numbers
Use = Callable[[Tensor, Tensor], Tensor]


class Counted(Head):
    """A head that counts how often its logits are computed as a whole."""

    made = 0

    def logits(self, hidden: Tensor, autocast: torch.dtype | None, called: LinearHead) -> Tensor:
        self.made += 1
        return super().logits(hidden, autocast, called)


def linear(dtype: torch.dtype = torch.float64, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, WORDS, bias=bias, dtype=dtype)


def states(dtype: torch.dtype = torch.float64) -> Tensor:
    """Hidden states, of unequal rows."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, TOKENS, WIDTH, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()


def labels() -> Tensor:
    return torch.randint(0, WORDS, (ROWS, TOKENS), generator=torch.Generator().manual_seed(2))


def head_of(module: nn.Linear, **options) -> Counted:
    return Counted(module, MatchCount("linear_cross_entropy", found=1), **options)


def deferred(head: Head, hidden: Tensor) -> Tensor:
    module = head.module
    return defer(head, hidden, LinearHead(module.weight, module.bias, module.weight.dtype))


def results(use: Use, logits: Tensor, given: list[Tensor]) -> list[Tensor]:
    """What a use gives, and the gradients of a weighed sum of it at the tensors that are given."""
    found = use(logits, labels())
    weights = torch.linspace(-1.0, 2.0, found.numel(), dtype=torch.float64).view(found.shape)
    return [found.detach(), *torch.autograd.grad((found.double() * weights).sum(), given)]


def compared(use: Use, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], list[Tensor], Counted]:
    """(results of deferred logits, those of real ones, the head)."""
    module, hidden = linear(dtype), states(dtype)
    head, given = head_of(module), [hidden, module.weight, module.bias]
    return results(use, deferred(head, hidden), given), results(use, module(hidden), given), head
