"""The gated delta rule (arXiv:2412.06464) in chunks of 64 tokens, backward.

The forward's ``prepare`` and ``scan`` run again. Then ``pending`` computes the part of the gradients of new values that
comes from outputs, ``scan`` iterates over chunks from the last to the first with the gradient of a state in registers,
and ``gradients`` computes the gradients within all chunks at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..._launch import launch, next_power_of_2
from .chunks import documents_at, pairs_of, prepare, row_of
from .forward_pass import scan as scan_forward
from .gradients import Operands, operands, products

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
    chunk, head = tl.program_id(0), tl.program_id(1)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    row = chunk // NT
    first = chunk % NT * C
    i, key = tl.arange(0, C), tl.arange(0, KEYS)
    token = first + i
    there, wide = token < T, column < V
    mine, _ = documents_at(documents, token, first, T, HAS_DOCUMENTS)
    decay = tl.load(total + ((row * H + head) * NT).to(tl.int64) * C + token)
    queries = row_of(q, row, head // GROUP, token, qs0, qs1, qs2)
    keys = row_of(k, row, head // GROUP, token, ks0, ks1, ks2)
    scores = tl.zeros((C, C), dtype=tl.float32)
    for begin in range(0, K, KEYS):
        inside = (begin + key < K)[None, :] & there[:, None]
        a = tl.load(queries[:, None] + begin + key[None, :], mask=inside, other=0.0)
        b = tl.load(keys[:, None] + begin + key[None, :], mask=inside, other=0.0)
        scores += tl.dot(a, tl.trans(b))
    scores = SCALE * scores * pairs_of(decay, mine, i, False)
    mask = there[:, None] & wide[None, :]
    given = tl.load(row_of(grad, row, head, token, gs0, gs1, gs2)[:, None] + column[None, :], mask=mask, other=0.0)
    made = tl.dot(tl.trans(scores).to(given.dtype), given)
    place = (row.to(tl.int64) * T + token) * H + head
    tl.store(out + place[:, None] * V + column[None, :], made.to(out.dtype.element_ty), mask=mask)


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
    wide = column < V
    square = (key < K)[:, None] & wide[None, :]
    state = tl.zeros((KEYS, BLOCK), dtype=tl.float32)
    if end == T:
        at = (row.to(tl.int64) * H + head) * K
        state = tl.load(grad_final + (at + key[:, None]) * V + column[None, :], mask=square, other=0.0).to(tl.float32)
    begin, behind = start // C, tl.cdiv(end, C)
    if start >= end:  # an empty document has no state, even inside a chunk
        behind = begin
    for step in range(begin, behind):
        chunk = begin + behind - 1 - step
        token = chunk * C + i
        own = (token >= start) & (token < end)
        place = (row.to(tl.int64) * T + token) * H + head
        at = ((row * NT + chunk).to(tl.int64) * H + head) * K
        kept = state.to(k.dtype.element_ty)
        if end >= tl.minimum(T, chunk * C + C):  # the document continues after the chunk, or ends with it
            tl.store(states + (at + key[:, None]) * V + column[None, :], kept, mask=square)
        narrow, broad = own[:, None] & (key < K)[None, :], own[:, None] & wide[None, :]
        sums = total + ((row * H + head) * NT + chunk).to(tl.int64) * C
        decay, last = tl.load(sums + i), tl.load(sums + C - 1)
        block = tl.load(
            row_of(k, row, head // GROUP, token, ks0, ks1, ks2)[:, None] + key[None, :], mask=narrow, other=0.0
        )
        value = tl.load(pending + place[:, None] * V + column[None, :], mask=broad, other=0.0).to(tl.float32)
        value += tl.where(own, tl.exp(tl.where(own, last - decay, 0.0)), 0.0)[:, None] * tl.dot(block, kept)
        value = value.to(written.dtype.element_ty)
        tl.store(written + place[:, None] * V + column[None, :], value, mask=broad)
        given = tl.load(row_of(grad, row, head, token, gs0, gs1, gs2)[:, None] + column[None, :], mask=broad, other=0.0)
        given = (tl.exp(decay) * SCALE)[:, None] * given.to(tl.float32)
        block = tl.load(
            row_of(q, row, head // GROUP, token, qs0, qs1, qs2)[:, None] + key[None, :], mask=narrow, other=0.0
        )
        state = state * tl.exp(last) + tl.dot(tl.trans(block), given.to(block.dtype))
        if DELTA:
            block = tl.load(w + place[:, None] * K + key[None, :], mask=narrow, other=0.0)
            state -= tl.dot(tl.trans(block), value.to(block.dtype))


def pending(call, total):
    """The part of the gradients of new values that comes from outputs.

    Args:
        call: the backward's operands.
        total: running sums of log decays, from `prepare`.

    Returns:
        [B, T, H, V].
    """
    width = call.v.shape[3]
    out, (tile, options) = call.empty([width]), call.options("delta_pending")
    grid = (call.shape[0] * call.count, call.shape[2], triton.cdiv(width, tile.block))
    tensors = (call.grad, call.q, call.k, total, call.documents, out)
    launch(pending_kernel, grid, *tensors, call.tokens, call.count, *call.strides, **options)
    return out


def scan(call, chunks, waiting, grad_final):
    """Compute the recurrence of gradients, from the last chunk to the first.

    Args:
        call: the backward's operands.
        chunks: from `prepare`.
        waiting: from `pending`.
        grad_final: [B, H, K, V], of the final state, contiguous.

    Returns:
        (gradients of new values, [B, T, H, V]; of the final state of each chunk, [B, chunks * H * K, V]).
    """
    keys, width = call.q.shape[3], call.v.shape[3]
    written, (tile, options) = torch.empty_like(waiting), call.options("delta_scan")
    shape = (call.shape[0], call.count * call.shape[2] * keys, width)
    states = torch.empty(shape, dtype=waiting.dtype, device=waiting.device)
    options["KEYS"] = max(next_power_of_2(keys), tile.block)
    documents = call.shape[0] if call.offsets is None else call.offsets.shape[0]
    grid = (documents, call.shape[2], triton.cdiv(width, tile.block))
    tensors = (call.grad, grad_final, call.q, call.k, chunks.w, waiting, chunks.total, call.offsets, written, states)
    sizes = (call.tokens, call.count, documents)
    launch(scan_kernel, grid, *tensors, *sizes, *call.strides, DELTA=chunks.w is not None, **options)
    return written, states


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
    chunks = prepare(k, v, g, beta, documents, delta)
    states = scan_forward(chunks, k, v, offsets)
    call = Operands(grad, q, k, v, beta, offsets, documents, scale)
    grad_written, grad_states = scan(call, chunks, pending(call, chunks.total), grad_final)
    by_score, by_system, missing, dv, dtotal, dbeta = products(call, chunks, states.written, grad_written)
    dq, dk, dg = operands(call, chunks, states, grad_states, by_score, by_system, missing, dtotal, dbeta)
    return [dq, dk, dv, dg, dbeta]
