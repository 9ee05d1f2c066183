"""Adapted linears take packed weights directly, if nothing else reads the dequantised ones."""

from torch.fx import Graph, Node

from tunecompile.compiler.pass_manager import Context, MatchCount, Pass
from tunecompile.ir.canonicalize import value
from tunecompile.ir.nodes import DISTURBED, is_disturbed
from tunecompile.ir.op import has_triton
from tunecompile.ir.pretend_gpu import on_gpu
from tunecompile.ir.rewrite import annotate, erase_dead
from tunecompile.ops import dequantize_4bit, lora_linear, lora_linear_nf4

__all__ = ["PASS"]


def _same_format(node: Node, weights: list[Node]) -> bool:
    """Whether all weights come from `dequantize_4bit`, have no other user, and agree in format and dtype."""
    if not all(w.target is dequantize_4bit.overload and len(w.users) == 1 for w in weights):
        return False
    formats = {(w.args[2] is None, w.args[7], w.args[8], w.args[9]) for w in weights}
    return len(formats) == 1 and next(iter(formats))[3] == value(node.args[0]).dtype


def run(graph: Graph, context: Context) -> None:
    tally = MatchCount("lora_nf4")
    for node in list(graph.nodes):
        if node.target is not lora_linear.overload or not on_gpu(value(node.args[0])) or not has_triton():
            continue
        x, inputs, weights, biases, a, b, scales, dtype = node.args
        if not any(w.target is dequantize_4bit.overload for w in weights):
            continue
        if not _same_format(node, weights):
            tally.refuse("the weights differ in format, or are read elsewhere too")
            continue
        if any(is_disturbed(weight, node) for weight in weights):  # the op reads packed weights where it stands
            tally.refuse(DISTURBED)
            continue
        nested = weights[0].args[2] is not None
        tensors = [[w.args[i] for w in weights] if nested or i < 2 else [] for i in range(5)]
        rows, (blocksize, quant_type) = [w.args[5] for w in weights], weights[0].args[7:9]
        with graph.inserting_before(node):
            new = graph.call_function(
                lora_linear_nf4.overload,
                (x, inputs, *tensors, biases, a, b, scales, dtype, rows, blocksize, quant_type),
            )
        annotate(new, node)
        node.replace_all_uses_with(new)
        erase_dead(graph, [node, *weights])
        tally.rewrote()
    context.tallies.append(tally)


PASS = Pass(
    "lora_nf4", "recognize", run, requires=frozenset({"grouped_linear", "nf4"}), provides=frozenset({"lora_nf4"})
)
