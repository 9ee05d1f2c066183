"""A survey of one layer: its joint graph is traced once, plans are tried on copies of it, and no code is generated."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NoReturn

import torch.nn.functional as F
from torch.fx import GraphModule

from tunecompile._torch.dynamo import TensorifyScalarRestartAnalysis, specialize_floats
from tunecompile._torch.fake_tensors import copied
from tunecompile._torch.inductor import compile_eager, compile_inductor
from tunecompile._torch.triton_analysis import analyses_answered_by
from tunecompile.compiler.backend import Executor, choosing_attention, without_packages
from tunecompile.compiler.kernel_access_cache import ACCESSES
from tunecompile.compiler.partitioner import JointGraph, Look, Lowering, Partitioner
from tunecompile.compiler.pass_manager import Context, Pass, run_stage
from tunecompile.compiler.weight_layout import matrix_bytes
from tunecompile.errors import summary
from tunecompile.ir.canonicalize import canonicalize
from tunecompile.notes import Note, note
from tunecompile.planner import candidates
from tunecompile.planner.cost_model import document_attention
from tunecompile.planner.solver import Plan
from tunecompile.planner.step_plan import RegionCandidates

log = logging.getLogger("tunecompile")


class Surveyed(Exception):
    """Ends a trace once the joint graph has been seen, or is known not to come. Inductor may wrap it."""


@dataclass
class Surveys:
    """The graphs that were seen."""

    candidates: dict[int, RegionCandidates] = field(default_factory=dict)  #: by region; devices share them
    reopened: set[int] = field(default_factory=set)  #: regions of which more plans have to be surveyed
    #: by region, kind of call, and what is trained: whether a call showed a joint graph
    called: dict[tuple, bool] = field(default_factory=dict)

    def needs(self, region: int) -> bool:
        """Whether a region's plan has to wait for a survey."""
        return region in self.reopened or region not in self.candidates

    def reopen(self, regions: set[int]) -> None:
        """Survey these once more."""
        self.reopened |= regions
        self.called = {key: seen for key, seen in self.called.items() if key[0] not in regions or not seen}


@dataclass(frozen=True)
class SurveyResult:
    """The candidates, and the failure that ended the survey early, if one did."""

    found: RegionCandidates | None
    error: Exception | None = None


def survey(
    joint: JointGraph,
    tokens: int,
    stages: Iterable[Sequence[Plan]],
    enough: Callable[[RegionCandidates], bool],
    keeps_weights: bool = False,
) -> SurveyResult:
    """Try plans on a joint graph, stage by stage.

    Args:
        joint: the graph, which stays as it is.
        tokens: of the batch that it was traced with.
        stages: plans to try, the cheapest to survey first.
        enough: called after each stage with what was found so far; the survey ends where it returns True.
        keeps_weights: whether frozen weights may stay in the layout that products read, so that their bytes count.

    Returns:
        The candidates; `whole` where no stage is left. A failure ends the survey and keeps what was found before it.
    """
    found, rows = None, []
    try:
        weights = matrix_bytes(joint.graph) if keeps_weights else 0
        names = tuple(map(candidates.describe, candidates.expensive_nodes(joint.graph)))
        longest, window = document_attention(joint.graph)
        first = RegionCandidates((), tokens, names, weights, False, joint.attention, joint.passed, longest, window)
        for plans in stages:
            rows += candidates.survey(joint.cut, plans)
            found = replace(first, rows=tuple(rows))
            if enough(found):
                return SurveyResult(found)
        return SurveyResult(found and replace(found, whole=True))
    except Exception as error:
        return SurveyResult(found, error)


class SurveyBackend:
    """A backend for `torch.compile` that shows a layer's joint graph to `look` and generates no code.

    Args:
        region: its name.
        passes: the whole pipeline.
        executor: whose pipeline up to the joint graph is run; Inductor changes that graph before it is cut.
        precision: as in `Context`.
        look: sees the first joint graph. None where only `finish` matters.
        finish: what Dynamo gets for a graph in the place of code.
    """

    def __init__(
        self,
        region: str,
        passes: Sequence[Pass],
        executor: Executor,
        precision: str | None,
        look: Look | None,
        finish: Callable[[GraphModule], Callable],
    ):
        self.region, self.passes, self.executor = region, tuple(passes), executor
        self.precision, self.look, self.finish = precision, look, finish
        self.ended = False  #: whether the trace that runs came to its end
        self.attends = False  #: whether the layer calls `scaled_dot_product_attention`
        self.seen = False  #: whether there was a joint graph
        self.contexts: list[Context] = []
        self.failures: list[Note] = []

    def __call__(self, gm: GraphModule, inputs: list, floats_change: bool = False) -> Callable:
        specialize_floats(gm)  # may restart Dynamo's analysis, which comes back here
        self.attends = self.attends or any(node.target is F.scaled_dot_product_attention for node in gm.graph.nodes)
        attempt = partial(self._attempt, gm, inputs)
        try:
            attempt()
        except TensorifyScalarRestartAnalysis:
            raise
        except Exception as error:
            if without_packages(self.region, self.passes, error, attempt) is None:
                log.debug("surveying %s failed", self.region, exc_info=True)
                self.failures.append(note("compiled-without-rewrites", self.region, summary(error)))
        return self.finish(gm)

    def _attempt(self, gm: GraphModule, inputs: list) -> bool:
        """Trace the joint graph. A graph without a backward has none."""
        self.ended = False
        try:
            self._trace(gm, inputs)
        except Exception:
            if not self.ended:
                raise
        return True

    def _trace(self, gm: GraphModule, inputs: list) -> None:
        context = Context(self.region, precision=self.precision)
        work = recognized(gm, self.passes, context)
        compiler = compile_inductor if self.executor == "inductor" else compile_eager
        lower, partition = Lowering(self.passes, context), Partitioner(self.passes, context, self._see)
        with choosing_attention(gm, inputs, context), analyses_answered_by(ACCESSES.answer):
            compiler(work, inputs, lower, partition, keep=self._stop, cached=False)

    def _see(self, joint: JointGraph) -> None:
        look, self.look, self.seen = self.look, None, True
        if look is not None:
            look(joint)
        self._end()

    def _stop(self, gm: GraphModule, inputs: list, kind: str) -> NoReturn:
        """In the place of code generation: a graph that comes here was not cut, since it has no backward."""
        self._end()

    def _end(self) -> NoReturn:
        self.ended = True
        raise Surveyed


def recognized(gm: GraphModule, passes: Sequence[Pass], context: Context) -> GraphModule:
    """A copy of Dynamo's graph, after the recognize passes."""
    work = copied(gm)
    canonicalize(work)
    run_stage(passes, "recognize", work.graph, context)
    work.graph.lint()
    work.recompile()
    return work
