"""Each op becomes the graph of the first provider that supports its arguments, or of its reference.

Providers are traced to core ATen, so Inductor fuses what they are made of as if the model had been written that way.
"""

import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from tunecompile._torch.fake_tensors import fake_mode_of, note_computed, trace, tracing
from tunecompile.compiler.pass_manager import Context, Pass
from tunecompile.ir.eager_call import outputs
from tunecompile.ir.nodes import outputs_read
from tunecompile.ir.op import OPS, Op, returns_view
from tunecompile.ir.shape_rule_cache import ProcessCache, process_key, signature
from tunecompile.notes import note
from tunecompile.planner.cost_model import share_flops

__all__ = ["PASS"]


def run(graph: Graph, context: Context) -> None:
    for node in list(graph.nodes):
        op = OPS.get(node.target) if node.op == "call_function" else None
        if op is None:
            continue
        values = torch.fx.map_arg(list(node.args), lambda n: n.meta["val"])
        provider = op.choose(values, context.precision)
        if op.opaque and provider.run is op.reference:
            continue
        try:
            expand(graph, node, _bind(provider.run, op, node), context.traced, context.trial)
        except Exception as error:  # the reference computes the same, only slower
            if provider.run is op.reference:
                raise
            why = f"{type(error).__name__}: {str(error)[:200]}"
            context.notes.append(note("provider-failed", op.name, why, provider=provider.name))
            if not op.opaque:
                expand(graph, node, op.reference, context.traced, context.trial)


def _bind(run: Callable, op: Op, node: Node) -> Callable:
    """Fill in the parameters `used` and `dying` of a provider that declares them (`tunecompile.ir.op.Op.provider`)."""
    asked, told = inspect.signature(run).parameters, {}
    if "used" in asked:
        told["used"] = outputs_read(node)
    if "dying" in asked:
        told["dying"] = tuple(
            name for name, value in zip(op.parameters, node.args) if isinstance(value, Node) and _dies(value)
        )
    return functools.partial(run, **told) if told else run


def _dies(value: Node) -> bool:
    """Whether this is a matrix product, or a view of one, with a single user."""
    while len(value.users) == 1 and value.op == "call_function":
        if value.target is torch.ops.aten.mm.default:
            return True
        if not returns_view(value.target):
            return False
        value = value.all_input_nodes[0]
    return False


def expand(graph: Graph, node: Node, fn: Callable, known: dict[Any, GraphModule], trial: bool = False) -> None:
    """Replace a call by the traced graph of `fn` on the same arguments.

    Args:
        graph: the call's graph, changed in place.
        node: the call.
        fn: takes the call's arguments; is traced to core ATen.
        known: graphs that this compilation traced before, to look up and to extend.
        trial: whether calls of one graph may share its fake values: they are read alone.
    """
    flat, spec = pytree.tree_flatten(list(node.args))
    inputs = [i for i, item in enumerate(flat) if isinstance(item, Node)]

    def call(*nodes: Any) -> list:
        filled = list(flat)
        for i, item in zip(inputs, nodes):
            filled[i] = item
        return outputs(fn(*pytree.tree_unflatten(filled, spec)))

    values = _distinct([flat[i] for i in inputs])
    mode, (anywhere, here) = fake_mode_of(values), _keys(fn, flat, spec, inputs, values)
    traced = known.get(here) or (_graphs.get(anywhere) if anywhere is not None else None)
    fresh = traced is None
    if traced is None:
        traced = trace(call, tuple(values), mode)
    before = node.prev
    results = _inline(graph, node, traced, [flat[i] for i in inputs], mode, share=trial or fresh)
    share_flops(node, _between(before, node))
    if fresh and anywhere is not None and _has_meaning_elsewhere(traced.graph):
        for inner in traced.graph.nodes:
            inner.meta.pop("val", None)
        _graphs[anywhere] = traced
    elif fresh:
        known[here] = traced
    _replace(graph, node, results)


def _between(before: Node, behind: Node) -> list[Node]:
    """The nodes between two."""
    found = []
    while (before := before.next) is not behind:
        found.append(before)
    return found


def _replace(graph: Graph, node: Node, outputs: list[Node]) -> None:
    """Put results in the place of a call's."""
    for user in list(node.users):
        if user.target is operator.getitem:
            if user.users:
                user.replace_all_uses_with(outputs[user.args[1]])
            graph.erase_node(user)
    if node.users:
        node.replace_all_uses_with(outputs[0])
    graph.erase_node(node)


def _distinct(nodes: list[Node]) -> list:
    """The nodes' fake values, each a distinct object: tracing identifies tensors by identity.

    (Where one traced graph was used twice, results of both share one fake value.)
    """
    owners: dict[int, Node] = {}

    def own(node: Node) -> Any:
        value = node.meta["val"]
        return (
            value.detach()
            if isinstance(value, torch.Tensor) and owners.setdefault(id(value), node) is not node
            else value
        )

    return [own(node) for node in nodes]


#: traced graphs without fake values, by everything that they depend on
_graphs = ProcessCache(512)


def _keys(fn: Callable, flat: list, spec: Any, inputs: list[int], values: list) -> tuple[Any, Any]:
    """Everything that a traced graph depends on, as a key: in any fake mode, None where there is none; and in this."""
    run, told = (fn.func, tuple(fn.keywords.items())) if isinstance(fn, functools.partial) else (fn, ())
    constants = [item for i, item in enumerate(flat) if i not in inputs]
    like, mode = signature((values, constants)), fake_mode_of(values)
    if like is None or mode is None:
        return None, object()
    call, anywhere = (told, spec, tuple(inputs), repr(constants)), process_key(run, like)
    return anywhere and (anywhere, call), (run, like, call, id(mode))


def _has_meaning_elsewhere(graph: Graph) -> bool:
    """Whether other compilations may contain this graph: constants belong to a fake mode, and kernels of Triton to a
    table that `torch._dynamo.reset` clears.
    """
    calls = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    return all(node.target is operator.getitem or isinstance(node.target, torch._ops.OpOverload) for node in calls)


def _inline(
    graph: Graph, before: Node, traced: GraphModule, arguments: list[Node], mode: Any, share: bool
) -> list[Node]:
    """Results of a traced graph's copy. share: whether it has the fake values of the graph that was traced, if any."""
    placed = dict(zip((n for n in traced.graph.nodes if n.op == "placeholder"), arguments))
    with graph.inserting_before(before), tracing(mode):
        for inner in traced.graph.nodes:
            if inner.op == "output":
                return [placed.get(item) for item in inner.args[0]]  # None: an output without users
            if inner.op == "placeholder":
                continue
            if inner.op == "get_attr":
                placed[inner] = _constant(graph, traced, inner)
                continue
            copy = graph.node_copy(inner, lambda n: placed[n])
            for key in ("stack_trace", "nn_module_stack", "original_aten"):
                if key in before.meta:
                    copy.meta.setdefault(key, before.meta[key])
            if not share or "val" not in copy.meta:
                args, kwargs = torch.fx.map_arg((copy.args, copy.kwargs), lambda n: n.meta["val"])
                copy.meta["val"] = inner.target(*args, **kwargs)
            if isinstance(copy.target, torch._ops.OpOverload) and not returns_view(copy.target):
                note_computed(copy)
            placed[inner] = copy
    raise AssertionError("a traced graph ends with its output")


def _constant(graph: Graph, traced: GraphModule, inner: Node) -> Node:
    owner = graph.owning_module
    name = next(n for i in range(10_000) if not hasattr(owner, n := f"_tunecompile_constant{i}"))
    setattr(owner, name, getattr(traced, inner.target))
    node = graph.create_node("get_attr", name)  # `graph.get_attr` warns of a tensor that is no parameter or buffer
    node.meta = dict(inner.meta)
    return node


PASS = Pass("choose_provider", "lower", run)
