"""What a layer would run in a call of another kind: its graph, traced by Dynamo and not compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from tunecompile._torch.dynamo import call_whole
from tunecompile.compiler.backend import WeakBackend, own_code
from tunecompile.runtime.layers.met_graph import MetGraph
from tunecompile.runtime.layers.variant import layer_call


class _Traced(Exception):
    """Ends a call before its graph runs, so that nothing of the layer is computed or written."""


class CallTracer:
    """Traces calls of a region's layers. Layers that Dynamo's guards take for alike are traced once.

    Args:
        name: of the region.
        guards: which of Dynamo's guards count, as torch.compile's option `guard_filter_fn`; None for all.
    """

    def __init__(self, name: str, guards: Callable[[Sequence[Any]], list[bool]] | None):
        self.last: MetGraph | None = None
        options = None if guards is None else {"guard_filter_fn": guards}
        function = own_code(layer_call, f"{name}_traced")
        self._call = torch.compile(function, backend=WeakBackend(self._graph), options=options)

    def graph_of(self, layer: nn.Module, args: tuple, kwargs: dict) -> MetGraph | None:
        """The graph of a call in a training step; None where Dynamo makes none, or several."""
        self.last = None
        try:
            call_whole(self._call, layer, *args, **kwargs)
        except _Traced:
            return self.last
        except Exception:  # a call that comes as it is raises it again, where it belongs
            return None
        return None

    def _graph(self, gm: GraphModule, inputs: list) -> Callable:
        broken = getattr(getattr(gm, "compile_subgraph_reason", None), "graph_break", False)
        graph = None if broken else MetGraph.of(gm)

        def run(*args: Any) -> Any:
            self.last = graph
            raise _Traced

        return run
