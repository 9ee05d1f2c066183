"""Lay the gradient of attention's output out as the output is, for cuDNN.

torch keeps the plan of cuDNN's backward under sizes and strides of query, key and value, and leaves out the gradient's
(pytorch#191576). A plan of another layer then reads it in the wrong places: gradients are wrong, or the process ends.
Flux has such layers: one gives its heads to a product of their own, the other to one that also reads the MLP's columns.
"""

import functools
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from tunecompile._torch.known_bugs import CUDNN_GRADIENT_LAYOUT
from tunecompile.compiler.pass_manager import Context, Pass
from tunecompile.ir.op import aten_name
from tunecompile.ir.views import inverse, memory_order
from tunecompile.passes.lower.choose_provider import expand

__all__ = ["PASS"]

BACKWARD = "_scaled_dot_product_cudnn_attention_backward"  #: (gradient, query, key, value, output, ...)


def run(graph: Graph, context: Context) -> None:
    for node in list(graph.nodes) if CUDNN_GRADIENT_LAYOUT.present else ():
        if node.op == "call_function" and aten_name(node.target) == BACKWARD and not _same_layout(node):
            options = tuple(node.kwargs.items())
            call = functools.partial(with_gradient_as_output, target=node.target, options=options)
            expand(graph, node, call, context.traced)


def with_gradient_as_output(
    grad: torch.Tensor, q: Any, k: Any, v: Any, out: torch.Tensor, *rest: Any, target: Any, options: tuple
) -> Any:
    """The results of `target(grad, q, k, v, out, *rest, **dict(options))`, of a copy of `grad` with `out`'s layout."""
    order = memory_order(out)
    copy = grad.permute(order).contiguous().permute(inverse(order))
    return target(copy, q, k, v, out, *rest, **dict(options))


def _same_layout(node: Node) -> bool:
    grad, out = (node.args[at].meta["val"] for at in (0, 4))
    sides = zip(out.shape, grad.stride(), out.stride())
    return all(statically_known_true(size == 1) or statically_known_true(one == other) for size, one, other in sides)


PASS = Pass("attention_gradient", "lower", run, requires=frozenset({"choose_provider"}))
