"""Regions: the repeated layers of a model, each compiled in place, with one compiled variant for all of them.

A region is compiled through the module's own `_compiled_call_impl` slot, which `module.compile()` fills too. So the
model object, its class, parameters and state dict stay as they are, and hooks, PEFT, Trainer and DDP see the module
they know.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from tunecompile.compiler.backend import Backend, CompiledAs, Executor
from tunecompile.compiler.partitioner import JointGraph
from tunecompile.compiler.pass_manager import Context, MatchCount, Pass
from tunecompile.integrations.kernel_functions import TokenLoops
from tunecompile.integrations.packed_experts.stacks import guards_of_all
from tunecompile.notes import Note
from tunecompile.planner.solver import KEEP, Plan
from tunecompile.runtime.compile_limits import CompileEffort
from tunecompile.runtime.cuda_graphs.replay import GraphReplays
from tunecompile.runtime.layers.dynamic_shapes import DynamicShapes
from tunecompile.runtime.layers.unused_results import UnreadKeys
from tunecompile.runtime.layers.variant import Variant
from tunecompile.runtime.memory.weight_cache import WeightCache
from tunecompile.runtime.watch.module_watch import ClassWatch

T = TypeVar("T")
SCORING, REFERENCE, EVALUATION = "without_gradient", "without_adapters", "evaluation"  #: in place of a plan


class CallKind(NamedTuple):
    """What tells calls of a layer apart: there is a variant for each. (A tuple, since one is made for each call.)"""

    setting: tuple  #: what Dynamo has no guard for: whether there are gradients, hooks that it traced, and the like
    tensors: tuple  #: what it guards in each function: dtypes, say
    flat: bool = False  #: whether it is a call on a row of documents
    unread: bool = False  #: whether its caller says that it does not read attention weights


@dataclass
class Region:
    """One compiled function for all layers of one structure; a few variants for each plan."""

    name: str
    passes: Sequence[Pass]
    executor: Executor
    replays: GraphReplays | None = None
    precision: str | None = None
    kept: WeightCache | None = None
    backends: dict[Plan | str, Backend] = field(default_factory=dict)
    variants: dict[tuple[Plan | str, CallKind], Variant] = field(default_factory=dict)
    sizes: DynamicShapes = field(default_factory=DynamicShapes)
    evaluated: DynamicShapes = field(default_factory=DynamicShapes)  #: sizes of evaluations, which say nothing of steps
    loops: TokenLoops = field(default_factory=TokenLoops)
    classes: ClassWatch = field(default_factory=ClassWatch)  #: of the modules in its layers
    bypassed: bool = False
    keys: UnreadKeys | None = None  #: where its layers keep keys
    again: bool = False  #: whether a layer was called twice in one forward of its owner
    in_tower: bool | None = None  #: whether layers of its owner may be told where images begin; None: not known yet
    weights_read: bool = False  #: whether a caller read attention weights that it did not request
    packed: bool = False  #: whether modules inside have 4-bit stacks, and so a class of their own in each layer
    refused: Counter[Note] = field(default_factory=Counter)  #: why layers have to run as they are -> calls
    effort: CompileEffort = field(init=False)
    #: objects in place of the region, and of settings of its calls, where Dynamo keeps them for good
    itself: object = field(default_factory=object)
    settings: defaultdict[tuple, object] = field(default_factory=lambda: defaultdict(object))

    def __post_init__(self) -> None:
        self.effort = CompileEffort(self.name)

    @property
    def guards(self) -> Callable[[Sequence[Any]], list[bool]] | None:
        """Which of Dynamo's guards count in its variants; None for all."""
        return guards_of_all if self.packed else None

    def variant(self, plan: Plan, kind: CallKind) -> Variant:
        """The variant for a plan and a kind of call."""
        return self._variant(plan, kind, self.name + _suffix(plan), lambda name: self._training(name, plan))

    def surveyed(
        self, unplanned: Plan, kind: CallKind, look: Callable[[JointGraph], Plan], run: Callable[[Variant], T]
    ) -> T:
        """`run`, with a variant that is compiled anew, and follows the plan that `look` makes of its joint graph.

        unplanned: what it follows where `look` sees none.
        """
        backend = self._training(self.name, unplanned)
        found = self._made(self.name, backend, kind, None)

        def plan(joint: JointGraph) -> Plan:
            backend.look = None  # it is surveyed once, however often it is compiled
            backend.plan = look(joint)
            backend.region = self.name + _suffix(backend.plan)
            found.compiled_as.plan = backend.plan
            return backend.plan

        backend.look = plan
        try:
            return run(found)
        finally:
            backend.look = None  # it knows the model, and Dynamo keeps backends for good
            self._take_in(found, backend, kind)

    def _take_in(self, found: Variant, backend: Backend, kind: CallKind) -> None:
        """Keep a variant that has its plan now."""
        known = self.backends.setdefault(backend.plan, backend)
        if known is not backend:
            known.contexts += backend.contexts
            known.failures += backend.failures
            found.backend = known
        found.compiled_as.plan = backend.plan
        self.variants[(backend.plan, kind)] = found

    def _training(self, name: str, plan: Plan) -> Backend:
        return self._backend(name, plan, replays=self.replays, kept=self.kept)

    def _alone(self, name: str, plan: Plan) -> Backend:
        """A backend of forwards: it records nothing, and takes no weights that belong to training steps."""
        return self._backend(name, plan, backward=False)

    def _backend(self, name: str, plan: Plan, **others: Any) -> Backend:
        return Backend(name, self.passes, self.executor, plan, precision=self.precision, **others)

    def scoring(self, kind: CallKind, scaled_by_0: bool = False, way: str = SCORING) -> Variant:
        """The variant of a forward without gradients: it saves nothing, so it has no plan and is not recorded.

        scaled_by_0: whether adapters are. Under one name, Dynamo would trace once more for a scale that has changed.
        way: `SCORING` or `EVALUATION`, whose modules are in eval mode.
        """
        way = f"{way}_{REFERENCE}" if scaled_by_0 else way
        return self._variant(way, kind, f"{self.name}_{way}", lambda name: self._alone(name, KEEP))

    def reference(self, plan: Plan, kind: CallKind) -> Variant:
        """The variant of a forward with adapters that are scaled by 0, compiled as that of a training step is."""
        way = REFERENCE + _suffix(plan)
        return self._variant(way, kind, f"{self.name}_{way}", lambda name: self._alone(name, plan))

    def _variant(self, way: Plan | str, kind: CallKind, name: str, make: Callable[[str], Backend]) -> Variant:
        key = (way, kind)
        known = self.variants.get(key)  # hashed once a call
        if known is None:
            if way not in self.backends:
                self.backends[way] = make(name)
            known = self.variants[key] = self._made(name, self.backends[way], kind, way)
        return known

    def _made(self, name: str, backend: Backend, kind: CallKind, way: Plan | str | None) -> Variant:
        """way: None where the plan is made later."""
        setting = self.settings[(kind.flat, kind.unread, *kind.setting)]
        compiled_as = CompiledAs(self.itself, setting, way)
        return Variant(name, backend, self.effort, compiled_as, kind.flat, self.guards, kind.unread, self.keys)

    def forget(self, variant: Variant | None) -> None:
        """No call runs it any more."""
        self.variants = {key: each for key, each in self.variants.items() if each is not variant}


def _suffix(plan: Plan) -> str:
    """Tells a plan's variants from those that keep all."""
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


def is_of_evaluation(way: Plan | str | None) -> bool:
    """Whether what is compiled in a way runs in evaluations."""
    return isinstance(way, str) and way.startswith(EVALUATION)


def _trains(way: Plan | str) -> bool:
    """Whether what is compiled in a way runs in training steps, which reports are about."""
    return not isinstance(way, str)


def contexts_of(region: Region) -> list[Context]:
    """Contexts of graphs that save anything for a backward, or of all where none does; the last compiled is last."""
    backends = sorted(region.backends.items(), key=lambda item: _trains(item[0]))
    contexts = [c for _, backend in backends for c in backend.contexts]
    return [c for c in contexts if c.saved] or contexts


def pieces_of(region: Region) -> list[Context]:
    """Contexts of the layer compiled last, under one plan and for one kind of call: one for each piece."""
    order = {id(context): place for place, context in enumerate(contexts_of(region))}

    def compiled(item: tuple[tuple[Plan | str, CallKind], Variant]) -> tuple[bool, int]:
        (way, _), variant = item
        return _trains(way), max((order.get(id(c), -1) for c in variant.contexts), default=-1)

    made = [variant for _, variant in sorted(region.variants.items(), key=compiled) if variant.contexts]
    last = next((each for each in reversed(made) if any(c.saved for c in each.contexts)), made[-1] if made else None)
    if last is None:
        return []
    alike = [*(each for each in made if each.compiled_as == last.compiled_as and each is not last), last]
    if not any(each.breaks or len({c.frame for c in each.contexts}) > 1 for each in alike):
        return ([c for c in last.contexts if c.saved] or last.contexts)[-1:]
    return list({c.frame: c for each in alike for c in each.contexts}.values())


def merge_tallies(regions: Sequence[MatchCount], heads: Sequence[MatchCount]) -> list[MatchCount]:
    """One count for each family. Rewrites of heads have no place in a graph."""
    merged: dict[str, MatchCount] = {}
    for tally in (*regions, *heads):
        total = merged.setdefault(tally.family, MatchCount(tally.family))
        total.found += tally.found
        total.rewritten += tally.rewritten
        total.refused += tally.refused
    for tally in regions:
        merged[tally.family].places += tally.places
    return list(merged.values())
