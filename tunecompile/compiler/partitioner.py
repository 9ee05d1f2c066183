"""The two hooks we give to the compiler: the plan passes with the partitioner, and the lowering passes.

A hook's `uuid` stands for everything its result depends on beside the graph. Inductor keys its caches by it, so that a changed
pass or another plan never meets code generated under an old one.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from collections.abc import Callable, Sequence
from operator import getitem
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from tunecompile._torch.inductor import CustomGraphPass, CustomPartitionerFn, min_cut_rematerialization_partition
from tunecompile.compiler.pass_manager import Context, Pass, live, run_stage
from tunecompile.compiler.weight_layout import give_matrices, movable, replaceable
from tunecompile.planner.candidates import Cut
from tunecompile.planner.recompute_attention import recompute_in_backward
from tunecompile.planner.solver import Plan

HASHED = (
    "_torch",
    "ir",
    "ops",
    "planner",
    "compiler",
    "passes",
    "templates",
)  #: packages whose source decides what code is generated


@functools.cache
def source_hash() -> str:
    """Of every file that generated code depends on, with its path: a file that moves, or two that swap their names, change it."""
    digest = hashlib.sha256()
    for package in HASHED:
        spec = importlib.util.find_spec(f"tunecompile.{package}")  # `passes` and `templates` may lie beside the package
        root = Path(next(iter(spec.submodule_search_locations)))
        for file in sorted(root.rglob("*.py")):
            digest.update(f"{package}/{file.relative_to(root).as_posix()}\0".encode() + file.read_bytes())
    return digest.hexdigest()


class _Hook:
    """Compared, and written into cache keys, as its uuid."""

    def __init__(self, passes: Sequence[Pass], context: Context):
        self.passes, self.context = tuple(passes), context

    def uuid(self) -> str | None:
        """None keeps the graph out of all caches."""
        if not self.context.cached:
            return None
        passes, context = (
            ",".join(p.name if p.package is None else f"{p.name} of {p.package.key}" for p in live(self.passes)),
            self.context,
        )
        return f"{source_hash()}:{passes}:{context.plan.key}:{context.precision}:{','.join(context.attention)}"

    def __reduce__(self) -> tuple:
        return str, (self.uuid(),)


Decide = Callable[
    [Graph, Cut, "float | None"], Plan
]  #: of the joint graph, what cuts it, and attention's floating point operations a millisecond


class Partitioner(_Hook, CustomPartitionerFn):
    """Runs the plan passes on the joint graph, then cuts it in two. With `decide`, the plan is made here, where the graph is known."""

    def __init__(self, passes: Sequence[Pass], context: Context, decide: Decide | None = None):
        super().__init__(passes, context)
        self.decide = decide

    def __call__(self, gm: GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        decide, self.decide = self.decide, None  # the compiled function may hold this for good, and it the model
        if decide is not None:
            self.context.plan = decide(
                gm.graph, functools.partial(self._try, gm, joint_inputs, kwargs, {}), self.context.attention_rate
            )
        if self.context.plan.weights:
            self.context.kept = tuple(replaceable(gm.graph))
        run_stage(self.passes, "plan", gm.graph, self.context)
        self.context.kept += self._movable(gm.graph)
        forward, backward = _cut(gm, joint_inputs, kwargs, self.context.plan)
        self.context.outputs = kwargs["num_fwd_outputs"]
        self.context.saved = _saved(forward, self.context.outputs)
        return forward, backward

    def _movable(self, graph: Graph) -> tuple[str, ...]:
        """As the plan has it: what computes in pieces reads weights by themselves."""
        return tuple(movable(graph)) if self.context.moves else ()

    def _try(
        self, gm: GraphModule, joint_inputs: Sequence[Any], kwargs: dict, traced: dict, plan: Plan
    ) -> tuple[GraphModule, GraphModule]:
        """Both graphs as a plan would have them lowered, made from a copy. Trials share what they traced."""
        trial, context = copied(gm), Context(self.context.region, plan, self.context.precision, traced=traced)
        run_stage(self.passes, "plan", trial.graph, context)
        moved, graphs = self._movable(trial.graph), _cut(trial, joint_inputs, kwargs, plan)
        for graph in graphs:
            give_matrices(graph, moved)
            run_stage(self.passes, "lower", graph.graph, context)
        return graphs


def _cut(gm: GraphModule, joint_inputs: Sequence[Any], kwargs: dict, plan: Plan) -> tuple[GraphModule, GraphModule]:
    """Forward and backward graph, with what the partitioner's tags cannot say."""
    forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
    _save_pinned(forward.graph, backward.graph, kwargs["num_fwd_outputs"])
    if plan.attention:
        recompute_in_backward(forward.graph, backward.graph, kwargs["num_fwd_outputs"])
    return forward, backward


def _save_pinned(forward: Graph, backward: Graph, outputs: int) -> None:
    """Small results of a call that the backward repeats are saved, though all of the call is what the partitioner takes or leaves.

    They come before what else is saved (tensors precede sizes in what a forward graph returns, and follow them in what a backward takes).
    """
    output = forward.output_node()
    returned, calls = list(output.args[0]), {node.name: node for node in forward.nodes if node.op == "call_function"}
    first = (
        next(
            (n for n in backward.nodes if n.op == "placeholder" and n.name == getattr(returned[outputs], "name", "")),
            None,
        )
        if len(returned) > outputs
        else None
    )
    pinned = [n for n in backward.nodes if n.meta.get("pinned") and n.op == "call_function" and n.args[0].name in calls]
    if first is None or not isinstance(first.meta.get("val"), torch.Tensor):
        return
    saved = []
    for member in pinned:
        call, index = calls[member.args[0].name], member.args[1]
        if (
            source := next((user for user in call.users if user.target is getitem and user.args[1] == index), None)
        ) is None:
            with forward.inserting_after(call):
                source = forward.call_function(getitem, (call, index))
            source.meta = dict(member.meta)
        if source in returned:
            continue
        with backward.inserting_before(first):
            given = backward.placeholder(source.name)
        given.meta = {
            key: value for key, value in member.meta.items() if key not in ("recompute", "ac_graph_id", "pinned")
        }
        member.replace_all_uses_with(given)
        backward.erase_node(member)
        saved.append(source)
    output.args = ((*returned[:outputs], *saved, *returned[outputs:]),)
    if (named := output.meta.get("desc")) is not None:
        output.meta["desc"] = [*named[:outputs], *[named[outputs]] * len(saved), *named[outputs:]]


def copied(gm: GraphModule) -> GraphModule:
    """Nodes and their metadata anew; fake values are shared. (`deepcopy` would give every copy a fake mode of its own.)"""
    graph = Graph()
    returned = graph.graph_copy(gm.graph, {})
    graph.output(returned)
    work = GraphModule(gm, graph)
    work.meta = dict(gm.meta)
    return work


def _saved(forward: GraphModule, outputs: int) -> list[tuple[str, int | torch.SymInt]]:
    """What the forward graph keeps for the backward beside its inputs: name and bytes, one entry a storage. (A saved view keeps all of
    its storage, as gate does that of gate|up.)"""
    returned = next(node for node in forward.graph.nodes if node.op == "output").args[0]
    inputs = [node.meta.get("val") for node in forward.graph.nodes if node.op == "placeholder"]
    kept, seen = [], {fake.untyped_storage()._cdata for fake in inputs if isinstance(fake, torch.Tensor)}
    for node in returned[outputs:]:
        fake = node.meta.get("val") if isinstance(node, torch.fx.Node) and node.op != "placeholder" else None
        if isinstance(fake, torch.Tensor) and (key := fake.untyped_storage()._cdata) not in seen:
            seen.add(key)
            kept.append((node.name, fake.untyped_storage().nbytes()))
    return kept


class Lowering(_Hook, CustomGraphPass):
    """Runs the lowering passes on one final graph, forward or backward."""

    def __call__(self, graph: Graph) -> None:
        run_stage(self.passes, "lower", graph, self.context)
