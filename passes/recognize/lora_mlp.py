"""Adapted gate|up, gated activation and adapted down become one op, if a provider fuses their backward.

Gate and up are two projections, or the halves of one, whose adapter then serves both."""

from operator import getitem

import torch
from torch.fx import Graph, Node

from tunecompile.compiler.pass_manager import Context, Pass
from tunecompile.ir.canonicalize import value
from tunecompile.ir.nodes import is_disturbed
from tunecompile.ir.rewrite import annotate, erase_dead, where_from
from tunecompile.ops import gated_activation, lora_linear, lora_mlp

__all__ = ["PASS"]

_PARTS = ("split", "chunk", torch.split, torch.chunk)  #: several ways to cut one output


def _half(node: Node) -> tuple[Node, int] | None:
    """(adapted linear, index of the half) if the node is a half of its output and has a single user."""
    if node.target is not getitem or getattr(node.args[0], "target", None) not in _PARTS or len(node.users) != 1:
        return None
    split, index = node.args
    y = split.args[0]
    if (
        y.target is not getitem
        or y.args[1] != 0
        or y.args[0].target is not lora_linear.overload
        or len(y.users) != 1
        or len(split.users) != 2
        or 2 * value(node).shape[-1] != value(y).shape[-1]  # other parts, or along another dimension
    ):
        return None
    return (y.args[0], index) if len(y.args[0].users) == 1 else None


def _is_adapted(node: Node) -> bool:
    """Whether it is of the output of an adapted linear, whole or in part."""
    while isinstance(node, Node) and (node.target is getitem or node.target in _PARTS):
        node = node.args[0]
    return isinstance(node, Node) and node.target is lora_linear.overload


def _match(down: Node) -> tuple | str | None:
    """The arguments of `lora_mlp`; for a near miss the reason; otherwise None."""
    act, _, _, _, a, *_ = down.args
    if act.target is not gated_activation.overload or len(a) != 1:
        return None
    gate, up = (_half(side) for side in act.args[:2])
    if gate is None or up is None or gate[0] is not up[0]:
        if not any(map(_is_adapted, act.args[:2])):
            return None  # down alone has an adapter
        return "gate and up are no group of adapted linears, or are read elsewhere too"
    if (gate[1], up[1]) != (0, 1):
        return "up stands before gate"
    if len(gate[0].args[4]) > 2:
        return "a third projection is grouped with gate and up"
    if is_disturbed(gate[0], down):
        return "autograd or autocast is switched, or a value changed in place, between them"
    if reason := _mismatch(gate[0], act, down):
        return reason
    x, _, weights, _, a, b, scales, _, stored = gate[0].args
    joined = ([*theirs, *its] for theirs, its in zip((weights, a, b, scales), (down.args[2], *down.args[4:7])))
    return (x, *joined, stored, act.args[2])


def _mismatch(gate_up: Node, act: Node, down: Node) -> str | None:
    """Why gate|up and down cannot be one op, or None."""
    x, inputs, weights, biases, a, _, _, dtype, stored = gate_up.args
    _, own, other, bias, *_, its_dtype, its_stored = down.args
    if inputs or biases or own or bias:
        return "a projection has a bias, or its adapter dropout"
    if (dtype, stored, len(weights)) != (its_dtype, its_stored, len(a) * len(other)):
        return "the projections' weights differ in format"
    if dtype != value(x).dtype or value(act).dtype != value(x).dtype or len(act.users) != 1:
        return "adapters or activation are computed in another dtype, or the activation is read elsewhere too"
    if any(user.target is not getitem or user.args[1] != 0 for user in down.users):
        return "the inner product of down's adapter is read elsewhere too"
    return None


def run(graph: Graph, context: Context) -> None:
    tally = context.tally("lora_mlp")
    for down in list(graph.find_nodes(op="call_function", target=lora_linear.overload)):
        match = _match(down)
        if isinstance(match, str):
            tally.refuse(match + where_from(down))
        elif (
            match is not None
            and lora_mlp.choose(torch.fx.map_arg(match, value), context.precision).run is not lora_mlp.reference
        ):
            _replace(graph, down, match)
            tally.rewrote()


def _replace(graph: Graph, down: Node, args: tuple) -> None:
    with graph.inserting_before(down):
        made = graph.call_function(lora_mlp.overload, args)
        y = graph.call_function(getitem, (made, 0))
    annotate(made, down)
    annotate(y, down)
    outputs = list(down.users)
    for user in outputs:
        user.replace_all_uses_with(y)
    dead, pending = {*outputs, down}, [down]
    while pending:  # erase the old nodes up to gate|up
        for source in pending.pop().all_input_nodes:
            if source.op in ("call_function", "call_method") and set(source.users) <= dead and source not in dead:
                dead.add(source)
                pending.append(source)
    erase_dead(graph, dead)


PASS = Pass("lora_mlp", "recognize", run, requires=frozenset({"lora_nf4", "swiglu"}))
