"""Gradients inside chunks of the gated delta rule (arXiv:2412.06464): the last two steps of ``backward_pass``.

Both process all chunks at once: ``products`` the square matrices of a chunk, ``operands`` its rows. A single kernel
would need more registers than there are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ... import _tiles
from ..._launch import launch
from .chunks import CHUNK, chunks_of, documents_at, pairs_of, row_of, rows

__all__ = ["Operands", "operands", "products"]


@triton.jit
def products_kernel(
    grad,
    q,
    k,
    v,
    beta,
    total,
    documents,
    inverse,
    written,
    grad_written,
    by_score,
    by_system,
    missing,
    dv,
    dtotal,
    dbeta,
    T,
    NT,
    gs0,
    gs1,
    gs2,
    qs0,
    qs1,
    qs2,
    ks0,
    ks1,
    ks2,
    vs0,
    vs1,
    vs2,
    SCALE: tl.constexpr,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    DELTA: tl.constexpr,
):
    """Program: a chunk of one head. `dtotal` and `dbeta` are the parts from square matrices, in fp32.

    inverse, by_system, missing: None without the delta.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    row = chunk // NT
    first = chunk % NT * C
    i, key, column = tl.arange(0, C), tl.arange(0, KEYS), tl.arange(0, BLOCK)
    token = first + i
    there = token < T
    mine, _ = documents_at(documents, token, first, T, HAS_DOCUMENTS)
    place = (row.to(tl.int64) * T + token) * H + head
    decay = tl.load(total + ((row * H + head) * NT).to(tl.int64) * C + token)
    rate = tl.load(beta + place, mask=there, other=0.0).to(tl.float32)
    square = there[:, None] & (i < C)[None, :]
    if DELTA:
        solved = tl.load(inverse + place[:, None] * C + i[None, :], mask=square, other=0.0)
    outputs = row_of(grad, row, head, token, gs0, gs1, gs2)
    values = row_of(v, row, head, token, vs0, vs1, vs2)
    scores = tl.zeros((C, C), dtype=tl.float32)
    system = tl.zeros((C, C), dtype=tl.float32)
    to_rate = tl.zeros((C,), dtype=tl.float32)
    for begin in range(0, V, BLOCK):
        inside = there[:, None] & (begin + column < V)[None, :]
        where = place[:, None] * V + begin + column[None, :]
        value = tl.load(written + where, mask=inside, other=0.0)
        given = tl.load(outputs[:, None] + begin + column[None, :], mask=inside, other=0.0)
        scores += tl.dot(given, tl.trans(value))
        lost = tl.load(grad_written + where, mask=inside, other=0.0)
        if DELTA:
            lost = tl.dot(tl.trans(solved), lost)
            system -= tl.dot(lost.to(value.dtype), tl.trans(value))
            tl.store(missing + where, lost.to(missing.dtype.element_ty), mask=inside)
        lost = lost.to(tl.float32)
        tl.store(dv + where, (rate[:, None] * lost).to(dv.dtype.element_ty), mask=inside)
        block = tl.load(values[:, None] + begin + column[None, :], mask=inside, other=0.0)
        to_rate += tl.sum(lost * block.to(tl.float32), 1)
    queries = row_of(q, row, head // GROUP, token, qs0, qs1, qs2)
    keys = row_of(k, row, head // GROUP, token, ks0, ks1, ks2)
    against = tl.zeros((C, C), dtype=tl.float32)
    among = tl.zeros((C, C), dtype=tl.float32)
    for begin in range(0, K, KEYS):
        inside = there[:, None] & (begin + key < K)[None, :]
        a = tl.load(queries[:, None] + begin + key[None, :], mask=inside, other=0.0)
        b = tl.load(keys[:, None] + begin + key[None, :], mask=inside, other=0.0)
        against += tl.dot(a, tl.trans(b))
        if DELTA:
            among += tl.dot(b, tl.trans(b))
    scores = SCALE * scores * pairs_of(decay, mine, i, False)
    pairs = scores * against
    if DELTA:
        system = system * pairs_of(decay, mine, i, True)
        to_rate += tl.sum(system * among, 1)
        system = system * rate[:, None]
        pairs += system * among
        tl.store(by_system + place[:, None] * C + i[None, :], system.to(by_system.dtype.element_ty), mask=square)
    # in the sum over rows minus the sum over columns, the diagonal cancels
    tl.store(dtotal + place, tl.sum(pairs, 1) - tl.sum(pairs, 0), mask=there)
    tl.store(dbeta + place, to_rate, mask=there)
    tl.store(by_score + place[:, None] * C + i[None, :], scores.to(by_score.dtype.element_ty), mask=square)


@triton.jit
def operands_kernel(
    grad,
    q,
    k,
    beta,
    total,
    documents,
    written,
    states,
    grad_states,
    by_score,
    by_system,
    missing,
    dq,
    dk,
    dtotal,
    dg,
    dbeta,
    T,
    NT,
    gs0,
    gs1,
    gs2,
    qs0,
    qs1,
    qs2,
    ks0,
    ks1,
    ks2,
    SCALE: tl.constexpr,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    DELTA: tl.constexpr,
):
    """Program: a chunk of one head. It adds to `dbeta`, and sums `dtotal` to `dg`."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    row = chunk // NT
    first = chunk % NT * C
    i, key, column = tl.arange(0, C), tl.arange(0, KEYS), tl.arange(0, BLOCK)
    token = first + i
    there = token < T
    mine, before = documents_at(documents, token, first, T, HAS_DOCUMENTS)
    place = (row.to(tl.int64) * T + token) * H + head
    sums = total + ((row * H + head) * NT).to(tl.int64) * C + first
    decay, last = tl.load(sums + i), tl.load(sums + C - 1)
    rate = tl.load(beta + place, mask=there, other=0.0).to(tl.float32)
    entering, leaving, through = tl.exp(decay), tl.exp(last - decay), tl.exp(last)
    if HAS_DOCUMENTS:
        behind = tl.load(documents + tl.minimum(first + C, T) - 1)
        entering = tl.where(mine == before, entering, 0.0)
        leaving = tl.where(mine == behind, tl.exp(tl.where(mine == behind, last - decay, 0.0)), 0.0)
        through = tl.where(behind == before, through, 0.0)
    outputs = row_of(grad, row, head, token, gs0, gs1, gs2)
    queries = row_of(q, row, head // GROUP, token, qs0, qs1, qs2)
    keys = row_of(k, row, head // GROUP, token, ks0, ks1, ks2)
    square = there[:, None] & (i < C)[None, :]
    scores = tl.load(by_score + place[:, None] * C + i[None, :], mask=square, other=0.0)
    if DELTA:
        system = tl.load(by_system + place[:, None] * C + i[None, :], mask=square, other=0.0)
    at = (chunk.to(tl.int64) * H + head) * K
    to_total = tl.load(dtotal + place, mask=there, other=0.0)
    to_rate = tl.load(dbeta + place, mask=there, other=0.0)
    to_last = 0.0
    for begin in range(0, K, KEYS):
        to_q = tl.zeros((C, KEYS), dtype=tl.float32)
        to_k = tl.zeros((C, KEYS), dtype=tl.float32)
        to_end = tl.zeros((C, KEYS), dtype=tl.float32)
        for start in range(0, V, BLOCK):
            inside = there[:, None] & (start + column < V)[None, :]
            where = place[:, None] * V + start + column[None, :]
            both = (start + column < V)[:, None] & (begin + key < K)[None, :]
            cell = (at + begin + key[None, :]) * V + start + column[:, None]
            state = tl.load(states + cell, mask=both, other=0.0)
            ahead = tl.load(grad_states + cell, mask=both, other=0.0)
            to_last += through * tl.sum(state.to(tl.float32) * ahead.to(tl.float32))
            to_q += tl.dot(tl.load(outputs[:, None] + start + column[None, :], mask=inside, other=0.0), state)
            if DELTA:
                to_k += tl.dot(tl.load(missing + where, mask=inside, other=0.0), state)
            to_end += tl.dot(tl.load(written + where, mask=inside, other=0.0), ahead)
        inside = there[:, None] & (begin + key < K)[None, :]
        a = tl.load(queries[:, None] + begin + key[None, :], mask=inside, other=0.0)
        b = tl.load(keys[:, None] + begin + key[None, :], mask=inside, other=0.0)
        to_q = SCALE * entering[:, None] * to_q
        to_k = entering[:, None] * to_k
        to_end = leaving[:, None] * to_end
        wide_k = b.to(tl.float32)
        seen, left = tl.sum(to_k * wide_k, 1), tl.sum(to_end * wide_k, 1)
        to_rate -= seen
        to_total += tl.sum(to_q * a.to(tl.float32), 1) - rate * seen - left
        to_last += tl.sum(left, 0)
        to_q += tl.dot(scores, b)
        to_k = to_end - rate[:, None] * to_k
        to_k += tl.dot(tl.trans(scores), a)
        if DELTA:
            to_k += tl.dot(system, b) + tl.dot(tl.trans(system), b)
        where = place[:, None] * K + begin + key[None, :]
        tl.store(dq + where, to_q.to(dq.dtype.element_ty), mask=inside)
        tl.store(dk + where, to_k.to(dk.dtype.element_ty), mask=inside)
    tl.store(dbeta + place, to_rate, mask=there)
    tl.store(dg + place, tl.cumsum(tl.where(there, to_total, 0.0), 0, reverse=True) + to_last, mask=there)


class Operands:
    """The operands of a backward call, and values common to its kernels.

    Args:
        grad, q, k, v, beta, offsets, documents, scale: as given to `backward`.
    """

    def __init__(self, grad, q, k, v, beta, offsets, documents, scale):
        (self.grad, grads), (self.q, queries), (self.k, keys), (self.v, self.value_strides) = map(rows, (grad, q, k, v))
        self.beta, self.offsets, self.documents = beta, offsets, documents
        self.strides = (*grads, *queries, *keys)
        batch, self.tokens, heads, width = v.shape
        self.count, self.shape = chunks_of(self.tokens), (batch, self.tokens, heads)
        sizes = dict(H=heads, GROUP=heads // q.shape[2], K=q.shape[3], V=width, C=CHUNK)
        self.constants = dict(SCALE=float(scale), HAS_DOCUMENTS=documents is not None, **sizes)

    def empty(self, width, dtype=None):
        """An empty tensor with values for each token of each head."""
        return torch.empty(*self.shape, *width, dtype=dtype or self.v.dtype, device=self.v.device)

    def options(self, name):
        """A kernel's constants and its tile."""
        tile = _tiles.pick(name, self.v, self.v.shape[3])
        return tile, dict(
            self.constants, KEYS=tile.step, BLOCK=tile.block, num_warps=tile.num_warps, num_stages=tile.num_stages
        )


def products(call, chunks, written, grad_written):
    """Gradients of the square matrices of chunks.

    Args:
        call: the backward's operands.
        chunks, written: from `prepare` and the forward's `scan`.
        grad_written: from `delta_rule_backward.scan`.

    Returns:
        (by_score, by_system [B, T, H, 64], missing, dv [B, T, H, V], dtotal, dbeta [B, T, H] in fp32, unfinished);
        by_system and missing are None without the delta.
    """
    width = call.v.shape[3]
    delta = chunks.w is not None
    squares = call.empty([CHUNK]), call.empty([CHUNK]) if delta else None
    values = call.empty([width]) if delta else None, call.empty([width])
    sums = call.empty([], torch.float32), call.empty([], torch.float32)
    _, options = call.options("delta_products")
    given = (call.grad, call.q, call.k, call.v, call.beta, chunks.total, call.documents)
    tensors = (*given, chunks.inverse, written, grad_written, *squares, *values, *sums)
    strides = (*call.strides, *call.value_strides)
    grid = (call.shape[0] * call.count, call.shape[2])
    launch(products_kernel, grid, *tensors, call.tokens, call.count, *strides, DELTA=delta, **options)
    return (*squares, *values, *sums)


def operands(call, chunks, states, grad_states, by_score, by_system, missing, dtotal, dbeta):
    """Gradients of the rows of chunks; dbeta is completed in place.

    Args:
        call: the backward's operands.
        chunks, states: from `prepare` and the forward's `scan`.
        grad_states: from `delta_rule_backward.scan`.
        by_score, by_system, missing, dtotal, dbeta: from `products`.

    Returns:
        (dq, dk [B, T, H, K], not yet summed over heads that share q and k; dg [B, T, H] in fp32).
    """
    keys = call.q.shape[3]
    dq, dk, dg = call.empty([keys]), call.empty([keys]), call.empty([], torch.float32)
    _, options = call.options("delta_operands")
    given = (
        call.grad,
        call.q,
        call.k,
        call.beta,
        chunks.total,
        call.documents,
        states.written,
        states.entering,
        grad_states,
    )
    tensors = (*given, by_score, by_system, missing, dq, dk, dtotal, dg, dbeta)
    grid = (call.shape[0] * call.count, call.shape[2])
    delta = chunks.w is not None
    launch(operands_kernel, grid, *tensors, call.tokens, call.count, *call.strides, DELTA=delta, **options)
    return dq, dk, dg
