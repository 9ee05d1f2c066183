"""One compilation whose code may come later: its graphs run op by op, and go to another process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, GraphModule

from tunecompile._torch.background.cached_only import NotCached, cached_only, can_look
from tunecompile._torch.background.graphs import FinalGraph, can_send, pack
from tunecompile._torch.background.op_by_op import draws_numbers, run_op_by_op, why_not_op_by_op
from tunecompile._torch.fake_tensors import copied
from tunecompile._torch.saved_strides import with_strides

__all__ = ["Deferral", "NotDeferred", "can_defer"]


def can_defer() -> bool:
    """Whether this version of torch has what this needs."""
    return can_look() and can_send()


class NotDeferred(Exception):
    """These graphs have to be compiled where they are."""


class Deferral:
    """Of one compilation: whether there is code for its graphs, and else what another process needs to make it.

    Args:
        tried: keys of code that was ordered before. Where it is still missing, it is generated here.
        draws: whether graphs that draw random numbers may wait, too: code draws others.
    """

    def __init__(self, tried: Collection[str], draws: bool) -> None:
        self.tried, self.draws = tried, draws
        #: final graphs -> modules of their ops, and what the other process needs besides
        self.others: Callable[[Sequence[Graph]], tuple[Sequence[str], tuple]] = lambda graphs: ((), ())
        #: a call's target -> what runs in its place, if anything
        self.instead: Callable[[Any], Callable | None] = lambda target: None
        self.key = ""  #: of the forward's code, where it is missing
        self.packed = b""  #: for the other process
        self.missed = False  #: whether code that was ordered before was not found, and generated here
        self._graphs: list[FinalGraph] = []

    def begin(self, gm: GraphModule, inputs: list) -> GivenGraph:
        """One graph's turn, as it comes. The forward is first."""
        return GivenGraph(self, copied(gm), list(inputs))

    def add(self, graph: FinalGraph, complete: bool) -> None:
        """One more graph runs op by op.

        Raises:
            NotDeferred: the graphs cannot be sent, or would not run right op by op.
        """
        if why := why_not_op_by_op(graph.gm):
            raise NotDeferred(why)
        if not self.draws and draws_numbers(graph.gm):
            raise NotDeferred("it draws random numbers, and a checkpoint may repeat it with its code")
        self._graphs.append(graph)
        if complete:
            self._pack()

    def _pack(self) -> None:
        try:
            modules, others = self.others([graph.gm.graph for graph in self._graphs])
            self.packed = pack(self._graphs, modules, *others)
        except Exception as error:
            raise NotDeferred(f"{type(error).__name__}: {str(error)[:200]}") from error
        self._graphs = []


@dataclass
class GivenGraph:
    """A graph as it comes, before anything is changed for its code."""

    deferral: Deferral
    gm: GraphModule
    inputs: list

    def code(self, final: FinalGraph, generate: Callable[[], Any], complete: bool) -> Any:
        """What runs: Inductor's code if it is there, else this graph op by op.

        Args:
            final: as Inductor gets it.
            generate: runs Inductor.
            complete: whether no other graph follows, not even a backward.

        Raises:
            NotDeferred: see `Deferral.add`.
        """
        deferral, backward = self.deferral, bool(final.kwargs.get("is_backward"))
        if not backward or not deferral.key:
            try:
                with cached_only(None if backward else deferral.tried) as generated:
                    return generate()
            except NotCached as missing:
                deferral.key = missing.key
            finally:
                deferral.missed |= bool(generated and deferral.tried)
        deferral.add(final, complete or backward)
        run = with_strides(run_op_by_op(self.gm, deferral.instead), self.inputs)
        run._boxed_call = True  # type: ignore[attr-defined]
        return run
