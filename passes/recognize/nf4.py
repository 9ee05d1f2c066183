"""4-bit matrix products of bitsandbytes become dequantisation and a plain linear, which later passes recognize.

Behind those, adapted linears, and in rollouts linears without adapters, take the packed weights.
"""

import math

import torch
from torch.fx import Graph, Node

from tunecompile._torch.autograd import set_grad_enabled
from tunecompile._torch.modules import linear
from tunecompile.compiler.pass_manager import Context, Pass
from tunecompile.ir.canonicalize import drop_clones, dtype_of, value
from tunecompile.ir.nodes import DISTURBED, is_barrier, is_disturbed
from tunecompile.ir.op import Op, has_triton
from tunecompile.ir.pretend_gpu import on_gpu
from tunecompile.ir.rewrite import annotate, erase_dead, replace, where_from
from tunecompile.ops import dequantize_4bit, linear_4bit, lora_linear
from tunecompile.ops.frozen_weights import packed_as
from tunecompile.ops.nf4 import CODES
from tunecompile.ops.packed.few_rows import packed_linear, refuse

__all__ = ["FEW_ROWS", "LORA", "PASS"]

_PARAMETERS = (
    "A",
    "B",
    "shapeB",
    "absmax",
    "blocksize",
    "quant_type",
    "bias",
    "absmax_8bit",
    "absmax_code",
    "absmax_offset",
)


def _is_gemm(node: Node) -> bool:
    return node.op == "call_function" and str(node.target) in (
        "bitsandbytes.gemm_4bit.default",
        "bitsandbytes.gemm_4bit",
    )


def _arguments(node: Node) -> dict:
    return {**dict.fromkeys(_PARAMETERS), **dict(zip(_PARAMETERS, node.args)), **node.kwargs}


def _inner_gemm(graph: Graph, call: Node) -> dict | None:
    """The arguments of the single product in an autograd function's body, as nodes of the outer graph."""
    body = getattr(graph.owning_module, call.args[0].target)
    outer = dict(zip((n for n in body.graph.nodes if n.op == "placeholder"), call.args[2:]))
    products = [node for node in body.graph.nodes if _is_gemm(node)]
    for node in body.graph.nodes:
        if node.op == "call_method" and node.target == "view" and node.args[0] in outer:  # of the packed weight
            outer[node] = outer[node.args[0]]
        elif is_barrier(node) and node.target is not set_grad_enabled:
            return None
    (output,) = (node for node in body.graph.nodes if node.op == "output")
    others_read = any(user.args[1] != 0 and user.users for user in call.users)  # torch 2.11 returns saved views as well
    if len(products) != 1 or output.args[0][0][0] is not products[0] or others_read:
        return None
    if not all(v in outer for v in products[0].all_input_nodes):
        return None
    return {k: outer[v] if isinstance(v, Node) else v for k, v in _arguments(products[0]).items()}


def _refuse(arguments: dict) -> str | None:
    shape, blocksize = arguments["shapeB"], arguments["blocksize"]
    if arguments["quant_type"] not in CODES:
        return f"quantisation {arguments['quant_type']!r} is unknown"
    if isinstance(shape, Node) or isinstance(
        blocksize, Node
    ):  # part of a layer, after a graph break inside bitsandbytes' code
        return "the weight's shape is no constant"
    if math.prod(shape) % blocksize:
        return "the last block is not full"
    if len(shape) != 2 or value(arguments["A"]).shape[-1] != shape[1]:
        return "the weight is not [out, in]"
    return None


def _build(
    A, B, absmax, bias, absmax_8bit, absmax_code, absmax_offset, rows, columns, blocksize, quant_type, dtype, storage
):
    nested = absmax_8bit is not None
    if storage != torch.uint8:  # bnb_4bit_quant_storage, which FSDP requires: the same bytes
        B = B.view(torch.uint8).reshape(-1, 1)
    weight = dequantize_4bit(
        B,
        absmax_8bit if nested else absmax,
        absmax_code,
        absmax if nested else None,
        absmax_offset,
        rows,
        columns,
        blocksize,
        quant_type,
        dtype,
    )
    return linear(A, weight, bias)


def run(graph: Graph, context: Context) -> None:
    tally = context.tally("nf4")
    for node in graph.find_nodes(op="call_function", target=dequantize_4bit.overload):
        tally.rewrote(anchors=sum(user.target is linear for user in node.users))  # as it was traced
    drop_clones(graph)  # again: passes before this one may have removed the graph's mutations
    for node in list(graph.nodes):
        function = str(node.target) == "autograd_function_apply"
        arguments = _inner_gemm(graph, node) if function else _arguments(node) if _is_gemm(node) else None
        if arguments is None:
            if function and any(_is_gemm(n) for n in getattr(graph.owning_module, node.args[0].target).graph.nodes):
                tally.refuse(f"the autograd function does more than one product{where_from(node)}")
            continue
        if (reason := _refuse(arguments)) is not None:
            tally.refuse(reason + where_from(node))
            continue
        rows, columns = arguments.pop("shapeB")
        output = next(user for user in node.users if user.args[1] == 0) if function else node
        arguments |= {
            "rows": rows,
            "columns": columns,
            "dtype": dtype_of(arguments["A"]),
            "storage": dtype_of(arguments["B"]),
        }
        if (reason := replace(graph, (output,), _build, arguments)) is not None:
            tally.refuse(reason + where_from(node))
            continue
        erase_dead(graph, [output, node, *node.users])
        tally.rewrote()


def _of_adapters(graph: Graph, context: Context) -> None:
    """Adapted linears read packed weights where a template dequantises them: of one format, and without other users."""
    tally = context.tally("lora_nf4")
    for node in graph.find_nodes(op="call_function", target=lora_linear.overload):
        x, inputs, weights, *adapters, _ = node.args
        packed = [w for w in weights if w.target is dequantize_4bit.overload]
        if not packed or not on_gpu(value(x)) or not has_triton():
            continue
        blocksize, quant_type, dtype = packed[0].args[7:]
        formats = {(w.args[2] is None, *w.args[7:]) for w in packed}
        alone = packed == list(weights) and all(len(w.users) == 1 for w in weights)
        if not alone or len(formats) > 1 or dtype != value(x).dtype:
            tally.refuse("the weights differ in format, or are read elsewhere too")
        elif any(is_disturbed(weight, node) for weight in weights):  # the op reads packed weights where it stands
            tally.refuse(DISTURBED)
        else:
            tensors = [each for w in weights for each in w.args[:5] if each is not None]
            stored = packed_as(quant_type, blocksize)
            _replace(graph, node, lora_linear, (x, inputs, tensors, *adapters, stored), weights)
            tally.rewrote()


def _of_few_rows(graph: Graph, context: Context) -> None:
    """Frozen 4-bit linears that no adapter has, in a step of a rollout: packed weights are read where they are."""
    tally = context.tally("linear_4bit")
    for node in list(graph.find_nodes(op="call_function", target=linear)):
        x, weight, bias = (*node.args, *node.kwargs.values(), None)[:3]
        if not isinstance(weight, Node) or weight.target is not dequantize_4bit.overload or value(node).requires_grad:
            continue
        *tensors, rows, columns, blocksize, quant_type, dtype = weight.args
        codes, absmax = map(value, tensors[:2])
        frozen = packed_linear(codes, absmax, (), rows, value(x), blocksize, quant_type)
        if columns != frozen.columns or dtype != value(x).dtype or refuse(value(x), frozen, [], []):
            continue
        if is_disturbed(weight, node):
            tally.refuse(DISTURBED)
            continue
        _replace(graph, node, linear_4bit, (x, *tensors, bias, rows, blocksize, quant_type), [weight])
        tally.rewrote()


def _replace(graph: Graph, node: Node, op: Op, args: tuple, weights: list[Node]) -> None:
    """Put a call on packed weights in the place of one on their values."""
    with graph.inserting_before(node):
        new = graph.call_function(op.overload, args)
    annotate(new, node)
    node.replace_all_uses_with(new)
    erase_dead(graph, [node, *weights])


LORA = Pass("lora_nf4", "recognize", _of_adapters, requires=frozenset({"grouped_linear", "nf4"}))
FEW_ROWS = Pass("linear_4bit", "recognize", _of_few_rows, requires=frozenset({"nf4"}))
PASS = Pass("nf4", "recognize", run)
