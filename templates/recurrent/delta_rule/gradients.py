"""Gradients inside chunks of the gated delta rule (arXiv:2412.06464): the last two steps of ``backward_pass``.

Both process all chunks at once: ``products`` the square matrices of a chunk, ``operands`` its rows. A single kernel
would need more registers than there are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..device import (
    chunk_of_program,
    documents_at,
    exp_where,
    load_block,
    pairs_of,
    place_of,
    products_of,
    row_of,
    store_block,
)
from ..operands import CHUNK

__all__ = ["operands", "products"]


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
    row, head, first, token = chunk_of_program(NT, C)
    i, key, column, there = tl.arange(0, C), tl.arange(0, KEYS), tl.arange(0, BLOCK), token < T
    mine, _ = documents_at(documents, token, first, T, HAS_DOCUMENTS)
    place = place_of(row, token, head, T, H)
    decay = tl.load(total + ((row * H + head) * NT).to(tl.int64) * C + token)
    rate = tl.load(beta + place, mask=there, other=0.0).to(tl.float32)
    if DELTA:
        solved = load_block(inverse + place[:, None] * C, 0, i, there, C)
    outputs = row_of(grad, row, head, token, gs0, gs1, gs2)
    values = row_of(v, row, head, token, vs0, vs1, vs2)
    scores = tl.zeros((C, C), dtype=tl.float32)
    system = tl.zeros((C, C), dtype=tl.float32)
    to_rate = tl.zeros((C,), dtype=tl.float32)
    for begin in range(0, V, BLOCK):
        inside = there[:, None] & (begin + column < V)[None, :]
        where = place[:, None] * V + begin + column[None, :]
        value = tl.load(written + where, mask=inside, other=0.0)
        given = load_block(outputs, begin, column, there, V)
        scores += tl.dot(given, tl.trans(value))
        lost = tl.load(grad_written + where, mask=inside, other=0.0)
        if DELTA:
            lost = tl.dot(tl.trans(solved), lost)
            system -= tl.dot(lost.to(value.dtype), tl.trans(value))
            tl.store(missing + where, lost.to(missing.dtype.element_ty), mask=inside)
        lost = lost.to(tl.float32)
        tl.store(dv + where, (rate[:, None] * lost).to(dv.dtype.element_ty), mask=inside)
        to_rate += tl.sum(lost * load_block(values, begin, column, there, V).to(tl.float32), 1)
    queries = row_of(q, row, head // GROUP, token, qs0, qs1, qs2)
    keys = row_of(k, row, head // GROUP, token, ks0, ks1, ks2)
    against, among = products_of(queries, keys, key, there, K, C, KEYS, DELTA)
    scores = SCALE * scores * pairs_of(decay, mine, i, False)
    pairs = scores * against
    if DELTA:
        system = system * pairs_of(decay, mine, i, True)
        to_rate += tl.sum(system * among, 1)
        system = system * rate[:, None]
        pairs += system * among
        store_block(by_system + place[:, None] * C, 0, i, there, C, system)
    # in the sum over rows minus the sum over columns, the diagonal cancels
    tl.store(dtotal + place, tl.sum(pairs, 1) - tl.sum(pairs, 0), mask=there)
    tl.store(dbeta + place, to_rate, mask=there)
    store_block(by_score + place[:, None] * C, 0, i, there, C, scores)


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
    row, head, first, token = chunk_of_program(NT, C)
    i, key, column, there = tl.arange(0, C), tl.arange(0, KEYS), tl.arange(0, BLOCK), token < T
    mine, before = documents_at(documents, token, first, T, HAS_DOCUMENTS)
    place = place_of(row, token, head, T, H)
    sums = total + ((row * H + head) * NT).to(tl.int64) * C + first
    decay, last = tl.load(sums + i), tl.load(sums + C - 1)
    rate = tl.load(beta + place, mask=there, other=0.0).to(tl.float32)
    entering, leaving, through = tl.exp(decay), tl.exp(last - decay), tl.exp(last)
    if HAS_DOCUMENTS:
        behind = tl.load(documents + tl.minimum(first + C, T) - 1)
        entering = tl.where(mine == before, entering, 0.0)
        leaving = exp_where(mine == behind, last - decay)
        through = tl.where(behind == before, through, 0.0)
    outputs = row_of(grad, row, head, token, gs0, gs1, gs2)
    queries = row_of(q, row, head // GROUP, token, qs0, qs1, qs2)
    keys = row_of(k, row, head // GROUP, token, ks0, ks1, ks2)
    scores = load_block(by_score + place[:, None] * C, 0, i, there, C)
    if DELTA:
        system = load_block(by_system + place[:, None] * C, 0, i, there, C)
    at = (tl.program_id(0).to(tl.int64) * H + head) * K
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
            to_q += tl.dot(load_block(outputs, start, column, there, V), state)
            if DELTA:
                to_k += tl.dot(tl.load(missing + where, mask=inside, other=0.0), state)
            to_end += tl.dot(tl.load(written + where, mask=inside, other=0.0), ahead)
        a = load_block(queries, begin, key, there, K)
        b = load_block(keys, begin, key, there, K)
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
        where, inside = place[:, None] * K + begin + key[None, :], there[:, None] & (begin + key < K)[None, :]
        tl.store(dq + where, to_q.to(dq.dtype.element_ty), mask=inside)
        tl.store(dk + where, to_k.to(dk.dtype.element_ty), mask=inside)
    tl.store(dbeta + place, to_rate, mask=there)
    tl.store(dg + place, tl.cumsum(tl.where(there, to_total, 0.0), 0, reverse=True) + to_last, mask=there)


def products(call, chunks, written, grad_written):
    """Gradients of the square matrices of chunks.

    Args:
        call: `Operands`.
        chunks, written: from `prepare` and the forward's `scan`.
        grad_written: from ``backward_pass.scan``.

    Returns:
        ((by_score, by_system), [B, T, H, 64]; missing, dv [B, T, H, V]; dtotal, dbeta [B, T, H] in fp32, unfinished).
        by_system and missing are None without the delta.
    """
    squares = call.of_tokens(CHUNK), call.of_tokens(CHUNK) if call.delta else None
    values = call.of_tokens(call.width) if call.delta else None, call.of_tokens(call.width)
    sums = call.of_tokens(dtype=torch.float32), call.of_tokens(dtype=torch.float32)
    given = (call.grad, call.q, call.k, call.v, call.beta, chunks.total, call.documents)
    tensors = (*given, chunks.inverse, written, grad_written, *squares, *values, *sums)
    strides = (*call.grad_strides, *call.q_strides, *call.k_strides, *call.v_strides)
    call.each_chunk(products_kernel, "delta_products", tensors, *strides)
    return squares, *values, *sums


def operands(call, chunks, states, grad_states, squares, missing, dtotal, dbeta):
    """Gradients of the rows of chunks; dbeta is completed in place.

    Args:
        call: `Operands`.
        chunks, states: from `prepare` and the forward's `scan`.
        grad_states: from ``backward_pass.scan``.
        squares, missing, dtotal, dbeta: from `products`.

    Returns:
        (dq, dk [B, T, H, K], not yet summed over heads that share q and k; dg [B, T, H] in fp32).
    """
    dq, dk = call.of_tokens(call.keys), call.of_tokens(call.keys)
    dg = call.of_tokens(dtype=torch.float32)
    given = (call.grad, call.q, call.k, call.beta, chunks.total, call.documents)
    given = (*given, states.written, states.entering, grad_states, *squares, missing)
    tensors = (*given, dq, dk, dtotal, dg, dbeta)
    call.each_chunk(operands_kernel, "delta_operands", tensors, *call.grad_strides, *call.q_strides, *call.k_strides)
    return dq, dk, dg
