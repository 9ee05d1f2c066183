"""Passes and their contracts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch.fx import Graph, Node

from tunecompile.compiler.graph_dump import GraphDump
from tunecompile.compiler.graph_snapshot import GraphSnapshot
from tunecompile.compiler.plugin_sandbox import Package, guarded
from tunecompile.errors import InvalidPipeline
from tunecompile.ir.canonicalize import name_of
from tunecompile.ir.near_miss import near_misses
from tunecompile.ir.rewrite import Rewrite, apply
from tunecompile.planner.solver import KEEP, Plan

__all__ = ["STAGES", "Change", "Context", "MatchCount", "Pass", "Stage", "recognize", "run_stage", "validate"]

Stage = Literal["recognize", "plan", "lower"]  #: when a pass runs
STAGES: tuple[Stage, ...] = ("recognize", "plan", "lower")  #: in order


@dataclass
class MatchCount:
    """What became of one family in one graph."""

    family: str  #: the pass's name
    found: int = 0  #: anchors seen
    rewritten: int = 0  #: anchors that are gone
    refused: list[str] = field(default_factory=list)  #: why others were not
    places: list[str] = field(default_factory=list)  #: "rewrite at file:line" of each that held


@dataclass(frozen=True)
class Change:
    """What one pass did to the operations of one graph."""

    stage: Stage  #: of the pass
    graph: str  #: dynamo, joint, forward or backward
    name: str  #: of the pass
    operations: dict[str, int]  #: how many more there are of each, or fewer


@dataclass
class Context:
    """What a pass may read and what it reports into, for one graph of one region."""

    region: str  #: its name
    plan: Plan = KEEP  #: what the layer computes again
    precision: str | None = None  #: what the user allows beside the model's own
    attention: tuple[str, ...] = ()  #: the order in which torch tries its kernels for it
    tallies: list[MatchCount] = field(default_factory=list)  #: a recognize pass appends one
    notes: list[str] = field(default_factory=list)  #: for the report, a line each
    providers: Counter[str] = field(default_factory=Counter)  #: calls by "op: provider"
    reasons: dict[str, dict[str, None]] = field(default_factory=dict)  #: why each of them was taken
    reduced: int = 0  #: ops that run in that precision
    saved: list[Any] = field(
        default_factory=list
    )  #: (name, bytes) of each tensor that the forward graph keeps for the backward
    moves: bool = False  #: whether dense weights may move into matrices with their adapters (tunecompile/runtime/memory/weight_cache.py)
    kept: tuple[str, ...] = ()  #: inputs in whose place there are such matrices, for 4-bit weights if the plan says so
    traced: dict[Any, Any] | None = (
        None  #: providers' graphs, shared by the trials of a planner. (Code generation wants fake values of its own for each.)
    )
    outputs: int = 0  #: of the forward graph, what it saves for the backward not counted
    changes: list[Change] = field(default_factory=list)  #: what each pass did
    dump: GraphDump | None = None  #: where each graph is shown
    before: GraphSnapshot | None = None  #: the graph as it came, each operation in its one spelling
    after: GraphSnapshot | None = None  #: with what was recognised
    attention_ms: dict[str, float] = field(default_factory=dict)  #: of each kernel that was timed for it
    attention_rate: float | None = (
        None  #: floating point operations a millisecond of the fastest, forward and backward, as if nothing were masked
    )
    frame: int | None = (
        None  #: number, by Dynamo's count, of the function that this is a graph of: a layer that is not traced in one piece has several
    )
    ran: set[str] = field(
        default_factory=set
    )  #: stages that saw a graph: the others were left out, since code came from a cache

    @property
    def cached(self) -> bool:
        """Whether code may come from a cache, for which no pass runs: not where all graphs are wanted."""
        return self.dump is None or self.dump.folder is None

    def look(
        self, stage: Stage, graph: Graph, name: str | None = None, before: Counter[Any] | None = None
    ) -> Counter[Any]:
        """Record what the pass `name` of this `stage` made of the operations it found in `graph`, `before`; without them, what a graph is before
        its first pass. Returns the operations that are there now."""
        now = Counter(node.target for node in graph.nodes if node.op.startswith("call"))
        known = now if before is None else before
        self.ran.add(stage)
        difference: Counter[str] = Counter()
        for target in (now - known) | (known - now):
            difference[name_of(target)] += now[target] - known[target]
        operations = {operation: count for operation, count in difference.items() if count}
        if operations:
            self.changes.append(Change(stage, _which(stage, graph), name, operations))
        if self.dump is not None:
            self.dump.show(stage, _which(stage, graph), name, graph, operations)
        return now


def _which(stage: Stage, graph: Graph) -> str:
    if stage != "lower":
        return {"recognize": "dynamo", "plan": "joint"}[stage]
    return (
        "backward"
        if any(node.op == "placeholder" and node.name.startswith("tangents") for node in graph.nodes)
        else "forward"
    )


@dataclass(frozen=True)
class Pass:
    """One step of the compiler. `recognize` makes one of rewrites; `tunecompile.passes` says what each stage sees, and how to write one."""

    name: str  #: of its own among all passes
    stage: Stage  #: recognize: torch subgraphs to ops; plan: tags and pieces; lower: ops to providers
    run: Callable[[Graph, Context], Any]  #: changes the graph in place
    requires: frozenset[str] = frozenset()  #: names that earlier passes have, or provide
    provides: frozenset[str] = frozenset()  #: names beside its own
    conflicts: frozenset[str] = frozenset()  #: names of passes that cannot stand beside it
    rewrites: tuple[Rewrite, ...] = ()  #: what it tries, if that is all it does
    anchors: Callable[[Graph], list[Node]] | None = None  #: of these rewrites
    package: Package | None = None  #: whose it is, if it does not come with tunecompile


def recognize(
    family: str,
    rewrites: Sequence[Rewrite],
    anchors: Callable[[Graph], list[Node]],
    requires: frozenset[str] = frozenset(),
) -> Pass:
    """A pass that tries rewrites.

    Args:
        family: the pass's name, and what it provides.
        rewrites: in the order in which they are tried, widest first: a narrow one would eat a wide one's anchor.
        anchors: lists the nodes of a graph which only this family's subgraphs hold. Those that are left over are reported, each with what was
            expected and found, and the user's own source line.
        requires: names that earlier passes have, or provide.

    Returns:
        A pass of the recognize stage.
    """

    def run(graph: Graph, context: Context) -> None:
        tally = MatchCount(family, found=len(anchors(graph)))
        for rewrite in rewrites:
            places, refused = apply(rewrite, graph)
            tally.places += places
            tally.refused += refused
        left = anchors(graph)
        tally.rewritten = tally.found - len(left)
        if left:
            missed = near_misses([rewrite.pattern for rewrite in rewrites], left)
            tally.refused += missed.values()
            for node in left:
                node.meta["missed"] = missed.get(node, f"no {family}, as a guard said")
        context.tallies.append(tally)

    return Pass(family, "recognize", run, requires, frozenset({family}), rewrites=tuple(rewrites), anchors=anchors)


def validate(passes: Sequence[Pass]) -> tuple[Pass, ...]:
    """Check order and contracts once, when a model is optimized, and not in the middle of a training step.

    Args:
        passes: a whole pipeline, in order.

    Returns:
        The same.

    Raises:
        InvalidPipeline: a name stands twice, stages are out of order, or `requires` or `conflicts` do not hold.
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
    """Without those of packages that are switched off, and without what requires them."""
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
    """Run the passes of one stage on one graph. One of a package that raises, or leaves a graph that is not valid, is switched off, and the graph
    put back; it reports into a context of its own, which counts if it succeeds.

    Args:
        passes: a pipeline; those of other stages do not run.
        stage: which do.
        graph: changed in place.
        context: what they report into.
    """
    before = context.look(stage, graph)
    for p in passes:
        if p.stage != stage or p not in live(passes):
            continue
        if p.package is None:
            p.run(graph, context)
        else:
            own = replace(context, tallies=[], notes=[])
            if not guarded(
                p.package, p.name, lambda: p.run(graph, own), graph, "example_value" if stage == "recognize" else "val"
            ):
                continue
            context.tallies += own.tallies
            context.notes += own.notes
        before = context.look(stage, graph, p.name, before)
