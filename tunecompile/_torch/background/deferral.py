"""One compilation whose code may come later: its graphs run op by op, and go to another process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch.fx import Graph, GraphModule

from tunecompile._torch.background.cached_only import CAN_LOOK, NotCached, cached_only
from tunecompile._torch.background.graphs import CAN_SEND, FinalGraph, pack
from tunecompile._torch.background.op_by_op import run_op_by_op, unknown_random_op
from tunecompile._torch.saved_strides import with_strides

__all__ = ["CAN_DEFER", "Deferral", "NotDeferred"]

CAN_DEFER = CAN_LOOK and CAN_SEND  #: whether this version of torch has what is asked for here


class NotDeferred(Exception):
    """These graphs have to be compiled where they are."""


class Deferral:
    """Of one compilation: whether there is code for its graphs, and else what another process needs to make it.

    Args:
        tried: keys of code that was asked for before. Where it is still missing, it is generated here.
    """

    def __init__(self, tried: Collection[str]) -> None:
        self.tried = tried
        #: final graphs -> modules of their ops, and what the other process needs besides
        self.others: Callable[[Sequence[Graph]], tuple[Sequence[str], tuple]] = lambda graphs: ((), ())
        #: a call's target -> what runs in its place, if anything
        self.instead: Callable[[Any], Callable | None] = lambda target: None
        self.key = ""  #: of the forward's code, where it is missing
        self.packed = b""  #: for the other process
        self._given: tuple[GraphModule, list] | None = None
        self._graphs: list[FinalGraph] = []

    def begin(self, gm: GraphModule, inputs: list) -> None:
        """One graph's turn, as it comes. The forward is first."""
        if isinstance(gm, GraphModule):
            self._given = _copied(gm), list(inputs)

    def generate(self, graph: FinalGraph, compile_fx: Callable[[], Any], complete: bool) -> Any:
        """Inductor's code for this graph; None where it runs op by op.

        Args:
            graph: as Inductor gets it.
            compile_fx: runs Inductor.
            complete: whether no other graph follows.

        Raises:
            NotDeferred: the graphs cannot be sent, or would not run right op by op.
        """
        backward = bool(graph.kwargs.get("is_backward"))
        if backward and not self.key:
            return compile_fx()
        if not backward:
            try:
                with cached_only(self.tried):
                    return compile_fx()
            except NotCached as missing:
                self.key = missing.key
        if unknown := unknown_random_op(graph.gm):
            raise NotDeferred(f"{unknown} draws other numbers op by op")
        self._graphs.append(graph)
        if backward or complete:
            self._pack()
        return None

    def run_op_by_op(self) -> Callable[[list], Any]:
        """What runs in the place of the code that `generate` did not give."""
        assert self._given is not None
        gm, inputs = self._given
        self._given = None
        run = with_strides(run_op_by_op(gm, self.instead), inputs)
        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def _pack(self) -> None:
        try:
            modules, others = self.others([graph.gm.graph for graph in self._graphs])
            self.packed = pack(self._graphs, modules, *others)
        except Exception as error:
            raise NotDeferred(f"{type(error).__name__}: {str(error)[:200]}") from error
        self._graphs = []


def _copied(gm: GraphModule) -> GraphModule:
    """A copy of a graph with its own nodes, and the same values and constants."""
    graph = Graph()
    returned = graph.graph_copy(gm.graph, {})
    graph.output(returned)
    return GraphModule(gm, graph)
