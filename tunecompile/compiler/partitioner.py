"""The two hooks that the compiler gets: the plan passes with the partitioner, and the lowering passes.

A hook's `uuid` represents everything that its result depends on beside the graph. Inductor keys its caches by it, so
that a changed pass or another plan never meets code generated under an old one.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import getitem
from pathlib import Path
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node

from tunecompile._torch.card import emulated
from tunecompile._torch.fake_tensors import copied
from tunecompile._torch.inductor import CustomGraphPass, CustomPartitionerFn, min_cut_rematerialization_partition
from tunecompile.compiler.pass_manager import Context, Pass, live, run_stage
from tunecompile.compiler.weight_layout import replaceable
from tunecompile.planner.candidates import Cut
from tunecompile.planner.liveness import tensor_bytes
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
    """A hash of all files that generated code depends on, and of their paths: two files that swap names change it."""
    digest = hashlib.sha256()
    for package in HASHED:
        spec = importlib.util.find_spec(f"tunecompile.{package}")  # `passes` and `templates` may lie beside the package
        assert spec is not None and spec.submodule_search_locations, package
        root = Path(spec.submodule_search_locations[0])
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
        card = f":{emulated()}" if emulated() else ""
        return f"{source_hash()}:{passes}:{context.plan.key}:{context.precision}:{','.join(context.attention)}{card}"

    def __reduce__(self) -> tuple:
        return str, (self.uuid(),)


@dataclass(frozen=True)
class JointGraph:
    """Forward and backward of a layer in one graph, before any plan is applied. Valid only while it is traced."""

    graph: Graph
    cut: Cut  #: a plan -> the lowered forward and backward graph, made from a copy
    attention: float | None  #: floating point operations a millisecond of its attention, where that was timed
    passed: int = 0  #: bytes of what the layer gives the next one


#: reads a joint graph and leaves it as it is. Returns the plan to go on with; None for the one that was there
Look = Callable[[JointGraph], Plan | None]


class Partitioner(_Hook, CustomPartitionerFn):
    """Runs the plan passes on the joint graph, then cuts it in two. `look` sees the joint graph first."""

    def __init__(self, passes: Sequence[Pass], context: Context, look: Look | None = None):
        super().__init__(passes, context)
        self.look = look

    def __call__(self, gm: GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        look, self.look = self.look, None  # compiled code may hold this object for good, and `look` the model
        if look is not None:
            cut = functools.partial(self._try, gm, joint_inputs, kwargs)
            (returned,) = gm.graph.find_nodes(op="output")
            passed = sum(_bytes(node) for node in returned.args[0][: kwargs["num_fwd_outputs"]])
            joint = JointGraph(gm.graph, cut, self.context.attention_rate, passed)
            self.context.plan = look(joint) or self.context.plan
        if self.context.plan.weights:
            self.context.kept = tuple(replaceable(gm.graph))
        run_stage(self.passes, "plan", gm.graph, self.context)
        forward, backward = _cut(gm, joint_inputs, kwargs, self.context.plan)
        self.context.outputs = kwargs["num_fwd_outputs"]
        self.context.saved = _saved(forward, self.context.outputs)
        return forward, backward

    def _try(
        self, gm: GraphModule, joint_inputs: Sequence[Any], kwargs: dict, plan: Plan
    ) -> tuple[GraphModule, GraphModule]:
        """Both graphs as a plan would lower them, made from a copy. Trials share the providers' graphs."""
        known, precision = self.context.traced, self.context.precision
        trial, context = copied(gm), Context(self.context.region, plan, precision, traced=known, trial=True)
        run_stage(self.passes, "plan", trial.graph, context)
        graphs = _cut(trial, joint_inputs, kwargs, plan)
        for graph in graphs:
            run_stage(self.passes, "lower", graph.graph, context)
        return graphs


def _cut(gm: GraphModule, joint_inputs: Sequence[Any], kwargs: dict, plan: Plan) -> tuple[GraphModule, GraphModule]:
    """Forward and backward graph, with the parts of a plan that the partitioner's tags cannot express."""
    forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
    _save_pinned(forward.graph, backward.graph, kwargs["num_fwd_outputs"])
    if plan.attention:
        recompute_in_backward(forward.graph, backward.graph, kwargs["num_fwd_outputs"])
    return forward, backward


def _save_pinned(forward: Graph, backward: Graph, outputs: int) -> None:
    """Save small results of a call that the backward recomputes. The partitioner saves all results of a call, or none.

    They come before all other saved values: a forward graph returns tensors before sizes, and a backward takes them
    behind.
    """
    output = forward.output_node()
    returned, calls = (
        list(cast(Sequence[Any], output.args[0])),
        {node.name: node for node in forward.nodes if node.op == "call_function"},
    )
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


def _saved(forward: GraphModule, outputs: int) -> list[tuple[str, int | torch.SymInt]]:
    """Name and bytes of each storage that the forward graph saves for the backward, inputs excluded.

    A saved view keeps all of its storage, as gate does that of gate|up.
    """
    returned = next(node for node in forward.graph.nodes if node.op == "output").args[0]
    inputs = [node.meta.get("val") for node in forward.graph.nodes if node.op == "placeholder"]
    kept, seen = [], {fake.untyped_storage()._cdata for fake in inputs if isinstance(fake, torch.Tensor)}
    for node in returned[outputs:]:
        fake: Any = node.meta.get("val") if isinstance(node, torch.fx.Node) and node.op != "placeholder" else None
        if isinstance(fake, torch.Tensor) and (key := fake.untyped_storage()._cdata) not in seen:
            seen.add(key)
            kept.append((node.name, fake.untyped_storage().nbytes()))
    return kept


class Lowering(_Hook, CustomGraphPass):
    """Runs the lowering passes on one final graph, forward or backward."""

    def __call__(self, graph: Graph) -> None:
        run_stage(self.passes, "lower", graph, self.context)


def _bytes(value: Any) -> int:
    """Of a node's value; 0 for a constant."""
    return tensor_bytes(value.meta.get("val")) if isinstance(value, Node) else 0
