"""The gated delta rule (arXiv:2412.06464) in chunks of 64 tokens, forward; ``backward_pass`` goes the other way.

The names are those of ``tunecompile.ops.recurrent.delta_chunks``. ``prepare`` computes the values within chunks, for
all chunks at once. ``scan`` iterates over chunks with a state in registers, in a program for each document, head and
block of columns. ``outputs`` reads the states.
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
    row_of,
    state_at,
    store_block,
)
from ..operands import Operands
from .chunks import prepare

__all__ = ["forward", "outputs", "scan"]


@triton.jit
def scan_kernel(
    k,
    w,
    u,
    total,
    offsets,
    written,
    states,
    final,
    T,
    NT,
    COUNT,
    ks0,
    ks1,
    ks2,
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
    """Program: BLOCK columns of the states of one head, over one document. w, written: None without the delta."""
    head, column = tl.program_id(1), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    row, start, end = tl.program_id(0), 0, T
    if HAS_DOCUMENTS:
        row = 0
        start = tl.load(offsets + tl.program_id(0)).to(tl.int32)
        if tl.program_id(0) + 1 < COUNT:
            end = tl.load(offsets + tl.program_id(0) + 1).to(tl.int32)
    i, key = tl.arange(0, C), tl.arange(0, KEYS)
    state = tl.zeros((KEYS, BLOCK), dtype=tl.float32)
    square = (key < K)[:, None] & (column < V)[None, :]
    for chunk in range(start // C, tl.cdiv(end, C)):
        token = chunk * C + i
        own = (token >= start) & (token < end)
        place = place_of(row, token, head, T, H)
        kept = state.to(k.dtype.element_ty)
        if start <= chunk * C:
            tl.store(state_at(states, row * NT + chunk, head, 0, key, column, H, K, V), kept, mask=square)
        narrow, broad = own[:, None] & (key < K)[None, :], own[:, None] & (column < V)[None, :]
        value = tl.load(u + place[:, None] * V + column[None, :], mask=broad, other=0.0).to(tl.float32)
        if DELTA:
            value -= tl.dot(tl.load(w + place[:, None] * K + key[None, :], mask=narrow, other=0.0), kept)
            tl.store(written + place[:, None] * V + column[None, :], value.to(written.dtype.element_ty), mask=broad)
        sums = total + ((row * H + head) * NT + chunk).to(tl.int64) * C
        decay, last = tl.load(sums + i), tl.load(sums + C - 1)
        keys = row_of(k, row, head // GROUP, token, ks0, ks1, ks2)
        block = tl.load(keys + key[None, :], mask=narrow, other=0.0)
        value = exp_where(own, last - decay)[:, None] * value
        state = state * tl.exp(last) + tl.dot(tl.trans(block), value.to(block.dtype))
    if end == T and start < end:
        tl.store(state_at(final, row, head, 0, key, column, H, K, V), state, mask=square)


@triton.jit
def outputs_kernel(
    q,
    k,
    written,
    states,
    total,
    documents,
    out,
    T,
    NT,
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
    """Program: BLOCK columns of the outputs of one head for a chunk."""
    row, head, first, token = chunk_of_program(NT, C)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    i, key, there = tl.arange(0, C), tl.arange(0, KEYS), token < T
    mine, before = documents_at(documents, token, first, T, HAS_DOCUMENTS)
    decay = tl.load(total + ((row * H + head) * NT).to(tl.int64) * C + token)
    entering = tl.where(mine == before, tl.exp(decay), 0.0)
    scores = tl.zeros((C, C), dtype=tl.float32)
    made = tl.zeros((C, BLOCK), dtype=tl.float32)
    queries = row_of(q, row, head // GROUP, token, qs0, qs1, qs2)
    keys = row_of(k, row, head // GROUP, token, ks0, ks1, ks2)
    for begin in range(0, K, KEYS):
        a = load_block(queries, begin, key, there, K)
        b = load_block(keys, begin, key, there, K)
        both = (begin + key < K)[:, None] & (column < V)[None, :]
        state = tl.load(state_at(states, tl.program_id(0), head, begin, key, column, H, K, V), mask=both, other=0.0)
        scores += tl.dot(a, tl.trans(b))
        made += tl.dot(a, state)
    place = place_of(row, token, head, T, H)
    value = load_block(written + place[:, None] * V, 0, column, there, V)
    scores = scores * pairs_of(decay, mine, i, False)
    made = SCALE * (entering[:, None] * made + tl.dot(scores.to(value.dtype), value))
    store_block(out + place[:, None] * V, 0, column, there, V, made)


def scan(call, chunks):
    """Compute the recurrence over chunks.

    Args:
        call: `Operands`.
        chunks: from `prepare`.

    Returns:
        `States`.
    """
    written = call.of_tokens(call.width) if call.delta else None
    made = call.states(chunks.u if written is None else written)
    tensors = (call.k, chunks.w, chunks.u, chunks.total, call.offsets, written, made.entering, made.final)
    call.along_chunks(scan_kernel, "delta_scan", tensors, call.sequences, *call.k_strides)
    return made


def outputs(call, chunks, states):
    """The output of each token, from the states and from its chunk.

    Args:
        call: `Operands`.
        chunks, states: from `prepare` and `scan`.

    Returns:
        [B, T, H, V] in v's dtype.
    """
    out = call.of_tokens(call.width)
    tensors = (call.q, call.k, states.written, states.entering, chunks.total, call.documents, out)
    strides = (*call.q_strides, *call.k_strides)
    call.each_chunk(outputs_kernel, "delta_outputs", tensors, *strides, columns=call.width)
    return out


def forward(q, k, v, g, beta, offsets=None, documents=None, *, scale, delta=True):
    """The gated delta rule, from a state of 0.

    Args:
        q, k: [B, T, Hk, K], bf16 (fp16 and fp32 in tests), already normalised if the rule requires it; K a multiple of
            16, at most 256.
        v: [B, T, H, V], V a multiple of 16.
        g, beta: [B, T, H], contiguous, any floating dtype.
        offsets: where documents begin and the last one ends, int [S + 1], for B = 1; or None.
        documents: the number of each token's document, int [T]; None if offsets is None.
        scale: multiplies q.
        delta: whether the state's value for a key is subtracted; False for state spaces (arXiv:2405.21060).

    Returns:
        (o [B, T, H, V] in v's dtype, the final state [B, H, K, V] in fp32).

    Raises:
        ValueError: sizes that the kernels do not support.
    """
    if (offsets is None) != (documents is None):
        raise ValueError("offsets without numbers of documents, or the reverse")
    call = Operands(q, k, v, g, beta, offsets, documents, scale, delta)
    chunks = prepare(call)
    states = scan(call, chunks)
    return outputs(call, chunks, states), states.final
