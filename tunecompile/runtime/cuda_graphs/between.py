"""What stands between layers that were replayed at once: results that are written when somebody reads them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tunecompile._torch.autograd import plain_tensors
from tunecompile.runtime.cuda_graphs.chain import itself
from tunecompile.runtime.cuda_graphs.stack_pass import Replayed
from tunecompile.runtime.cuda_graphs.stacks import Stacks
from tunecompile.runtime.watch.late_tensor import LateTensor
from tunecompile.runtime.watch.module_watch import not_on_modules


@dataclass(frozen=True)
class Form:
    """How a layer runs on its batch: on a row of it, or as it comes."""

    rows: Any = None  #: what layers on the same row share
    leave: Callable[[Tensor], Tensor] = itself  #: gives the batch of a row: [1, N, H] -> [B, T, H]
    batch: tuple = ()  #: rows and length, where it runs on a row


class Between(LateTensor):
    """A layer's result that was not written. It is made when somebody reads it.

    Args:
        stacks: of the model.
        under_way: the pass that was replayed.
        form: how layers run on their batch.
        shape: of the batch.
    """

    shown = LateTensor.shown | {Tensor.requires_grad.__get__}

    @staticmethod
    def __new__(cls, stacks: Stacks, under_way: Replayed, form: Form, shape: tuple[int, ...]) -> Between:
        output = under_way.output
        assert output is not None
        return Tensor._make_wrapper_subclass(
            cls, shape, dtype=output.dtype, device=output.device, requires_grad=output.requires_grad
        )

    def __init__(self, stacks: Stacks, under_way: Replayed, form: Form, shape: tuple[int, ...]):
        calls = self.calls = under_way.done
        super().__init__(shape, self.dtype, self.device, lambda: stacks.result(under_way, calls, form.leave))
        self.under_way, self.rows = under_way, form.rows
        under_way.late.append(weakref.ref(self))
        with plain_tensors():  # `Function.apply` takes it as it is
            not_on_modules(self.register_post_accumulate_grad_hook, _pass_back)

    def passed(self, rows: Any, under_way: Replayed | None) -> Tensor | None:
        """What the next layer is given in its place; None once somebody read it, for a layer of another pass, and for
        one behind the next.

        Args:
            rows: that the layer runs on.
            under_way: the pass that is under way among its layers.
        """
        if self.make is None or rows is not self.rows or under_way is not self.under_way:
            return None
        return self.under_way.output if self.under_way.done == self.calls else None


def _pass_back(between: Tensor) -> None:
    """A gradient has reached a result that was not written: on to what the layers give."""
    with plain_tensors():
        gradient, between.grad = between.grad, None
    assert isinstance(between, Between)
    torch.autograd.backward(between.real(), gradient, retain_graph=True)  # the loss may go through it, too
