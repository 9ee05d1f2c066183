"""Head and loss inside one graph: a linear, steps on its rows and scale, and `F.cross_entropy`.

(Where the loss is computed outside a region, `tunecompile.runtime.loss_head` joins the two at run time.)
"""

import functools
import itertools
import operator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from tunecompile._torch.modules import linear
from tunecompile.compiler.pass_manager import Context, MatchCount, Pass
from tunecompile.ir.canonicalize import dtype_of, value
from tunecompile.ir.nodes import DISTURBED, is_disturbed
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


@dataclass
class _Chain:
    """The steps from a head to its loss: softcap * tanh(scale * product / softcap) of some rows.

    `tunecompile.runtime.loss_head.logit_chain` computes the same for calls that were recorded during a step: from the
    head downwards, with known sizes, log-softmax and indices among them. Here a graph is read upwards from its loss,
    and sizes may be symbols. Only the formula is common to both.
    """

    product: Node  #: the linear
    rows: list[Node]  #: steps that slice or reshape rows, from the loss upwards
    scale: float = 1.0  #: product of all factors so far; at a tanh, the factors after it are its softcap
    scaled: bool = False  #: whether there were any
    softcap: float = 0.0  #: 0: none


def _climb(logits: Node) -> _Chain | str:
    """The chain that ends in `logits`, read upwards; or why it is not supported."""
    chain = _Chain(logits, [])
    while (node := chain.product).target is not linear:
        if len(node.users) > 1:
            return "the logits are used elsewhere too"
        args = _operands(node)
        source = args[0] if args and isinstance(args[0], Node) else None
        if source is None:
            return f"{node.name} is no step from a head to its loss"
        if _moves_rows(node):
            chain.rows.append(node)
        elif node.target in (operator.mul, operator.truediv) and isinstance(args[1], (int, float)):
            chain.scale *= float(args[1]) if node.target is operator.mul else 1.0 / args[1]
            chain.scaled = True
        elif node.target is torch.tanh:
            if not chain.scaled or not chain.scale > 0 or chain.softcap:
                return "a tanh that is not scaled back"
            chain.softcap = chain.scale
        elif not _is(node, "to"):
            return f"{node.name} is no step from a head to its loss"
        chain.product = source
    slices = [step.target is operator.getitem for step in reversed(chain.rows)]
    if any(later and not earlier for earlier, later in itertools.pairwise(slices)):
        return "rows are sliced after they were reshaped"
    return chain


def _moves_rows(node: Node) -> bool:
    if _is(node, "view", "reshape", "contiguous", "flatten") or node.target is torch.flatten:
        return True
    return node.target is operator.getitem and _cuts_rows(node)


def _cuts_rows(node: Node) -> bool:
    """Whether this slices only leading dimensions, and not the vocabulary."""
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
        reason = _rewrite(graph, node)
        if reason is None:
            tally.rewrote()
        else:
            tally.refuse(reason + where_from(node))
    context.tallies.append(tally)


def _rewrite(graph: Graph, node: Node) -> str | None:
    """Replace a loss and its chain by the op, or return the reason why not."""
    arguments = _arguments(node)
    logits = arguments["input"]
    chain = _refuse(node, arguments) or _climb(logits)
    if isinstance(chain, str):
        return chain
    product = chain.product
    if len(product.users) > 1:
        return "the logits are used elsewhere too"
    if is_disturbed(product, node, whole_numbers=False):
        return DISTURBED
    if arguments["reduction"] == "none" and dtype_of(logits) == torch.float64 != dtype_of(product):
        return "each row's loss is computed in torch.float64"
    if value(logits).shape[-1] != value(product).shape[-1]:
        return "the vocabulary is reshaped"
    bound = dict(zip(("x", "weight", "bias"), product.args)) | {"target": arguments["target"]}
    climbed = [n for n in graph.nodes if n in _between(logits, product)]
    build = functools.partial(_build, node, chain, arguments)
    if (reason := replace(graph, (node,), build, bound)) is not None:
        return reason
    erase_dead(graph, [node, *climbed])
    return None


def _build(node: Node, chain: _Chain, arguments: dict, x, weight, bias, target):
    """Build the op for the rows that the loss reads, in the product's dtype."""
    product, dtype = chain.product, dtype_of(chain.product)
    x = x if dtype_of(product.args[0]) == dtype else x.to(dtype)
    weight, bias = (
        v if v is None or dtype_of(given) == dtype else v.to(dtype)
        for v, given in zip((weight, bias), product.args[1:])
    )
    for step in reversed(chain.rows):
        if step.target is operator.getitem:
            x = x[step.args[1]]  # the last dimension, of words, is taken as a whole
    x = x.reshape(-1, value(product.args[0]).shape[-1])
    trained = [getattr(value(v), "requires_grad", False) for v in product.args]
    reduction, ignore_index = arguments["reduction"], arguments["ignore_index"]
    op = linear_cross_entropy_rows if reduction == "none" else linear_cross_entropy
    made = op(
        x,
        weight,
        bias,
        None,
        None,
        target,
        chain.scale,
        chain.softcap,
        ignore_index,
        arguments["label_smoothing"],
        trained[0],
        trained[1] or trained[2],
    )
    loss = mean_of_labelled(made[0], target, ignore_index) if reduction == "mean" else made[0]
    wanted = value(node).dtype
    return loss if dtype is not None and torch.promote_types(dtype, torch.float32) == wanted else loss.to(wanted)


def _between(last: Node, first: Node) -> set[Node]:
    nodes = {last}
    while last is not first:
        last = _operands(last)[0]
        nodes.add(last)
    return nodes


PASS = Pass("linear_cross_entropy", "recognize", run, provides=frozenset({"linear_cross_entropy"}))
