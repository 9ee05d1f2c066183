"""Passes, their contracts, and how a stage of them runs on a graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from torch.fx import Graph, Node

from tunecompile.compiler.graph_dump import GraphDump
from tunecompile.compiler.graph_snapshot import GraphSnapshot
from tunecompile.compiler.plugin_sandbox import Package, guarded
from tunecompile.errors import InvalidPipeline
from tunecompile.ir.canonicalize import name_of
from tunecompile.ir.match import Match
from tunecompile.ir.near_miss import near_misses
from tunecompile.ir.rewrite import Rewrite, attempt, where_from
from tunecompile.planner.solver import KEEP, Plan

__all__ = ["STAGES", "Change", "Context", "MatchCount", "Pass", "Stage", "recognize", "run_stage", "validate"]

Stage = Literal["recognize", "plan", "lower"]  #: when a pass runs
STAGES: tuple[Stage, ...] = ("recognize", "plan", "lower")  #: in order


@dataclass
class MatchCount:
    """How often one family was found and rewritten in one graph."""

    family: str  #: the pass's name
    found: int = 0  #: anchors seen
    rewritten: int = 0  #: anchors that are gone
    refused: list[str] = field(default_factory=list)  #: why other anchors were not rewritten
    places: list[str] = field(default_factory=list)  #: "rewrite at file:line" of each rewrite made

    def rewrote(self, place: str | None = None, anchors: int = 1) -> None:
        """Count anchors that are gone, of one place."""
        self.found += anchors
        self.rewritten += anchors
        self.places += [] if place is None else [place]

    def refuse(self, reason: str, anchors: int = 1) -> None:
        """Count anchors that stay, and note why."""
        self.found += anchors
        self.refused.append(reason)

    def judge(self, reason: str | None, node: Node, rewrite: str = "") -> bool:
        """Count one anchor, refused for a reason or rewritten without one, at a node's place; whether it is gone.

        rewrite: its name; "": the family's.
        """
        if reason:
            self.refuse(f"{self.family}: {reason}{where_from(node)}")
        else:
            self.rewrote(f"{rewrite or self.family}{where_from(node)}")
        return not reason


@dataclass(frozen=True)
class Change:
    """What one pass did to the operations of one graph."""

    stage: Stage  #: of the pass
    graph: str  #: dynamo, joint, forward or backward
    name: str  #: of the pass
    operations: dict[str, int]  #: how many more or fewer there are of each


@dataclass
class Context:
    """The state of one compilation of one region: what passes read, and where they report."""

    region: str  #: name of the region
    plan: Plan = KEEP  #: what the layer recomputes
    precision: str | None = None  #: a lower precision that the user allows, such as "fp8"
    attention: tuple[str, ...] = ()  #: the order in which torch tries its attention kernels
    tallies: list[MatchCount] = field(default_factory=list)  #: of recognize passes
    notes: list[str] = field(default_factory=list)  #: for the report, a line each
    providers: Counter[str] = field(default_factory=Counter)  #: calls by "op: provider"
    reasons: dict[str, dict[str, None]] = field(default_factory=dict)  #: why each provider was chosen
    reduced: int = 0  #: ops that run in the lower precision
    #: (name, bytes) of each tensor that the forward graph saves for the backward
    saved: list[Any] = field(default_factory=list)
    weights_unread: bool = False  #: whether attention weights among the graph's results are not read
    #: inputs that matrices replace, of 4-bit weights with their adapters (tunecompile/runtime/memory/weight_cache.py)
    kept: tuple[str, ...] = ()
    #: providers' graphs, shared by the trials of a planner and by code generation
    traced: dict[Any, Any] = field(default_factory=dict)
    trial: bool = False  #: whether graphs are only looked at. (Code generation needs fake values of its own for each.)
    outputs: int = 0  #: results of the forward graph, without those saved for the backward
    changes: list[Change] = field(default_factory=list)  #: what each pass did
    dump: GraphDump | None = None  #: where each graph is written
    before: GraphSnapshot | None = None  #: the canonical graph before recognition
    after: GraphSnapshot | None = None  #: the graph after recognition
    #: milliseconds of each attention kernel that was timed
    attention_ms: dict[str, float] = field(default_factory=dict)
    #: floating point operations a millisecond of the fastest, forward and backward, as if nothing were masked
    attention_rate: float | None = None
    #: Dynamo's number of the function that this graph is of: a layer with graph breaks has several
    frame: int | None = None
    #: stages that saw a graph; the others were left out, since code came from a cache
    ran: set[str] = field(default_factory=set)

    @property
    def cached(self) -> bool:
        """Whether code may come from a cache, where no pass runs: not where all graphs are dumped."""
        return self.dump is None or self.dump.folder is None

    def tally(self, family: str) -> MatchCount:
        """A new count of a family in a graph."""
        self.tallies.append(MatchCount(family))
        return self.tallies[-1]

    def record(
        self, stage: Stage, graph: Graph, name: str | None = None, before: Counter[Any] | None = None
    ) -> Counter[Any]:
        """Record how a pass changed the operations of a graph.

        Args:
            stage: of the pass.
            graph: as the pass left it.
            name: of the pass; None before the first one.
            before: operations before the pass, by target; None before the first one.

        Returns:
            The operations that are there now, by target.
        """
        now = Counter(node.target for node in graph.nodes if node.op.startswith("call"))
        known = now if before is None else before
        self.ran.add(stage)
        difference: Counter[str] = Counter()
        for target in (now - known) | (known - now):
            difference[name_of(target)] += now[target] - known[target]
        operations = {operation: count for operation, count in difference.items() if count}
        if operations and name is not None:
            self.changes.append(Change(stage, _which(stage, graph), name, operations))
        if self.dump is not None:
            self.dump.show(stage, _which(stage, graph), name, graph, operations)
        return now


def _which(stage: Stage, graph: Graph) -> str:
    """dynamo, joint, forward or backward."""
    if stage != "lower":
        return {"recognize": "dynamo", "plan": "joint"}[stage]
    tangents = any(node.op == "placeholder" and node.name.startswith("tangents") for node in graph.nodes)
    return "backward" if tangents else "forward"


@dataclass(frozen=True)
class Pass:
    """One step of the compiler. `recognize` makes a pass of rewrites.

    `tunecompile.passes` says what each stage sees, and how to write a pass.
    """

    name: str  #: unique among all passes
    stage: Stage  #: recognize: torch subgraphs to ops; plan: tags and tiles; lower: ops to providers
    run: Callable[[Graph, Context], Any]  #: changes the graph in place
    requires: frozenset[str] = frozenset()  #: names that earlier passes have or provide
    provides: frozenset[str] = frozenset()  #: names beside its own
    conflicts: frozenset[str] = frozenset()  #: names of passes that cannot run beside it
    rewrites: tuple[Rewrite, ...] = ()  #: the rewrites it tries, if it does nothing else
    anchors: Callable[[Graph], list[Node]] | None = None  #: of these rewrites
    package: Package | None = None  #: the package that brings it; None: tunecompile


def recognize(
    family: str,
    rewrites: Sequence[Rewrite],
    anchors: Callable[[Graph], list[Node]],
    requires: frozenset[str] = frozenset(),
) -> Pass:
    """A pass that tries rewrites.

    Args:
        family: the pass's name.
        rewrites: in the order in which they are tried, widest first: a narrow one would take a wide one's anchor.
        anchors: lists the nodes of a graph that only this family's subgraphs have. Those left over are reported, each
            with the expected and the actual node, and the user's own source line.
        requires: names that earlier passes have or provide.

    Returns:
        A pass of the recognize stage.
    """

    def run(graph: Graph, context: Context) -> None:
        tally = context.tally(family)
        tally.found = len(anchors(graph))
        refused: list[tuple[str, Match]] = []
        for rewrite in rewrites:
            places, more = attempt(rewrite, graph)
            tally.places += places
            refused += more
        there = set(graph.nodes)  # what another rewrite has taken was not refused
        tally.refused += [reason for reason, match in refused if there.issuperset(match.nodes.values())]
        left = anchors(graph)
        tally.rewritten = tally.found - len(left)
        if left:
            missed = near_misses([rewrite.pattern for rewrite in rewrites], left)
            tally.refused += missed.values()
            for node in left:
                node.meta["missed"] = missed.get(node, f"no {family}, as a guard said")

    return Pass(family, "recognize", run, requires, rewrites=tuple(rewrites), anchors=anchors)


def validate(passes: Sequence[Pass]) -> tuple[Pass, ...]:
    """Check order and contracts once, when a model is optimized, and not in the middle of a training step.

    Args:
        passes: a whole pipeline, in order.

    Returns:
        The same.

    Raises:
        InvalidPipeline: a name is there twice, stages are out of order, or `requires` or `conflicts` do not hold.
    """
    names = [p.name for p in passes]
    if len(set(names)) != len(names):
        raise InvalidPipeline(reason=f"a pass stands twice in {names}")
    stages = [STAGES.index(p.stage) for p in passes]
    if stages != sorted(stages):
        raise InvalidPipeline(
            reason=f"stages must come in the order {', '.join(STAGES)}, got {[p.stage for p in passes]}"
        )
    provided: set[str] = set()
    for p in passes:
        if missing := p.requires - provided:
            raise InvalidPipeline(reason=f"{p.name} requires {sorted(missing)}, which no earlier pass provides")
        if clash := p.conflicts & set(names):
            raise InvalidPipeline(reason=f"{p.name} conflicts with {sorted(clash)}")
        provided |= p.provides | {p.name}
    return tuple(passes)


def live(passes: Sequence[Pass]) -> list[Pass]:
    """The passes that are not switched off, without those that require one that is."""
    made: list[Pass] = []
    provided: set[str] = set()
    lost: set[str] = set()
    for p in passes:
        if (p.package is not None and p.name in p.package.failed) or p.requires & (lost - provided):
            lost |= p.provides | {p.name}
        else:
            made.append(p)
            provided |= p.provides | {p.name}
    return made


def run_stage(passes: Sequence[Pass], stage: Stage, graph: Graph, context: Context) -> None:
    """Run the passes of one stage on one graph.

    A pass of a package that raises, or leaves an invalid graph, is switched off, and the graph is restored. It reports
    into a context of its own, which counts only if the pass succeeds.

    Args:
        passes: a pipeline; passes of other stages do not run.
        stage: whose passes run.
        graph: changed in place.
        context: for their reports.
    """
    before = context.record(stage, graph)
    for p in passes:
        if p.stage != stage or p not in live(passes):
            continue
        if p.package is None:
            p.run(graph, context)
        else:
            own = replace(context, tallies=[], notes=[])
            key = "example_value" if stage == "recognize" else "val"
            if not guarded(p.package, p.name, partial(p.run, graph, own), graph, key):
                continue
            context.tallies += own.tallies
            context.notes += own.notes
        before = context.record(stage, graph, p.name, before)
