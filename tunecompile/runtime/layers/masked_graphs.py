"""What a region's graphs for batches with masks compute, so that others run by them, under masks that leave nothing
out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from torch.fx import GraphModule

from tunecompile.compiler.attention_calls.neutral_masks import (
    Flow,
    MaskShape,
    NeutralMask,
    flows_of,
    is_dynamic,
    masks_instead,
)
from tunecompile.runtime.layers.met_graph import MetGraph

log = logging.getLogger(__name__)
T = TypeVar("T")


class MasksWanted(BaseException):
    """A layer's call computes what a known graph does under masks. Nothing of it has run.

    It is no `Exception`: Dynamo would take it for a failure of the compiled code.

    Args:
        flow: what it computes.
        masks: and the shapes they have in this call.
    """

    def __init__(self, flow: Flow, masks: tuple[tuple[NeutralMask, tuple[int, ...]], ...]):
        super().__init__(f"masks of {[shape for _, shape in masks]}")
        self.flow, self.masks = flow, masks

    def compare(self, graph: MetGraph | None) -> None:
        """Raise `OtherGraph` where the graph that is about to run under the masks computes something else: a layer may
        have been changed since.
        """
        arguments = {mask.argument: mask.causal for mask, _ in self.masks}
        flows = () if graph is None else graph.flows
        alike = (flow for flow in flows if {mask.argument: mask.causal for mask in flow.masks} == arguments)
        if not any(flow.computes_as(self.flow) for flow in alike):
            raise OtherGraph


class OtherGraph(BaseException):
    """A layer under masks would not run by the graph that was compared."""


@dataclass
class MaskedGraphs:
    """Of one region."""

    flows: list[Flow] = field(default_factory=list)
    closed: bool = False  #: whether calls without masks have graphs of their own, or get them from now on

    @property
    def known(self) -> bool:
        """Whether calls without masks may run by any."""
        return bool(self.flows) and not self.closed

    def learn(self, gm: GraphModule, trains: bool) -> tuple[Flow, ...]:
        """Read a graph, as Dynamo made it, that is going to be compiled.

        trains: whether it is of training steps. A reference's graph is of all sizes from the first one on.
        """
        flows = () if self.closed else _understood(flows_of, gm) or ()
        self.flows += flows
        self.closed |= trains and not flows and is_dynamic(gm)
        return flows

    def instead_of(self, gm: GraphModule) -> Callable[..., NoReturn] | None:
        """What runs in place of a graph: it wants masks. None where no known graph computes the same.

        Dynamo looks at the guards of the graph that is not compiled in each of its calls, and traces anew where a layer
        differs: none is given masks that was not compared.
        """
        found = None if self.closed else _understood(masks_instead, gm, self.flows)
        return None if found is None else _Wants(*found)


def _understood(read: Callable[..., T], *given: Any) -> T | None:
    try:
        return read(*given)
    except Exception as error:  # of a graph that is written in another way
        log.info("tunecompile: masks of a graph are not understood: %s", error)
        return None


@dataclass(frozen=True)
class _Wants:
    flow: Flow
    shapes: tuple[MaskShape, ...]

    def __call__(self, *inputs: Any) -> NoReturn:
        raise MasksWanted(self.flow, tuple((each.mask, each.of(inputs)) for each in self.shapes))
