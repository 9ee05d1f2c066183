"""Hidden states that ask for a gradient, so that a model's first layer is called as all others are, and what becomes of that where nothing is trained."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map_only

from tunecompile.runtime.dynamic_shapes import tensors_in


class _AsksForGradient(torch.autograd.Function):
    """A tensor as one that requires a gradient, which nobody receives."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, wanting: Tensor) -> Tensor:
        return tensor.data  # not a view in autograd's eyes: a layer may write into it

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


def ask(layer: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict, Any]:
    """Let the hidden states of a model's first layer ask for a gradient, as those of all others do: otherwise it would be the one call of
    another kind, and the first step would compile twice. Computing that gradient costs a few tenths of a per cent of a step. The last is
    the node that asks; None where nothing has to."""
    tensors = [(where, t) for where, t in tensors_in(args, kwargs) if t.dim() > 1]
    found = next(iter(tensors), None)
    if (
        found is None
        or any(t.requires_grad for _, t in tensors)
        or not found[1].is_floating_point()
        or not torch.is_grad_enabled()
        or isinstance(found[0], tuple)
        or not any(parameter.requires_grad for parameter in layer.parameters())
    ):
        return args, kwargs, None
    where, hidden = found[0], _AsksForGradient.apply(found[1], torch.empty(0, requires_grad=True))
    asked = (
        (args, {**kwargs, where: hidden})
        if isinstance(where, str)
        else ((*args[:where], hidden, *args[where + 1 :]), kwargs)
    )
    return *asked, hidden.grad_fn


def unasked(output: Any, asking: Any) -> Any:
    """What such a layer returned, without a graph where that leads to nothing else: a layer may do without what it has to train (its adapter is merged, or
    disabled), and a step that trains nothing fails as it does in eager code. One look at the node of a compiled layer, which lists its parameters."""
    seen, pending = (
        {asking},
        [get_gradient_edge(t).node for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad],
    )
    while pending:
        node = pending.pop()
        if type(node).__name__ == "AccumulateGrad":
            return output
        if node not in seen:
            seen.add(node)
            pending.extend(following for following, _ in node.next_functions if following is not None)
    return tree_map_only(Tensor, lambda t: t.detach() if t.requires_grad else t, output)
