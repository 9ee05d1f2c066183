"""Batches whose loss has a gradient of zero: their backward pass is left out.

A group of completions with equal rewards has no advantage, and without a KL term no gradient: seldom all of a batch for
one prompt that is neither too easy nor too hard, else often. (DAPO, arXiv:2503.14476, samples others in their place.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from tunecompile._torch.autograd import walk
from tunecompile._torch.cuda import start_copy_to_host
from tunecompile.notes import Note, note
from tunecompile.runtime.loss_head.token_scores import is_token_scores

_ADVANTAGES = "advantages"  #: of a batch of completions, by TRL's name


class UnneededBackward:
    """Looks at the losses of one Trainer."""

    def __init__(self, trainer: Any):
        self.batches = self.rows = 0  #: that were left out
        self._loss = trainer.compute_loss
        # others' backward passes wait for each other, and engines keep weights and gradients in other places
        engines = (getattr(trainer, f"is_{engine}_enabled", False) for engine in ("deepspeed", "fsdp"))
        if trainer.args.world_size == 1 and trainer.args.n_gpu <= 1 and not any(engines):
            trainer.compute_loss = self._compute_loss

    def notes(self) -> list[Note]:
        """For the report."""
        return [note("backward-left-out", count=self.batches, rows=self.rows)] if self.batches else []

    def _compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        advantages = inputs.get(_ADVANTAGES) if isinstance(inputs, dict) else None
        if not isinstance(advantages, Tensor) or not torch.is_grad_enabled():
            return self._loss(model, inputs, *args, **kwargs)
        learns, arrived = advantages.any(), None
        if learns.is_cuda:
            learns, arrived = start_copy_to_host(learns)  # beside the forward pass
        found = self._loss(model, inputs, *args, **kwargs)
        if arrived is not None:
            arrived.synchronize()
        loss = found if isinstance(found, Tensor) else None
        if learns or loss is None or (parameters := _without_gradient(loss)) is None:
            return found
        self.batches, self.rows = self.batches + 1, self.rows + len(advantages)
        return _Zeros.apply(loss.detach(), *parameters)


def _without_gradient(loss: Tensor) -> list[nn.Parameter] | None:
    """The parameters that a loss reaches, if it does so through scores of tokens alone, and the gradients of all those
    scores are zero; else None.
    """
    if loss.grad_fn is None:
        return None
    _, nodes = walk([get_gradient_edge(loss)], [])
    scores = [GradientEdge(node, 0) for node in nodes if is_token_scores(node)]
    beside, nodes = walk([get_gradient_edge(loss)], scores)
    if beside or not scores:
        return None
    edges = [GradientEdge(edge.node, number) for edge in scores for number in sorted(nodes[edge.node])]
    grads = torch.autograd.grad(loss, edges, retain_graph=True, allow_unused=True)
    if any(grad is not None and grad.any() for grad in grads):
        return None
    leaves = (leaf.variable for leaf in walk(edges, [])[0])
    return [leaf for leaf in leaves if isinstance(leaf, nn.Parameter)]


class _Zeros(torch.autograd.Function):
    """A loss whose gradients are zero: optimizers decay weights and momenta as they do after a backward pass."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *parameters: nn.Parameter) -> Tensor:
        ctx.parameters = parameters
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *map(torch.zeros_like, ctx.parameters)
