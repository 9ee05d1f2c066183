"""Causal attention of heads that are too wide for vendors' fused kernels, in blocks of queries.

A block's scores are in memory while it is worked on, in fp32, and no longer: memory rises with a row's length, not with
its square. That is more traffic than scores in registers cost (FlashAttention, arXiv:2205.14135), and torch's products
make up for it where heads fill the registers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor

from tunecompile import templates
from tunecompile._torch.card import AMPERE, older_than
from tunecompile._torch.fake_tensors import size_hint
from tunecompile.ir.op import Cost, op, refuse_gpu, refuse_spills
from tunecompile.notes import Note, note
from tunecompile.ops.attention.documents import refuse_attention

SCORES = 32 << 20  #: that are in memory at a time
QUERIES = 1024  #: of a block: its last keys are half masked, and each block adds to the gradients of all keys before it
ROWS = 256  #: of a product, below which it does not pay to have fewer scores in memory


def _shapes(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return _new(q), q.new_empty(q.shape[:3], dtype=wide)


def _backward_shapes(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> list[Tensor]:
    return [_new(q), _new(k), _new(v)]


def _new(x: Tensor) -> Tensor:
    """An empty tensor [B, H, T, D] as this, its heads next to each other in memory, as projections read them."""
    rows, heads, length, width = x.shape
    return x.new_empty(rows, length, heads, width).transpose(1, 2)


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """[B, H, T, T] in the dtype of the arithmetic, minus infinity where a query does not see a key."""
    place = torch.arange(q.shape[2], device=q.device)
    return (_wide(q) @ _of_each(k, q).mT * scale).masked_fill(place[:, None] < place, float("-inf"))


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _of_each(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values for each head of q, in the dtype of the arithmetic."""
    return _wide(x).repeat_interleave(q.shape[1] // x.shape[1], 1)


def _narrow(x: Tensor, like: Tensor) -> Tensor:
    """[B, H, T, D], laid out as `_new`; heads that share a key are summed."""
    shared = x.shape[1] // like.shape[1]
    summed = x if shared == 1 else x.unflatten(1, (-1, shared)).sum(2)
    return summed.to(like.dtype).transpose(1, 2).contiguous().transpose(1, 2)


def _example(draw) -> list:
    """Two rows, and two heads that share a key."""
    return [*(draw.normal(2, 70, heads, 64).transpose(1, 2) for heads in (2, 1, 1)), 0.125]


@op(cost=Cost.MATMUL, shapes=_shapes, example=_example)
def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """softmax(scale q k^T) v, where each token attends to itself and earlier tokens of its row.

    Args:
        q: queries [B, H, T, D], any floating dtype. Arithmetic is in fp32, in fp64 for fp64.
        k: keys [B, K, T, D], where the number of heads K divides H: each is shared by H / K heads of q.
        v: values, [B, K, T, D].
        scale: of the scores, mostly 1 / sqrt(D).

    Returns:
        (out, logsumexp): out as q, the heads of a token next to each other in memory; the logsumexp of scores,
        [B, H, T] in the dtype of the arithmetic, which gets no gradient."""
    scores = _scores(q, k, scale)
    logsumexp = scores.logsumexp(-1)
    return _narrow((scores - logsumexp[..., None]).exp() @ _of_each(v, q), q), logsumexp


@causal_attention.backward(gives=("q", "k", "v"), shapes=_backward_shapes)
def causal_attention_backward(grad, q, k, v, scale, out0, out1) -> list[Tensor]:
    """Return the gradients of `causal_attention`; probabilities are recomputed from the logsumexp (arXiv:2205.14135).

    Args:
        grad: of out, [B, H, T, D] in its dtype.
        out0: out, as `causal_attention` returned it.
        out1: the logsumexp, [B, H, T]. The others are those of `causal_attention`.

    Returns:
        [dq, dk, dv], in shape, dtype and order in memory as out.
    """
    weights, grad = (_scores(q, k, scale) - out1[..., None]).exp(), _wide(grad)
    dweights = grad @ _of_each(v, q).mT
    dscores = weights * (dweights - (grad * _wide(out0)).sum(-1, keepdim=True)) * scale
    made = dscores @ _of_each(k, q), dscores.mT @ _wide(q), weights.mT @ grad
    return [_narrow(x, like) for x, like in zip(made, (q, k, v))]


@dataclass(frozen=True)
class Blocks:
    """How many rows, heads of keys and queries are worked on at a time."""

    rows: int
    heads: int
    queries: int

    @staticmethod
    def of(q: Tensor, k: Tensor) -> Blocks:
        """For queries [B, H, T, D] and keys [B, K, T, D]: as many queries as pay, and then rows and heads."""
        _, kinds, length = map(size_hint, k.shape[:3])
        shared, queries = size_hint(q.shape[1]) // kinds, min(length, QUERIES)
        while queries > 1 and shared * queries > ROWS and shared * queries * length > SCORES:
            queries = -(-queries // 2)
        room = max(1, SCORES // max(1, shared * queries * length))
        return Blocks(max(1, room // kinds), min(room, kinds), queries)

    def parts(self, k: Tensor) -> Iterator[tuple[slice, slice]]:
        """Rows and heads of keys, part by part."""
        for row in range(0, k.shape[0], self.rows):
            for head in range(0, k.shape[1], self.heads):
                yield slice(row, row + self.rows), slice(head, min(head + self.heads, k.shape[1]))

    def keys(self, k: Tensor) -> int:
        """How many are worked on at a time, of all rows and heads."""
        return min(self.rows, size_hint(k.shape[0])) * self.heads * size_hint(k.shape[2])

    def scores(self, q: Tensor, k: Tensor) -> int:
        """How many are in memory at a time."""
        return self.keys(k) * (size_hint(q.shape[1]) // size_hint(k.shape[1])) * self.queries


def _room(q: Tensor, k: Tensor, *_: Any) -> int:
    """Bytes beside the results of `causal_attention_in_blocks`: scores, their softmax, and what is copied for it."""
    blocks, wide = Blocks.of(q, k), q.element_size()
    return blocks.scores(q, k) * (4 + wide) + 3 * blocks.keys(k) * size_hint(k.shape[3]) * wide


def _backward_room(grad: Tensor, q: Tensor, k: Tensor, *_: Any) -> int:
    """The same of the backward, which sums the gradients of keys and values in fp32."""
    blocks = Blocks.of(q, k)
    return 2 * (blocks.scores(q, k) + blocks.keys(k) * size_hint(k.shape[3])) * (4 + q.element_size())


@op(cost=Cost.MATMUL, opaque=True, shapes=_shapes)
def causal_attention_in_blocks(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return what `causal_attention` does, on a GPU: as one call, since its steps depend on a row's length.

    Args:
        q, k, v, scale: those of `causal_attention`, in fp16 or bf16.

    Returns:
        (out, logsumexp), as `causal_attention`.
    """
    blocks, (out, logsumexp), shared, length = Blocks.of(q, k), _shapes(q, k, v), q.shape[1] // k.shape[1], q.shape[2]
    for rows, kinds in blocks.parts(k):
        heads = slice(kinds.start * shared, kinds.stop * shared)
        keys, values = (x[rows, kinds].flatten(0, 1) for x in (k, v))
        for first in range(0, length, blocks.queries):
            end = min(first + blocks.queries, length)
            where = rows, heads, slice(first, end)
            scores = _product(_together(q[where], shared), keys[:, :end].mT)
            weights, sums, level = templates.attention.causal_softmax.softmax(
                scores, first, end - first, scale, q.dtype
            )
            made = _product(weights, values[:, :end]).div_(sums[..., None])
            out[where] = made.view(out[where].shape)
            logsumexp[where] = level.view(logsumexp[where].shape)
    return out, logsumexp


@op(cost=Cost.MATMUL, opaque=True, shapes=_backward_shapes)
def causal_attention_in_blocks_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, out0: Tensor, out1: Tensor
) -> list[Tensor]:
    """Return what `causal_attention_backward` does, on a GPU.

    Args:
        grad, q, k, v, scale, out0, out1: those of `causal_attention_backward`, in fp16 or bf16 but for out1.

    Returns:
        As `causal_attention_backward`.
    """
    blocks, made, shared = Blocks.of(q, k), _backward_shapes(grad, q, k, v), q.shape[1] // k.shape[1]
    dq, *dkv = made
    for rows, kinds in blocks.parts(k):
        heads = slice(kinds.start * shared, kinds.stop * shared)
        keys, values = (x[rows, kinds].flatten(0, 1) for x in (k, v))
        summed: list[Tensor] = []
        for first in reversed(range(0, q.shape[2], blocks.queries)):  # the last one sees all keys
            end = min(first + blocks.queries, q.shape[2])
            where = rows, heads, slice(first, end)
            given = [_together(x[where], shared) for x in (q, grad, out0)]
            weights, dscores = _softmax_backward(*given, keys[:, :end], values[:, :end], scale, out1[where], first)
            dq[where] = torch.bmm(dscores, keys[:, :end]).view(dq[where].shape)
            parts = [_product(dscores.mT, given[0]), _product(weights.mT, given[1])]
            if summed:
                parts = [x[:, :end].add_(part) for x, part in zip(summed, parts)]
            summed = summed or parts
        for x, into in zip(summed, dkv):
            into[rows, kinds] = x.view(into[rows, kinds].shape)
    return made


def _softmax_backward(
    queries: Tensor, grad: Tensor, out: Tensor, keys: Tensor, values: Tensor, scale: float, sums: Tensor, first: int
) -> tuple[Tensor, Tensor]:
    """The softmax of one block and the gradient of its scores, [S, R, keys]."""
    scores, dweights = _product(queries, keys.mT), _product(grad, values.mT)
    delta, count = (grad.float() * out.float()).sum(-1).contiguous(), sums.shape[2]
    sums = sums.reshape(delta.shape).contiguous()
    return templates.attention.causal_softmax.softmax_backward(
        scores, dweights, sums, delta, first, count, scale, queries.dtype
    )


def _together(x: Tensor, shared: int) -> Tensor:
    """[B, H, Q, D] -> [B * K, H / K * Q, D]: the queries that read the same keys."""
    rows, heads, queries, width = x.shape
    return x.reshape(rows * (heads // shared), shared * queries, width)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """[S, R, D] times [S, D, C] in fp32; torch has no such product of two dtypes for CPUs."""
    if not left.is_cuda:
        return torch.bmm(left.float(), right.float())
    return torch.bmm(left, right, out_dtype=torch.float32)


_IN_BLOCKS = "heads fill the registers of fused kernels: the scores of a block of queries are in memory in between"


def _refuse_blocks(q: Tensor, k: Tensor, v: Tensor) -> Note | None:
    return refuse_attention(q, k, v, triton=True)


@causal_attention.provider("blocks", because=_IN_BLOCKS, refuses=_refuse_blocks)
def _(q, k, v, scale):
    return causal_attention_in_blocks(q, k, v, scale)


@causal_attention_backward.provider("blocks", because=_IN_BLOCKS, refuses=_refuse_blocks)
def _(grad, q, k, v, scale, out0, out1):
    return causal_attention_in_blocks_backward(grad, q, k, v, scale, out0, out1)


causal_attention.room = causal_attention_in_blocks.room = _room
causal_attention_backward.room = causal_attention_in_blocks_backward.room = _backward_room


@op(cost=Cost.MATMUL)
def one_query_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, sinks: Optional[Tensor], softcap: float
) -> Tensor:
    """softmax(scale q k^T) v over the keys that a mask shows, with one query a row: a step of a rollout.

    Args:
        q: [B, H, 1, D], any floating dtype.
        k: [B, K, L, D] in q's dtype, where the number of heads K divides H: each is shared by H / K heads of q.
        v: as k.
        mask: [B or 1, 1, 1, L]: bool, True where the query sees the key; or of any floating dtype, added to scores. A
            query that sees no key by the first kind gives 0, as torch's attention does.
        scale: of the scores, mostly 1 / sqrt(D).
        sinks: [H], one more score in the softmax of each head, which has no value; or None.
        softcap: c of c tanh(score / c), before the mask; 0 for none.

    Returns:
        [B, H, 1, D], in q's dtype. It has no backward.
    """
    together = q.unflatten(1, (k.shape[1], -1)).squeeze(3)
    scores = (_wide(together) @ _wide(k).mT) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        column = sinks.to(scores.dtype).view(k.shape[1], -1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    if mask.dtype == torch.bool:
        weights = weights.where(mask, 0.0)
    return (weights @ _wide(v)).to(q.dtype).flatten(1, 2).unsqueeze(2)


def _refuse_one_query(q: Tensor, k: Tensor, v: Tensor) -> Note | None:
    if reason := refuse_gpu(q, k, v) or refuse_spills(q):
        return reason
    if older_than(q.device, AMPERE):
        return note("gpu-before-ampere")
    wide = q.shape[-1] > 256 or k.shape[-1] != v.shape[-1]
    strided = any(x.stride(-1) != 1 for x in (q, k, v))
    return note("arguments-not-supported") if wide or strided else None


@one_query_attention.provider(
    "split_keys", because="programs share the keys of a row, and read each once", refuses=_refuse_one_query
)
def _(q, k, v, mask, scale, sinks, softcap):
    sinks = None if sinks is None else sinks.contiguous()
    return templates.attention.one_query.forward(q, k, v, mask, scale, sinks, softcap)
