"""The graph of a function as Dynamo gives it, without Dynamo: milliseconds in place of a tenth of a second."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node, Tracer, map_arg


class _Calls(Tracer):
    """Refuses calls in a context, of which a graph of calls alone does not tell."""

    def __init__(self):
        super().__init__()
        self.modes = _modes()

    def create_proxy(self, *args, **kwargs):
        if _modes() != self.modes:
            raise NotImplementedError("a context that changes gradients or dtypes")
        return super().create_proxy(*args, **kwargs)


def _modes() -> tuple:
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


class _Recording(Interpreter):
    """Notes each node's value, as Dynamo does."""

    def run_node(self, n: Node):
        n.meta["example_value"] = made = super().run_node(n)
        return made


def captured(fn: Callable, args: Sequence[torch.Tensor]) -> GraphModule:
    """A function's graph with fake values. What torch writes in Python, as `F.tanh`, is seen by what it calls.

    Raises:
        Exception: any, where what the function does depends on more than symbols tell.
    """
    names = ", ".join(f"arg{place}" for place in range(len(args)))
    tracer = _Calls()
    graph = tracer.trace(eval(f"lambda {names}: fn({names})", {"fn": fn}))
    gm = GraphModule(tracer.root, graph)
    mode = FakeTensorMode()
    with mode:
        _Recording(gm).run(*(mode.from_tensor(each) for each in args))
    _fold(gm.graph)
    return gm


def captured_or_none(fn: Callable, args: Sequence) -> GraphModule | None:
    """The same; None for what Dynamo alone captures: modules, numbers among the arguments, control flow, contexts."""
    if isinstance(fn, nn.Module) or not all(type(each) is torch.Tensor for each in args):
        return None
    try:
        return captured(fn, args)
    except Exception:
        return None


def _fold(graph: Graph) -> None:
    """Put constants in the place of dtypes and sizes, and places in that of names of results, as Dynamo does."""
    constants = (torch.dtype, torch.device, torch.Size, int, float)
    known = {node: made for node in graph.nodes if isinstance(made := node.meta["example_value"], constants)}
    for node in graph.nodes:
        if node.target is getattr and isinstance(several := node.args[0].meta["example_value"], tuple):
            place = next(at for at, each in enumerate(several) if each is node.meta["example_value"])
            node.target, node.args = operator.getitem, (node.args[0], place)
        node.args, node.kwargs = map_arg((node.args, node.kwargs), lambda each: known.get(each, each))
    for node in reversed(known):
        graph.erase_node(node)
