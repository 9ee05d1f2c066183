"""The delta rule with decays of channels (arXiv:2510.26692) in chunks of 64 tokens, forward.

``prepare`` computes the values within chunks. ``scan`` iterates over chunks with a state in registers, in a program for
each row, head and block of columns. ``outputs`` reads the states.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..device import chunk_of_program, load_block, place_of, state_at
from ..operands import Operands
from .chunks import prepare, sums

__all__ = ["forward", "outputs", "scan"]


@triton.jit
def scan_kernel(
    k_out,
    w,
    u,
    through,
    written,
    states,
    final,
    T,
    NT,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program: BLOCK columns of the states of one head, over a row."""
    row, head = tl.program_id(0), tl.program_id(1)
    column, i, key = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, C), tl.arange(0, KEYS)
    state = tl.zeros((KEYS, BLOCK), dtype=tl.float32)
    square = (key < K)[:, None] & (column < V)[None, :]
    for chunk in range(0, NT):
        token = chunk * C + i
        there, place = token < T, place_of(row, token, head, T, H)
        kept = state.to(k_out.dtype.element_ty)
        tl.store(state_at(states, row * NT + chunk, head, 0, key, column, H, K, V), kept, mask=square)
        narrow, broad = there[:, None] & (key < K)[None, :], there[:, None] & (column < V)[None, :]
        value = tl.load(u + place[:, None] * V + column[None, :], mask=broad, other=0.0).to(tl.float32)
        value -= tl.dot(tl.load(w + place[:, None] * K + key[None, :], mask=narrow, other=0.0), kept)
        value = value.to(written.dtype.element_ty)
        tl.store(written + place[:, None] * V + column[None, :], value, mask=broad)
        decay = tl.load(through + ((row * NT + chunk).to(tl.int64) * H + head) * K + key, mask=key < K, other=0.0)
        block = tl.load(k_out + place[:, None] * K + key[None, :], mask=narrow, other=0.0)
        state = decay[:, None] * state + tl.dot(tl.trans(block), value)
    tl.store(state_at(final, row, head, 0, key, column, H, K, V), state, mask=square)


@triton.jit
def outputs_kernel(
    q_in,
    scores,
    written,
    states,
    out,
    T,
    NT,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program: BLOCK columns of the outputs of one head for a chunk."""
    row, head, _, token = chunk_of_program(NT, C)
    column, i, key = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, C), tl.arange(0, KEYS)
    there, place = token < T, place_of(row, token, head, T, H)
    mask, where = there[:, None] & (column < V)[None, :], place[:, None] * V + column[None, :]
    square = load_block(scores + place[:, None] * C, 0, i, there, C)
    made = tl.dot(square, tl.load(written + where, mask=mask, other=0.0))
    for begin in range(0, K, KEYS):
        a = load_block(q_in + place[:, None] * K, begin, key, there, K)
        both = (begin + key < K)[:, None] & (column < V)[None, :]
        at = state_at(states, tl.program_id(0), head, begin, key, column, H, K, V)
        made += tl.dot(a, tl.load(at, mask=both, other=0.0))
    tl.store(out + where, made.to(out.dtype.element_ty), mask=mask)


def scan(call, chunks):
    """Compute the recurrence over chunks.

    Args:
        call: `Operands`.
        chunks: from `prepare`.

    Returns:
        `States`.
    """
    made = call.states(call.of_tokens(call.width))
    tensors = (chunks.k_out, chunks.w, chunks.u, chunks.through, *made)
    call.along_chunks(scan_kernel, "channel_scan", tensors)
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
    tensors = (chunks.q_in, chunks.scores, states.written, states.entering, out)
    call.each_chunk(outputs_kernel, "channel_outputs", tensors, columns=call.width)
    return out


def forward(q, k, v, g, beta, documents=None, *, scale):
    """The delta rule with decays of channels, from a state of 0.

    Args:
        q, k: [B, T, H, K], contiguous, bf16 (fp16 and fp32 in tests), already normalised if the rule requires it; K a
            multiple of 16, at most 256.
        v: [B, T, H, V], contiguous, V a multiple of 16.
        g: [B, T, H, K], contiguous, any floating dtype.
        beta: [B, T, H], contiguous, any floating dtype.
        documents: the number of each token's document, int [T], for B = 1; or None.
        scale: multiplies q.

    Returns:
        (o [B, T, H, V] in v's dtype, the final state [B, H, K, V] in fp32).

    Raises:
        ValueError: sizes that the kernels do not support.
    """
    if q.shape[2] != v.shape[2]:
        raise ValueError(f"{q.shape[2]} and {v.shape[2]} heads")
    call = Operands(q, k, v, g, beta, None, documents, scale)
    chunks = prepare(call, sums(call))
    states = scan(call, chunks)
    return outputs(call, chunks, states), states.final
