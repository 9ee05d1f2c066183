"""Head and loss inside one graph: a linear, steps on its rows and scale, and `F.cross_entropy`.

`tunecompile.ir.logit_chain` reads the steps. (Where the loss is computed outside a region,
`tunecompile.runtime.loss_head` joins the two at run time.)
"""

import functools
import operator

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from tunecompile._torch.modules import linear
from tunecompile.compiler.pass_manager import Context, Pass
from tunecompile.ir.canonicalize import dtype_of, value
from tunecompile.ir.logit_chain import CALLS, Chain, LossCall, Step, Unfit, read
from tunecompile.ir.nodes import DISTURBED, is_disturbed
from tunecompile.ir.rewrite import erase_dead, replace, where_from
from tunecompile.notes import note
from tunecompile.ops import linear_cross_entropy, linear_cross_entropy_rows
from tunecompile.ops.linear_cross_entropy import mean_of_labelled

__all__ = ["PASS"]


def _climb(logits: Node) -> list[Node]:
    """The head's linear, and the steps from it to `logits`, which nothing else reads.

    Raises:
        Unfit: something else does, or a node is no step.
    """
    path = [logits]
    while path[0].target is not linear:
        source = _operands(path[0])[:1]
        if len(path[0].users) > 1:
            raise Unfit(note("logits-used-elsewhere"))
        if not source or not isinstance(source[0], Node) or path[0].target not in CALLS:
            raise Unfit(note("no-step-to-loss", path[0].name))
        path.insert(0, source[0])
    if len(path[0].users) > 1:
        raise Unfit(note("logits-used-elsewhere"))
    return path


def _operands(node: Node) -> tuple:
    """A constant comes last."""
    return node.args[::-1] if node.target is operator.mul and not isinstance(node.args[0], Node) else node.args


def run(graph: Graph, context: Context) -> None:
    tally = context.tally("linear_cross_entropy")
    for node in [n for n in graph.nodes if n.target is F.cross_entropy]:
        try:
            reason = _rewrite(graph, node)
        except Unfit as unfit:
            reason = str(unfit.reason)
        if reason is None:
            tally.rewrote()
        else:
            tally.refuse(reason + where_from(node))


def _rewrite(graph: Graph, node: Node) -> str | None:
    """Replace a loss and its chain by the op, or return (or raise) the reason why not."""
    call = LossCall(*node.args, **node.kwargs)
    logits = value(call.input)
    call.check(logits, value(call.target), logits.dtype)
    product, *nodes = path = _climb(call.input)
    if call.reduction == "none" and logits.dtype == torch.float64 != dtype_of(product):
        return note("row-loss-in-fp64")
    chain = read(value(product), [Step(step.target, value(step), _operands(step)[1:], step.kwargs) for step in nodes])
    if any(kind == "reshape" and not all(isinstance(size, int) for size in sizes) for kind, sizes in chain.moves):
        return note("sizes-not-known")
    if is_disturbed(product, node, whole_numbers=False):
        return DISTURBED
    bound = dict(zip(("x", "weight", "bias"), product.args)) | {"target": call.target}
    build = functools.partial(_build, node, product, chain, call)
    if (reason := replace(graph, (node,), build, bound)) is not None:
        return reason
    erase_dead(graph, [node, *path])
    return None


def _build(node: Node, product: Node, chain: Chain, call: LossCall, x, weight, bias, target):
    """Build the op for the rows that the loss reads, in the product's dtype."""
    dtype = dtype_of(product)
    x = x if dtype_of(product.args[0]) == dtype else x.to(dtype)
    weight, bias = (
        v if v is None or dtype_of(given) == dtype else v.to(dtype)
        for v, given in zip((weight, bias), product.args[1:])
    )
    trained = [getattr(value(v), "requires_grad", False) for v in product.args]
    op = linear_cross_entropy_rows if call.reduction == "none" else linear_cross_entropy
    rows = chain.rows_of(x, value(product.args[0]).shape[-1])
    options = chain.scale, chain.softcap, call.ignore_index, call.label_smoothing
    made = op(rows, weight, bias, None, None, target, *options, trained[0], trained[1] or trained[2])
    loss = mean_of_labelled(made[0], target, call.ignore_index) if call.reduction == "mean" else made[0]
    wanted = value(node).dtype
    return loss if dtype is not None and torch.promote_types(dtype, torch.float32) == wanted else loss.to(wanted)


PASS = Pass("linear_cross_entropy", "recognize", run)
