"""What is compiled: the repeated layers of a model, each in place, with one compiled variant serving all of them.

A region is compiled through the module's own `_compiled_call_impl` slot (what `module.compile()` fills), so that the model object,
its class, parameters and state dict stay what they were, and hooks, PEFT, Trainer and DDP see the module they know.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tunecompile._torch.dynamo import graph_limit
from tunecompile.compiler.backend import Backend, Executor
from tunecompile.compiler.partitioner import Decide
from tunecompile.compiler.pass_manager import Context, MatchCount, Pass
from tunecompile.planner.solver import Plan
from tunecompile.runtime.cuda_graphs.replay import GraphReplays
from tunecompile.runtime.dynamic_shapes import DynamicShapes
from tunecompile.runtime.memory.weight_cache import WeightCache
from tunecompile.runtime.variant import Variant

SCORING = "without_gradient"  #: in place of a plan


@dataclass
class Region:
    """One compiled function for all layers of one structure; a few variants for each plan."""

    name: str
    passes: Sequence[Pass]
    executor: Executor
    replays: GraphReplays | None = None
    precision: str | None = None
    kept: WeightCache | None = None
    backends: dict[Plan | str | None, Backend] = field(default_factory=dict)
    variants: dict[tuple, Variant] = field(default_factory=dict)
    sizes: DynamicShapes = field(default_factory=DynamicShapes)
    bypassed: bool = False
    refused: Counter[str] = field(default_factory=Counter)  #: why layers have to run as they are -> calls

    def variant(self, plan: Plan | None, kind: tuple, decide: Decide | None = None) -> Variant:
        """The variant for this plan and this kind of call. Where there is no plan yet, `decide` makes it from the graph."""
        found = self._variant(
            plan,
            kind,
            self.name + _suffix(plan),
            lambda name: Backend(
                name, self.passes, self.executor, plan, self.replays, self.precision, decide, self.kept
            ),
        )
        if found.backend.plan is None:  # what stands there may be of another device's layers, none of which is trained
            found.backend.decide = decide
        return found

    def scoring(self, kind: tuple) -> Variant:
        """The variant of a forward without gradients: it saves nothing, so no plan, and no recording, is about it."""
        return self._variant(
            SCORING,
            kind,
            f"{self.name}_{SCORING}",
            lambda name: Backend(name, self.passes, self.executor, precision=self.precision),
        )

    def _variant(self, way: Plan | str | None, kind: tuple, name: str, make: Callable[[str], Backend]) -> Variant:
        key = (way, *kind)
        if key not in self.variants:
            if way not in self.backends:
                self.backends[way] = make(name)
            self.variants[key] = Variant(name, self.backends[way])
        return self.variants[key]

    def settle(self, kind: tuple) -> None:
        """What was compiled before there was a plan goes under the plan that was made of it."""
        backend = self.variants[(None, *kind)].backend
        if backend.plan is None:  # nothing in that layer is trained: no graph of it has shown a backward
            return
        variant = self.variants.pop((None, *kind))
        if self.backends.get(None) is backend:  # another kind of call may have settled it
            del self.backends[None]
        self.backends.setdefault(backend.plan, backend)
        self.variants.setdefault((backend.plan, *kind), variant)

    def notes(self) -> list[str]:
        """What did not run as compiled, or not in one piece."""
        said = [failure for backend in self.backends.values() for failure in backend.failures]
        said += [
            f"{self.name} is compiled in pieces: {reason}"
            for variant in self.variants.values()
            for reason in variant.breaks
        ]
        for variant in self.variants.values():
            if (
                not variant.graphs and not variant.eager
            ):  # its own function ran under Dynamo, but nothing in it could be traced
                why = (
                    f"Dynamo's limit of {graph_limit()} graphs is reached by {variant.full}, which other layers share"
                    if variant.full
                    else "it is kept from Dynamo (torch.compiler.disable?), or holds nothing to compile"
                )
                said.append(f"{self.name} ran eagerly: {why}")
            if variant.eager:
                why = (
                    f"Dynamo could not trace it{variant.refused and f' ({variant.refused})'}"
                    if variant.graphs < graph_limit()
                    else f"Dynamo's limit of {graph_limit()} graphs is reached (layers, adapters or arguments differ too much)"
                )
                said.append(f"{self.name} ran eagerly {variant.eager} times: {why}")
        said += [f"{self.name} ran eagerly {calls} times: {why}" for why, calls in self.refused.items()]
        if self.bypassed:
            said.append(
                f"{self.name} ran eagerly: its layers were called without the module that owns them, which begins a training step"
            )
        return said


def _suffix(plan: Plan | None) -> str:
    """What tells a plan's variants from those that keep all."""
    if plan is None:
        return ""
    again = (
        "_checkpointed"
        if plan.recompute is None
        else f"_recomputes_{'_'.join(map(str, sorted(plan.recompute)))}"
        if plan.recompute
        else ""
    )
    return (
        again
        + (f"_in_{plan.tiles}" if plan.tiles > 1 else "")
        + ("_keeps_weights" if plan.weights else "")
        + ("_attention" if plan.attention else "")
    )


def contexts_of(region: Region) -> list[Context]:
    """What was recorded of the graphs that save anything for a backward, or of all where none does; the last compiled comes last."""
    contexts = [c for backend in region.backends.values() for c in backend.contexts]
    return [c for c in contexts if c.saved] or contexts


def pieces_of(region: Region) -> list[Context]:
    """What was recorded of the layer that was compiled last: one graph, or one for each piece of it, under one plan and for one kind of call."""
    variants = [variant.contexts for variant in region.variants.values() if variant.contexts]
    last = next((made for made in reversed(variants) if any(c.saved for c in made)), variants[-1] if variants else [])
    if len({c.frame for c in last}) < 2:
        return ([c for c in last if c.saved] or last)[-1:]
    return list({c.frame: c for c in last}.values())


def merge_tallies(regions: Sequence[MatchCount], heads: Sequence[MatchCount]) -> list[MatchCount]:
    """One for each family. What heads joined has no place in a graph."""
    merged: dict[str, MatchCount] = {}
    for tally in (*regions, *heads):
        total = merged.setdefault(tally.family, MatchCount(tally.family))
        total.found += tally.found
        total.rewritten += tally.rewritten
        total.refused += tally.refused
    for tally in regions:
        merged[tally.family].places += tally.places
    return list(merged.values())
