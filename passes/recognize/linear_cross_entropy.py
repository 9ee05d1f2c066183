"""Head and loss inside one graph: a linear, what happens to its rows and scale, and `F.cross_entropy`.

(Where the loss is computed outside a region, `tunecompile.runtime.loss_head` joins the two at run time.)
"""

import operator

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from tunecompile._torch.modules import linear
from tunecompile.compiler.pass_manager import Context, MatchCount, Pass
from tunecompile.ir.canonicalize import dtype_of, value
from tunecompile.ir.rewrite import erase_dead, replace, where_from
from tunecompile.ops import linear_cross_entropy, linear_cross_entropy_rows
from tunecompile.ops.linear_cross_entropy import mean_of_labelled

__all__ = ["PASS"]

_DEFAULTS = {
    "weight": None,
    "size_average": None,
    "ignore_index": -100,
    "reduce": None,
    "reduction": "mean",
    "label_smoothing": 0.0,
}
_NAMES = ("input", "target", *_DEFAULTS)


def _arguments(node: Node) -> dict:
    return {**_DEFAULTS, **dict(zip(_NAMES, node.args)), **node.kwargs}


def _is(node: Node, *methods: str) -> bool:
    return node.op == "call_method" and node.target in methods


def _operands(node: Node) -> tuple:
    """A constant comes last."""
    return node.args[::-1] if node.target is operator.mul and not isinstance(node.args[0], Node) else node.args


def _climb(logits: Node) -> tuple[Node, list[Node], float, float] | str:
    """(linear, nodes that move rows, scale, soft-cap), from the loss upwards; or why the chain is not understood."""
    rows, scale, softcap, outer = [], 1.0, 0.0, None
    node = logits
    while node.target is not linear:
        if len(node.users) > 1:
            return "the logits are used elsewhere too"
        args = _operands(node)
        source = args[0] if args and isinstance(args[0], Node) else None
        if source is None:
            return f"{node.name} is no step from a head to its loss"
        if _is(node, "view", "reshape", "contiguous", "flatten") or node.target is torch.flatten:
            rows.append(node)
        elif node.target is operator.getitem and _cuts_rows(node):
            rows.append(node)
        elif node.target in (operator.mul, operator.truediv) and isinstance(args[1], (int, float)):
            factor = float(args[1]) if node.target is operator.mul else 1.0 / args[1]
            if outer is None and softcap == 0.0 and source.target is torch.tanh:
                outer = factor
            else:
                scale *= factor
        elif node.target is torch.tanh:
            if outer is None or softcap:
                return "a tanh that is not scaled back"
            softcap, scale = outer, scale * outer
        elif not _is(node, "to"):
            return f"{node.name} is no step from a head to its loss"
        node = source
    moves = [step.target is operator.getitem for step in reversed(rows)]
    if any(later and not earlier for earlier, later in zip(moves, moves[1:])):
        return "rows are sliced after they were reshaped"
    return node, rows, scale, softcap


def _cuts_rows(node: Node) -> bool:
    """A slice of leading dimensions that leaves the vocabulary whole."""
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    dims = value(node.args[0]).dim()
    whole = all(part == slice(None) for part in index[dims - 1 :])
    return len(index) <= dims and whole and all(isinstance(part, slice) for part in index)


def _refuse(node: Node, arguments: dict) -> str | None:
    logits, target = value(arguments["input"]), value(arguments["target"])
    if arguments["weight"] is not None or arguments["size_average"] is not None or arguments["reduce"] is not None:
        return "class weights, or a reduction by old names"
    if logits.dim() != 2 or target.dim() != 1 or target.dtype != torch.int64:
        return "labels are not one class a row"
    if logits.dtype not in (torch.float32, torch.float64) and arguments["reduction"] != "none":
        return f"the loss is computed in {logits.dtype}"
    return None


def run(graph: Graph, context: Context) -> None:
    tally = MatchCount("linear_cross_entropy")
    for node in [n for n in graph.nodes if n.target is F.cross_entropy]:
        tally.found += 1
        arguments = _arguments(node)
        chain = _refuse(node, arguments) or _climb(arguments["input"])
        if not isinstance(chain, str) and len(chain[0].users) > 1:
            chain = "the logits are used elsewhere too"
        if (
            not isinstance(chain, str)
            and arguments["reduction"] == "none"
            and dtype_of(arguments["input"]) == torch.float64 != dtype_of(chain[0])
        ):
            chain = "each row's loss is computed in torch.float64"
        if isinstance(chain, str):
            tally.refused.append(chain + where_from(node))
            continue
        product, rows, scale, softcap = chain
        if value(arguments["input"]).shape[-1] != value(product).shape[-1]:
            tally.refused.append("the vocabulary is reshaped" + where_from(node))
            continue
        bound = {
            "x": product.args[0],
            "weight": product.args[1],
            "bias": product.args[2],
            "target": arguments["target"],
        }
        climbed = [n for n in graph.nodes if n in _between(arguments["input"], product)]

        def build(x, weight, bias, target):
            dtype = dtype_of(product)
            x, weight, bias = (
                v if v is None or dtype_of(product.args[i]) == dtype else v.to(dtype)
                for i, v in enumerate((x, weight, bias))
            )
            for step in reversed(rows):
                if step.target is operator.getitem:
                    x = x[_without_vocabulary(step)]
            x = x.reshape(-1, value(product.args[0]).shape[-1])
            trained = [getattr(value(v), "requires_grad", False) for v in product.args]
            op = linear_cross_entropy_rows if arguments["reduction"] == "none" else linear_cross_entropy
            made = op(
                x,
                weight,
                bias,
                None,
                None,
                target,
                scale,
                softcap,
                arguments["ignore_index"],
                arguments["label_smoothing"],
                trained[0],
                trained[1] or trained[2],
            )
            loss = (
                mean_of_labelled(made[0], target, arguments["ignore_index"])
                if arguments["reduction"] == "mean"
                else made[0]
            )
            return (
                loss if torch.promote_types(dtype, torch.float32) == value(node).dtype else loss.to(value(node).dtype)
            )

        if (reason := replace(graph, (node,), build, bound)) is not None:
            tally.refused.append(reason + where_from(node))
            continue
        erase_dead(graph, [node, *climbed])
        tally.rewritten += 1
    context.tallies.append(tally)


def _without_vocabulary(step: Node) -> tuple:
    index = step.args[1] if isinstance(step.args[1], tuple) else (step.args[1],)
    return tuple(index[: value(step.args[0]).dim() - 1])


def _between(last: Node, first: Node) -> set[Node]:
    nodes = {last}
    while last is not first:
        last = _operands(last)[0]
        nodes.add(last)
    return nodes


PASS = Pass("linear_cross_entropy", "recognize", run, provides=frozenset({"linear_cross_entropy"}))
