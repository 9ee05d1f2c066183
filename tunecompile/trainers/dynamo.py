"""The door of `torch.compile(model, backend="tunecompile")`: rewrites of its graphs, and Inductor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule

from tunecompile import passes as own_passes
from tunecompile.compiler.backend import Backend
from tunecompile.compiler.plugins import pipeline


def backend(graph: GraphModule, inputs: list[Any]) -> Callable:
    """Compile one graph of Dynamo's: recognise, lower, and hand over to Inductor.

    Memory budgets, padding removal, deferred logits and CUDA graphs belong to layers, which a graph does not know:
    `tunecompile.optimize(model)` has them, and is the better choice for a whole model.
    """
    return Backend("torch.compile", pipeline(own_passes.PIPELINE), "inductor")(graph, inputs)
