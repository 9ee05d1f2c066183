"""Gradients inside chunks of the delta rule with decays of channels (arXiv:2510.26692): the end of ``backward_pass``.

Both process all chunks at once: ``products`` the square matrices of a chunk, ``operands`` its rows. A factor at a later
token times its gradient is added to the gradient of the running sum of decays there; one at an earlier token is taken
from it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..device import chunk_of_program, documents_at, edges_of, place_of
from ..operands import CHUNK
from .chunks import INSIDE, between_blocks, reference_of, sums_at

__all__ = ["operands", "products"]


@triton.jit
def products_kernel(
    grad,
    v,
    beta,
    documents,
    pairs,
    inverse,
    written,
    grad_written,
    by_score,
    by_system,
    missing,
    dv,
    dbeta,
    T,
    NT,
    SCALE: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
):
    """Program: a chunk of one head. `dbeta` is the part from square matrices and values, in fp32."""
    row, head, first, token = chunk_of_program(NT, C)
    i, column, there = tl.arange(0, C), tl.arange(0, BLOCK), token < T
    mine, _ = documents_at(documents, token, first, T, HAS_DOCUMENTS)
    place = place_of(row, token, head, T, H)
    rate = tl.load(beta + place, mask=there, other=0.0).to(tl.float32)
    square, rows = place[:, None] * C + i[None, :], there[:, None] & (i < C)[None, :]
    solved = tl.load(inverse + square, mask=rows, other=0.0)
    scores = tl.zeros((C, C), dtype=tl.float32)
    system = tl.zeros((C, C), dtype=tl.float32)
    to_rate = tl.zeros((C,), dtype=tl.float32)
    for begin in range(0, V, BLOCK):
        inside = there[:, None] & (begin + column < V)[None, :]
        where = place[:, None] * V + begin + column[None, :]
        value = tl.load(written + where, mask=inside, other=0.0)
        scores += tl.dot(tl.load(grad + where, mask=inside, other=0.0), tl.trans(value))
        lost = tl.dot(tl.trans(solved), tl.load(grad_written + where, mask=inside, other=0.0))
        tl.store(missing + where, lost.to(missing.dtype.element_ty), mask=inside)
        system -= tl.dot(lost.to(value.dtype), tl.trans(value))
        tl.store(dv + where, (rate[:, None] * lost).to(dv.dtype.element_ty), mask=inside)
        to_rate += tl.sum(lost * tl.load(v + where, mask=inside, other=0.0).to(tl.float32), 1)
    alike = mine[:, None] == mine[None, :]
    scores = tl.where(alike & (i[:, None] >= i[None, :]), SCALE * scores, 0.0)
    tl.store(by_score + square, scores.to(by_score.dtype.element_ty), mask=rows)
    system = tl.where(alike & (i[:, None] > i[None, :]), system, 0.0)
    to_rate += tl.sum(system * tl.load(pairs + square, mask=rows, other=0.0).to(tl.float32), 1)
    tl.store(by_system + square, (rate[:, None] * system).to(by_system.dtype.element_ty), mask=rows)
    tl.store(dbeta + place, to_rate, mask=there)


@triton.jit
def exact_dot(half, whole):
    """The product of a matrix in half precision with an fp32 one, which is split into two of half precision.

    dg is what remains of sums that nearly cancel: both tokens of a pair need the same value of its product.
    """
    first = whole.to(half.dtype)
    rest = (whole - first.to(tl.float32)).to(half.dtype)
    return tl.dot(half, first) + tl.dot(half, rest)


@triton.jit
def operands_kernel(
    grad,
    q,
    k,
    beta,
    documents,
    total,
    written,
    states,
    grad_states,
    by_score,
    by_system,
    missing,
    dq,
    dk,
    dg,
    dbeta,
    T,
    NT,
    SCALE: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
):
    """Program: a chunk of one head. It adds to `dbeta`."""
    row, head, first, token = chunk_of_program(NT, C)
    i, key, column, there = tl.arange(0, C), tl.arange(0, KEYS), tl.arange(0, BLOCK), token < T
    mine, before = documents_at(documents, token, first, T, HAS_DOCUMENTS)
    place = place_of(row, token, head, T, H)
    sums = sums_at(row, token, head, NT, H, C)
    begin_of = i // INSIDE * INSIDE
    rate = tl.load(beta + place, mask=there, other=0.0).to(tl.float32)
    enters, leaves, passes = edges_of(documents, mine, before, first, T, C, HAS_DOCUMENTS)
    rows = there[:, None] & (i < C)[None, :]
    square, turned, columns = (
        place[:, None] * C + i[None, :],
        place[None, :] * C + i[:, None],
        there[None, :] & (i < C)[:, None],
    )
    at = (tl.program_id(0).to(tl.int64) * H + head) * K
    to_rate = tl.load(dbeta + place, mask=there, other=0.0)
    for begin in range(0, K, KEYS):
        inside, known = there[:, None] & (begin + key < K)[None, :], (begin + key < K)[None, :] & (i < C)[:, None]
        where = place[:, None] * K + begin + key[None, :]
        decay = tl.load(total + sums[:, None] * K + begin + key[None, :], mask=known, other=0.0)
        last = reference_of(decay, i, C // INSIDE)
        to_q = tl.zeros((C, KEYS), dtype=tl.float32)
        to_later = tl.zeros((C, KEYS), dtype=tl.float32)  # of a key that reads: what the state, or an earlier key, held
        to_earlier = tl.zeros((C, KEYS), dtype=tl.float32)
        to_last = tl.zeros((KEYS,), dtype=tl.float32)
        for start in range(0, V, BLOCK):
            there_too = there[:, None] & (start + column < V)[None, :]
            place_v = place[:, None] * V + start + column[None, :]
            both = (start + column < V)[:, None] & (begin + key < K)[None, :]
            cell = (at + begin + key[None, :]) * V + start + column[:, None]
            state = tl.load(states + cell, mask=both, other=0.0)
            ahead = tl.load(grad_states + cell, mask=both, other=0.0)
            to_last += tl.sum(state.to(tl.float32) * ahead.to(tl.float32), 0)
            to_q += tl.dot(tl.load(grad + place_v, mask=there_too, other=0.0), state)
            to_later += tl.dot(tl.load(missing + place_v, mask=there_too, other=0.0), state)
            to_earlier += tl.dot(tl.load(written + place_v, mask=there_too, other=0.0), ahead)
        b = tl.load(k + where, mask=inside, other=0.0).to(tl.float32)
        entering = tl.where(enters, 1.0, 0.0)[:, None] * tl.exp(decay)
        to_q = SCALE * entering * to_q
        to_later = entering * to_later
        to_rate -= tl.sum(to_later * b, 1)
        to_later = -rate[:, None] * to_later
        to_earlier = tl.where(leaves, 1.0, 0.0)[:, None] * tl.exp(last[None, :] - decay) * to_earlier
        to_last = tl.where(passes, 1.0, 0.0) * tl.exp(last) * to_last + tl.sum(to_earlier * b, 0)
        for block in range(1, C // INSIDE):  # pairs of a block with all tokens before it
            down, up = between_blocks(decay, i, block)
            a = tl.load(q + where, mask=inside, other=0.0).to(tl.float32)  # again, for want of registers
            b = tl.load(k + where, mask=inside, other=0.0).to(tl.float32)
            other = b * up
            score = tl.load(by_score + square, mask=rows, other=0.0)
            system = tl.load(by_system + square, mask=rows, other=0.0)
            to_q += down * exact_dot(score, other)
            to_later += down * exact_dot(system, other)
            # read transposed: a matrix that is turned in registers gives wrong products on Hopper (see FLA_ON_HOPPER)
            made = exact_dot(tl.load(by_score + turned, mask=columns, other=0.0), a * down)
            made += exact_dot(tl.load(by_system + turned, mask=columns, other=0.0), b * down)
            to_earlier += up * made
        for step in range(0, INSIDE):  # pairs of a token with those of its block
            near = begin_of + step
            seen, known_too = (first + near < T)[:, None] & (begin + key < K)[None, :], known
            at_near = (row.to(tl.int64) * T + first + near) * H + head
            theirs_q = tl.load(q + at_near[:, None] * K + begin + key[None, :], mask=seen, other=0.0).to(tl.float32)
            theirs_k = tl.load(k + at_near[:, None] * K + begin + key[None, :], mask=seen, other=0.0).to(tl.float32)
            sums_near = (row.to(tl.int64) * NT * C + first + near) * H + head
            gap = decay - tl.load(total + sums_near[:, None] * K + begin + key[None, :], mask=known_too, other=0.0)
            # as the later token of the pair
            here = there & (i >= near)
            one = tl.load(by_score + place * C + near, mask=here, other=0.0).to(tl.float32)
            two = tl.load(by_system + place * C + near, mask=here, other=0.0).to(tl.float32)
            shared = theirs_k * tl.exp(tl.minimum(gap, 0.0))
            to_q += one[:, None] * shared
            to_later += two[:, None] * shared
            # as the earlier one
            here = (first + near < T) & (i <= near)
            one = tl.load(by_score + at_near * C + i, mask=here, other=0.0).to(tl.float32)
            two = tl.load(by_system + at_near * C + i, mask=here, other=0.0).to(tl.float32)
            to_earlier += (one[:, None] * theirs_q + two[:, None] * theirs_k) * tl.exp(tl.minimum(-gap, 0.0))
        tl.store(dq + where, to_q.to(dq.dtype.element_ty), mask=inside)
        tl.store(dk + where, (to_later + to_earlier).to(dk.dtype.element_ty), mask=inside)
        a = tl.load(q + where, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(k + where, mask=inside, other=0.0).to(tl.float32)
        to_total = tl.where(there[:, None], a * to_q + b * (to_later - to_earlier), 0.0)
        tl.store(dg + where, tl.cumsum(to_total, 0, reverse=True) + to_last[None, :], mask=inside)
    tl.store(dbeta + place, to_rate, mask=there)


def products(call, chunks, written, grad_written):
    """Gradients of the square matrices of chunks.

    Args:
        call: `Operands`.
        chunks, written: from `prepare` and `scan`.
        grad_written: from `scan_back`.

    Returns:
        ((by_score, by_system), [B, T, H, 64]; missing, dv [B, T, H, V]; dbeta [B, T, H] in fp32, unfinished).
    """
    squares = call.of_tokens(CHUNK), call.of_tokens(CHUNK)
    made = (*(call.of_tokens(call.width) for _ in range(2)), call.of_tokens(dtype=torch.float32))
    given = (call.grad, call.v, call.beta, call.documents, chunks.pairs, chunks.inverse, written, grad_written)
    call.each_chunk(products_kernel, "channel_products", (*given, *squares, *made))
    return squares, *made


def operands(call, chunks, states, grad_states, squares, missing, dbeta):
    """Gradients of the rows of chunks; dbeta is completed in place.

    Args:
        call: `Operands`.
        chunks, states: from `prepare` and `scan`.
        grad_states: from `scan_back`.
        squares, missing, dbeta: from `products`.

    Returns:
        (dq, dk [B, T, H, K]; dg [B, T, H, K] in fp32).
    """
    made = (*(call.of_tokens(call.keys) for _ in range(2)), call.of_tokens(call.keys, dtype=torch.float32))
    given = (call.grad, call.q, call.k, call.beta, call.documents, chunks.total)
    walked = (states.written, states.entering, grad_states)
    tensors = (*given, *walked, *squares, missing, *made, dbeta)
    call.each_chunk(operands_kernel, "channel_operands", tensors)
    return made
