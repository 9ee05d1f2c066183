"""Products of few rows with stacks of packed matrices, in a step of a rollout: the stack is read where it is."""

from __future__ import annotations

from torch.fx import Graph, Node

from tunecompile.compiler.pass_manager import Context, Pass
from tunecompile.ir.canonicalize import value
from tunecompile.ir.nodes import DISTURBED, is_disturbed
from tunecompile.ir.rewrite import annotate, erase_dead
from tunecompile.ops import dequantize_4bit, dequantize_mxfp4, grouped_lora_linear, packed_experts
from tunecompile.ops.packed.experts import refuse_packed
from tunecompile.ops.packed.mxfp4 import BLOCK

__all__ = ["PASS"]

_VIEWS = ("view", "reshape")


def _packed(stack: Node) -> tuple[list[Node], Node, list, int, str] | None:
    """(Nodes from the stack on, that of the dequantisation, its codes and scales, weights a block, the format)."""
    chain = [stack]
    while chain[-1].target in _VIEWS and isinstance(chain[-1].args[0], Node):
        chain.append(chain[-1].args[0])
    source = chain[-1]
    if source.target is dequantize_4bit.overload:
        *tensors, _, columns, blocksize, quant_type, _ = source.args
    elif source.target is dequantize_mxfp4.overload:
        (*tensors, _, columns, _), blocksize, quant_type = source.args, BLOCK, "mxfp4"
        tensors += [None] * 3
    else:
        return None
    same_rows = columns == value(stack).shape[-1] and value(source).dtype == value(stack).dtype
    return (chain, source, tensors, blocksize, quant_type) if same_rows else None


def run(graph: Graph, context: Context) -> None:
    tally = context.tally("packed_experts")
    for node in list(graph.find_nodes(op="call_function", target=grouped_lora_linear.overload)):
        x, stack, offsets, a, b, scales, transposed, bias = node.args
        if not isinstance(stack, Node) or transposed or value(node)[0].requires_grad:
            continue
        if (found := _packed(stack)) is None:
            continue
        chain, source, tensors, blocksize, quant_type = found
        rows, read = value(stack).shape[1], [value(each) for each in (x, *tensors[:2], offsets)]
        adapters = [[value(each) for each in side] for side in (a, b)]
        if refuse_packed(*read, *adapters, None if bias is None else value(bias), rows, blocksize):
            continue
        if not tally.judge(DISTURBED if is_disturbed(source, node) else None, node):
            continue
        with graph.inserting_before(node):
            arguments = (x, *tensors, offsets, a, b, scales, bias, rows, blocksize, quant_type)
            new = graph.call_function(packed_experts.overload, arguments)
        y = [user for user in node.users if user.args[1] == 0]
        annotate(new, y[0])
        for user in y:
            user.replace_all_uses_with(new)
        erase_dead(graph, [*node.users, node, *chain])


PASS = Pass("packed_experts", "recognize", run, requires=frozenset({"nf4", "experts"}))
