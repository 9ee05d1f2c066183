"""The gated delta rule (arXiv:2412.06464) in chunks of 64 tokens, backward.

The forward's ``prepare`` and ``scan`` run again. Then ``pending`` computes the part of the gradients of new values that
comes from outputs, ``scan`` iterates over chunks from the last to the first with the gradient of a state in registers,
and ``gradients`` computes the gradients within all chunks at once.
"""

from __future__ import annotations

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
    state_at,
    store_block,
)
from ..operands import Operands
from .chunks import prepare
from .forward_pass import scan as scan_forward
from .gradients import operands, products

__all__ = ["backward", "pending", "scan"]


@triton.jit
def pending_kernel(
    grad,
    q,
    k,
    total,
    documents,
    out,
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
):
    """Program: BLOCK columns of one head's, for a chunk."""
    row, head, first, token = chunk_of_program(NT, C)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    i, key, there = tl.arange(0, C), tl.arange(0, KEYS), token < T
    mine, _ = documents_at(documents, token, first, T, HAS_DOCUMENTS)
    decay = tl.load(total + ((row * H + head) * NT).to(tl.int64) * C + token)
    queries = row_of(q, row, head // GROUP, token, qs0, qs1, qs2)
    keys = row_of(k, row, head // GROUP, token, ks0, ks1, ks2)
    scores, _ = products_of(queries, keys, key, there, K, C, KEYS, False)
    scores = SCALE * scores * pairs_of(decay, mine, i, False)
    given = load_block(row_of(grad, row, head, token, gs0, gs1, gs2), 0, column, there, V)
    made = tl.dot(tl.trans(scores).to(given.dtype), given)
    place = place_of(row, token, head, T, H)
    store_block(out + place[:, None] * V, 0, column, there, V, made)


@triton.jit
def scan_kernel(
    grad,
    grad_final,
    q,
    k,
    w,
    pending,
    total,
    offsets,
    written,
    states,
    T,
    NT,
    COUNT,
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
    """Program: BLOCK columns of the gradients `states` of one head, over one document; `written` is a gradient, too."""
    head, column = tl.program_id(1), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    row, start, end = tl.program_id(0), 0, T
    if HAS_DOCUMENTS:
        row = 0
        start = tl.load(offsets + tl.program_id(0)).to(tl.int32)
        if tl.program_id(0) + 1 < COUNT:
            end = tl.load(offsets + tl.program_id(0) + 1).to(tl.int32)
    i, key = tl.arange(0, C), tl.arange(0, KEYS)
    square = (key < K)[:, None] & (column < V)[None, :]
    state = tl.zeros((KEYS, BLOCK), dtype=tl.float32)
    if end == T:
        at = state_at(grad_final, row, head, 0, key, column, H, K, V)
        state = tl.load(at, mask=square, other=0.0).to(tl.float32)
    begin, behind = start // C, tl.cdiv(end, C)
    if start >= end:  # an empty document has no state, even inside a chunk
        behind = begin
    for step in range(begin, behind):
        chunk = begin + behind - 1 - step
        token = chunk * C + i
        own = (token >= start) & (token < end)
        place = place_of(row, token, head, T, H)
        kept = state.to(k.dtype.element_ty)
        if end >= tl.minimum(T, chunk * C + C):  # the document continues after the chunk, or ends with it
            tl.store(state_at(states, row * NT + chunk, head, 0, key, column, H, K, V), kept, mask=square)
        narrow, broad = own[:, None] & (key < K)[None, :], own[:, None] & (column < V)[None, :]
        sums = total + ((row * H + head) * NT + chunk).to(tl.int64) * C
        decay, last = tl.load(sums + i), tl.load(sums + C - 1)
        keys = row_of(k, row, head // GROUP, token, ks0, ks1, ks2)
        block = tl.load(keys + key[None, :], mask=narrow, other=0.0)
        value = tl.load(pending + place[:, None] * V + column[None, :], mask=broad, other=0.0).to(tl.float32)
        value += exp_where(own, last - decay)[:, None] * tl.dot(block, kept)
        value = value.to(written.dtype.element_ty)
        tl.store(written + place[:, None] * V + column[None, :], value, mask=broad)
        given = tl.load(row_of(grad, row, head, token, gs0, gs1, gs2) + column[None, :], mask=broad, other=0.0)
        given = (tl.exp(decay) * SCALE)[:, None] * given.to(tl.float32)
        queries = row_of(q, row, head // GROUP, token, qs0, qs1, qs2)
        block = tl.load(queries + key[None, :], mask=narrow, other=0.0)
        state = state * tl.exp(last) + tl.dot(tl.trans(block), given.to(block.dtype))
        if DELTA:
            block = tl.load(w + place[:, None] * K + key[None, :], mask=narrow, other=0.0)
            state -= tl.dot(tl.trans(block), value.to(block.dtype))


def pending(call, total):
    """The part of the gradients of new values that comes from outputs.

    Args:
        call: `Operands`.
        total: running sums of log decays, from `prepare`.

    Returns:
        [B, T, H, V].
    """
    out = call.of_tokens(call.width)
    tensors = (call.grad, call.q, call.k, total, call.documents, out)
    strides = (*call.grad_strides, *call.q_strides, *call.k_strides)
    call.each_chunk(pending_kernel, "delta_pending", tensors, *strides, columns=call.width)
    return out


def scan(call, chunks, waiting, grad_final):
    """Compute the recurrence of gradients, from the last chunk to the first.

    Args:
        call: `Operands`.
        chunks: from `prepare`.
        waiting: from `pending`.
        grad_final: [B, H, K, V], of the final state, contiguous.

    Returns:
        (gradients of new values, [B, T, H, V]; of the final state of each chunk, [B, chunks * H * K, V]).
    """
    made = call.of_tokens(call.width), call.of_chunks()
    tensors = (call.grad, grad_final, call.q, call.k, chunks.w, waiting, chunks.total, call.offsets, *made)
    integers = (call.sequences, *call.grad_strides, *call.q_strides, *call.k_strides)
    call.along_chunks(scan_kernel, "delta_scan", tensors, *integers)
    return made


def backward(grad, grad_final, q, k, v, g, beta, offsets=None, documents=None, *, scale, delta=True):
    """The gradients of `forward`.

    Args:
        grad: of o, [B, T, H, V] in its dtype.
        grad_final: of the final state, [B, H, K, V], any floating dtype, contiguous.
        q, k, v, g, beta, offsets, documents, scale, delta: as given to `forward`.

    Returns:
        [dq, dk, dv, dg, dbeta]: dq and dk [B, T, H, K], not yet summed over heads that share q and k; dg and dbeta in
        fp32.
    """
    call = Operands(q, k, v, g, beta, offsets, documents, scale, delta, grad)
    chunks = prepare(call)
    states = scan_forward(call, chunks)
    grad_written, grad_states = scan(call, chunks, pending(call, chunks.total), grad_final)
    squares, missing, dv, dtotal, dbeta = products(call, chunks, states.written, grad_written)
    dq, dk, dg = operands(call, chunks, states, grad_states, squares, missing, dtotal, dbeta)
    return [dq, dk, dv, dg, dbeta]
