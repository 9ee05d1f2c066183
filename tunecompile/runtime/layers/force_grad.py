"""A model's first layer is called like all others: its hidden states require a gradient, and are no view."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map_only

from tunecompile.runtime.layers.dynamic_shapes import tensors_in


class _RequireGrad(torch.autograd.Function):
    """The tensor, requiring a gradient that goes nowhere."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, anchor: Tensor) -> Tensor:
        return tensor.data  # not a view in autograd's eyes: a layer may write into it

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


class _SameMemory(torch.autograd.Function):
    """The tensor, which is no view in autograd's eyes."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


@dataclass(frozen=True)
class Shared:
    """States as the caller has them, and the tensors over their memory that a layer is given in their place."""

    pairs: tuple[tuple[Tensor, Tensor], ...]

    @property
    def nodes(self) -> set[Node | None]:
        """Those that made the tensors that the layer is given."""
        return {given.grad_fn for _, given in self.pairs}

    def hand_back(self) -> None:
        """Where the layer wrote into its states, give the caller's tensors that history. They have the values."""
        for states, given in self.pairs:
            if given._version:
                states.copy_(given)


def without_view(args: tuple, kwargs: dict) -> tuple[tuple, dict, Shared | None]:
    """The arguments of a model's first layer, with hidden states that are no view; their memory is the same.

    Of a view, Dynamo guards on sizes of what it is a view of. Other layers are given what a layer returned, so that the
    first one would have a graph of its own from the second length on.

    Returns:
        The arguments, and whose memory is shared; None where they stay as they are.
    """
    where, hidden = next(((w, t) for w, t in tensors_in(args, kwargs) if t.dim() > 1), (None, None))
    if hidden is None or not hidden._is_view() or not hidden.is_floating_point() or isinstance(where, tuple):
        return args, kwargs, None
    given = _SameMemory.apply(hidden)
    return *_with(args, kwargs, where, given), Shared(((hidden, given),))


def _with(args: tuple, kwargs: dict, where: int | str, value: Tensor) -> tuple[tuple, dict]:
    """The arguments with another value at one position, or of one name."""
    if isinstance(where, str):
        return args, {**kwargs, where: value}
    return (*args[:where], value, *args[where + 1 :]), kwargs


def require_grad(layer: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict, Shared | None]:
    """Let the hidden states of a model's first layer require a gradient, as those of all others do. Otherwise it would
    be the one call of another kind, and the first step would compile twice. (So in a decoder, whose layers are given an
    encoder's states as well.) So do further states that layers hand on from one to the next: those of a text beside an
    image's. Computing that gradient costs a few tenths of a per cent of a step.

    Returns:
        The arguments, and whose memory is shared; None where they stay as they are.
    """
    if not torch.is_grad_enabled() or not any(parameter.requires_grad for parameter in layer.parameters()):
        return args, kwargs, None
    states = ((w, t) for w, t in tensors_in(args, kwargs) if t.dim() > 1)
    hidden, handed_on, pairs = next(states, None), handed_on_by(type(layer)), []
    for where, tensor in () if hidden is None else (hidden, *(each for each in states if each[0] in handed_on)):
        if not (tensor.requires_grad or isinstance(where, tuple)) and tensor.is_floating_point():
            given = _RequireGrad.apply(tensor, torch.empty(0, device="cpu", requires_grad=True))
            args, kwargs = _with(args, kwargs, where, given)
            pairs.append((tensor, given))
    return args, kwargs, Shared(tuple(pairs)) if pairs else None


@functools.cache
def handed_on_by(kind: type[nn.Module]) -> frozenset[int | str]:
    """Names and positions of the arguments that layers of a class return in a tuple, as their source tells.

    Where it does not, the first layer is compiled by itself.
    """
    try:
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(kind.forward))).body
    except (OSError, TypeError, ValueError, SyntaxError):
        return frozenset()
    if not isinstance(function, ast.FunctionDef):
        return frozenset()
    names = [argument.arg for argument in function.args.args[1:]]
    tuples = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
    returned = {
        item.id for each in tuples if isinstance(each, ast.Tuple) for item in each.elts if isinstance(item, ast.Name)
    }
    return frozenset(place for at, name in enumerate(names) if name in returned for place in (at, name))


def drop_graph(output: Any, forced: Set[Node | None]) -> Any:
    """The output of such a layer, detached where its graph leads to nothing else: a layer may run without the weights
    it would train (its adapter is merged, or disabled), and a step that trains nothing fails as it does in eager code.
    One look at the node of a compiled layer, which lists its parameters.
    """
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    seen, pending = {*forced}, [get_gradient_edge(tensor).node for tensor in tensors]
    while pending:
        node = pending.pop()
        if type(node).__name__ == "AccumulateGrad":
            return output
        if node not in seen:
            seen.add(node)
            pending.extend(following for following, _ in node.next_functions if following is not None)
    return without_graph(output)


def without_graph(output: Any) -> Any:
    """The output, detached."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach() if tensor.requires_grad else tensor, output)
