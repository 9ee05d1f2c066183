"""Results of a layer that nobody uses: keys that it keeps for none, and what only these depend on.

Weights that only unused results depend on have no gradient, as in eager. The backward of a compiled layer computes all
gradients, with zeros for those of results that nobody uses (the text stream of a last block, say). An optimizer would
decay such weights, where eager leaves them as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from tunecompile.ir.canonicalize import value
from tunecompile.runtime.cuda_graphs.chain import Link
from tunecompile.runtime.watch.module_watch import not_on_modules

_COMPILED = "CompiledFunctionBackward"  #: AOTAutograd's node


class UnreadKeys:
    """Of a region whose layers all keep keys and values, so that they have one graph: whether any are read."""

    def __init__(self) -> None:
        self.are_read = False  #: by later layers, of the layer that runs


def without_unread_keys(keys: UnreadKeys | None, gm: GraphModule, compiled: Callable) -> Callable:
    """Return `compiled`, which gives None in place of keys and values that are not read.

    Recorded in a stack, a call has its first result alone.

    Args:
        keys: of the region; None where its layers keep none.
        gm: its graph, as Dynamo made it.
        compiled: takes the graph's inputs, and returns its outputs.
    """
    if keys is None:
        return compiled
    (returned,) = gm.graph.find_nodes(op="output")
    results = [value(node) for node in returned.all_input_nodes]
    if [each.dim() if isinstance(each, Tensor) else None for each in results] != [3, 4, 4]:
        return compiled  # a piece of a layer, perhaps
    run = compiled.run if isinstance(compiled, Link) else compiled

    def read(*args: Any) -> Sequence[Any]:
        made = run(*args)
        return made if keys.are_read else made[:1]

    alone = Link(read, compiled.through) if isinstance(compiled, Link) else read
    return lambda *args: [*(made := alone(*args)), *[None] * (len(results) - len(made))]


@contextlib.contextmanager
def are_read(keys: UnreadKeys | None) -> Iterator[None]:
    """Inside, a layer runs whose keys are read. keys: its region's; None for a layer whose keys are not."""
    if keys is None:
        yield
        return
    keys.are_read = True
    try:
        yield
    finally:
        keys.are_read = False


def without_gradients_of_unused(gm: GraphModule, compiled: Callable) -> Callable:
    """Return `compiled`, whose backward gives no gradient to inputs that only unused results depend on.

    Args:
        gm: its graph, as Dynamo made it.
        compiled: takes the graph's inputs, and returns its outputs.
    """
    (returned,) = gm.graph.find_nodes(op="output")
    results = [node for node in returned.all_input_nodes if _trains(node)]
    if len(results) < 2:
        return compiled
    inputs = [node for node in gm.graph.find_nodes(op="placeholder") if isinstance(value(node), Tensor)]
    reached = [frozenset(results).intersection(_behind(node)) for node in inputs]
    needed = [places for node, places in zip(inputs, reached) if _trains(node)]
    if all(len(places) == len(results) for places in needed):
        return compiled

    def run(*args: Any) -> Any:
        made = compiled(*args)
        tensors = [each for each in tree_leaves(made) if isinstance(each, Tensor) and each.requires_grad]
        nodes = {each.grad_fn for each in tensors}
        if len(tensors) == len(results) and len(nodes) == 1 and type(node := nodes.pop()).__name__ == _COMPILED:
            not_on_modules(node.register_hook, _hook(results, [each.output_nr for each in tensors], reached))
        return made  # (views of one result are none: their gradients are parts of one)

    return run


def _hook(results: Sequence[Node], numbers: Sequence[int], reached: Sequence[frozenset[Node]]) -> Callable:
    def drop(inputs: tuple, outputs: tuple) -> tuple | None:
        unused = {result for result, number in zip(results, numbers) if outputs[number] is None}
        if not unused or len(inputs) != len(reached):
            return None
        return tuple(None if places and places <= unused else each for each, places in zip(inputs, reached))

    return drop


def _trains(node: Node) -> bool:
    tensor = value(node)
    return isinstance(tensor, Tensor) and tensor.requires_grad


def _behind(node: Node) -> set[Node]:
    """A node, and all that is computed of it."""
    found, pending = {node}, [node]
    while pending:
        new = [user for user in pending.pop().users if user not in found]
        found.update(new)
        pending += new
    return found
