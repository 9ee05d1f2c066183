"""Attention of rows that begin alike, whose common prefixes are there once: as a tree of documents.

Each node of the tree is a document, and goes on where its parent ends. Nodes stand depth first, so that all that is
below a node follows it. A token sees its own node up to itself, and all of the nodes above: what it saw in its row.
(Prefixes that completions share: Hydragen, arXiv:2402.05099; trees: DeFT, arXiv:2404.00242.)
"""

from typing import Optional

import torch
from torch import Tensor

from tunecompile import templates
from tunecompile.ir.op import Cost, op
from tunecompile.ir.shape_rule_cache import contiguous_like
from tunecompile.notes import Note
from tunecompile.ops.attention.documents import (
    attention_shapes,
    document_mask,
    join_sinks,
    refuse_template,
    sinks_gradient,
    sums_of_gradients,
)


def _scores(q, k, offsets, tree, places, scale, window, softcap) -> tuple[Tensor, Tensor | float]:
    """[H, N, N] in the dtype of the arithmetic, minus infinity where a query does not see a key; and their slope by
    what the cap is of."""
    scores = _wide(q) @ _of_heads(k, q).mT * scale
    slope: Tensor | float = 1.0
    if softcap:
        bent = torch.tanh(scores / softcap)
        scores, slope = softcap * bent, 1 - bent * bent
    seen = document_mask.reference(offsets, 0, q.shape[0], window, True, tree, places)[0]
    return scores.masked_fill(~seen, float("-inf")), slope


def _wide(x: Tensor) -> Tensor:
    """[N, H, D] -> [H, N, D] in the dtype of the arithmetic."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).transpose(0, 1)


def _of_heads(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values for each head of q, [H, N, D]."""
    return _wide(x).repeat_interleave(q.shape[1] // x.shape[1], 0)


def _summed(gradient: Tensor, like: Tensor) -> Tensor:
    """[H, N, D] -> [N, K, D]: heads that share a key are summed."""
    made = gradient.unflatten(0, (like.shape[1], -1)).sum(1)
    return made.transpose(0, 1).to(like.dtype).contiguous()


def _backward_shapes(grad, q, k, v, offsets, longest, tree, places, scale, window, sinks, *_) -> list[Tensor]:
    return [*contiguous_like(q, k, v), grad.new_empty(0 if sinks is None else sinks.shape)]


def _example(draw) -> list:
    """A prefix, two branches, and a row alone, under a window."""
    q, k, v = (draw.normal(70, heads, 64) for heads in (2, 1, 1))
    tree = draw.numbers([-1, 0, 0, -1], [60, 40, 60, 70])
    places = draw.numbers(*range(40), *range(30, 50), *range(10))
    return [q, k, v, draw.numbers(0, 30, 40, 60, 70), 30, tree, places, 0.125, 33, None, 30.0]


@op(cost=Cost.MATMUL, shapes=attention_shapes, example=_example)
def branch_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    longest: int,
    tree: Tensor,
    places: Tensor,
    scale: float,
    window: int,
    sinks: Optional[Tensor],
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Return causal attention in a tree of documents. Arithmetic in fp32 (fp64 for fp64), rounded once.

    Args:
        q: [N, H, D], any floating dtype.
        k: [N, K, D], where K divides H.
        v: as k.
        offsets: int32 [S + 1], rising from 0 to N: where each node begins; nodes may be empty.
        longest: tokens of the longest node, or more: kernels are launched for so many.
        tree: int32 [2, S]: each node's parent, which stands before it, or -1; and where the last token below it ends.
        places: int32 [N]: the place of each token in its row; read for windows.
        scale: of the products.
        window: how many tokens of its row a token sees, itself included; 0 for all.
        sinks: [H], one more score in the softmax of each head, which has no value; or None.
        softcap: c of c * tanh(score / c), in the units of the scores; 0 for none.

    Returns:
        (out, logsumexp): [N, H, D] in q's dtype, and the log of the sum of exp of scores and sink, [H, N] in the dtype
        of the arithmetic, which gets no gradient."""
    scores, _ = _scores(q, k, offsets, tree, places, scale, window, softcap)
    logsumexp = scores.logsumexp(-1)
    if sinks is not None:
        logsumexp = torch.logaddexp(logsumexp, sinks.to(logsumexp.dtype)[:, None])
    out = (scores - logsumexp[..., None]).exp() @ _of_heads(v, q)
    return out.transpose(0, 1).to(q.dtype).contiguous(), logsumexp


@branch_attention.backward(gives=("q", "k", "v", "sinks"), shapes=_backward_shapes)
def branch_attention_backward(
    grad, q, k, v, offsets, longest, tree, places, scale, window, sinks, softcap, out0, out1
) -> list[Tensor]:
    """Return the gradients of `branch_attention`; probabilities are recomputed from the logsumexp (arXiv:2205.14135).

    Args:
        grad: of out, [N, H, D] in its dtype.
        out0: out, as `branch_attention` returned it.
        out1: the logsumexp of scores and sink, [H, N]. The others are those of `branch_attention`.

    Returns:
        [dq, dk, dv, dsinks], contiguous, in shape and dtype of q, k, v and sinks; dsinks is empty without sinks.
    """
    scores, slope = _scores(q, k, offsets, tree, places, scale, window, softcap)
    weights, change = (scores - out1[..., None]).exp(), _wide(grad)
    dweights = change @ _of_heads(v, q).mT
    delta = (change * _wide(out0)).sum(-1, keepdim=True)
    dscores = weights * (dweights - delta) * slope * scale
    dq = (dscores @ _of_heads(k, q)).transpose(0, 1).to(q.dtype).contiguous()
    dk, dv = _summed(dscores.mT @ _wide(q), k), _summed(weights.mT @ change, v)
    return [dq, dk, dv, sinks_gradient(grad, out0, out1, sinks)]


def refuse_branches(q: Tensor, k: Tensor, v: Tensor) -> Note | None:
    """Return why no kernel for branches takes these; None where one does."""
    return refuse_template(q, k, v)


@branch_attention.provider("triton", because="reads prefixes in place, and once", refuses=refuse_branches)
def _(q, k, v, offsets, longest, tree, places, scale, window, sinks, softcap):
    made = templates.attention.forward(q, k, v, offsets, longest, scale, window, softcap, tree=tree, places=places)
    return join_sinks(*made, sinks)


@branch_attention_backward.provider("triton", because="reads prefixes in place, and once", refuses=refuse_branches)
def _(grad, q, k, v, offsets, longest, tree, places, scale, window, sinks, softcap, out0, out1):
    rest = (out1, sums_of_gradients(grad, out0), offsets, longest, scale, window, softcap)
    made = templates.attention.backward(grad, q, k, v, *rest, tree=tree, places=places)
    return [*made, sinks_gradient(grad, out0, out1, sinks)]
