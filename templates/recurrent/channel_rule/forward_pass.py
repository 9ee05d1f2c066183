"""The delta rule with decays of channels (arXiv:2510.26692) in chunks of 64 tokens, forward.

``prepare`` computes the values within chunks. ``scan`` iterates over chunks with a state in registers, in a program for
each row, head and block of columns. ``outputs`` reads the states.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..._launch import launch, next_power_of_2
from ..delta_rule.chunks import chunks_of
from .chunks import options_of, prepare, sums

__all__ = ["States", "forward", "outputs", "scan"]


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
    wide, high = column < V, key < K
    state = tl.zeros((KEYS, BLOCK), dtype=tl.float32)
    square = high[:, None] & wide[None, :]
    for chunk in range(0, NT):
        token = chunk * C + i
        there = token < T
        place = (row.to(tl.int64) * T + token) * H + head
        at = ((row * NT + chunk).to(tl.int64) * H + head) * K
        kept = state.to(k_out.dtype.element_ty)
        tl.store(states + (at + key[:, None]) * V + column[None, :], kept, mask=square)
        narrow, broad = there[:, None] & high[None, :], there[:, None] & wide[None, :]
        value = tl.load(u + place[:, None] * V + column[None, :], mask=broad, other=0.0).to(tl.float32)
        value -= tl.dot(tl.load(w + place[:, None] * K + key[None, :], mask=narrow, other=0.0), kept)
        value = value.to(written.dtype.element_ty)
        tl.store(written + place[:, None] * V + column[None, :], value, mask=broad)
        decay = tl.load(through + at + key, mask=high, other=0.0)
        block = tl.load(k_out + place[:, None] * K + key[None, :], mask=narrow, other=0.0)
        state = decay[:, None] * state + tl.dot(tl.trans(block), value)
    at = (row.to(tl.int64) * H + head) * K
    tl.store(final + (at + key[:, None]) * V + column[None, :], state, mask=square)


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
    chunk, head = tl.program_id(0), tl.program_id(1)
    column, i, key = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, C), tl.arange(0, KEYS)
    row, token = chunk // NT, chunk % NT * C + i
    there, wide = token < T, column < V
    place = (row.to(tl.int64) * T + token) * H + head
    at = (chunk.to(tl.int64) * H + head) * K
    mask = there[:, None] & wide[None, :]
    where = place[:, None] * V + column[None, :]
    square = tl.load(scores + place[:, None] * C + i[None, :], mask=there[:, None] & (i < C)[None, :], other=0.0)
    made = tl.dot(square, tl.load(written + where, mask=mask, other=0.0))
    for begin in range(0, K, KEYS):
        inside = (begin + key < K)[None, :] & there[:, None]
        a = tl.load(q_in + place[:, None] * K + begin + key[None, :], mask=inside, other=0.0)
        both = (begin + key < K)[:, None] & wide[None, :]
        made += tl.dot(a, tl.load(states + (at + begin + key[:, None]) * V + column[None, :], mask=both, other=0.0))
    tl.store(out + where, made.to(out.dtype.element_ty), mask=mask)


class States(NamedTuple):
    """The results of the recurrence over chunks."""

    written: torch.Tensor  #: [B, T, H, V]: the new values n
    entering: torch.Tensor  #: [B, chunks * H * K, V]: the state at the beginning of each chunk
    final: torch.Tensor  #: [B, H, K, V], fp32


def scan(chunks):
    """Compute the recurrence over chunks.

    Args:
        chunks: from `prepare`.

    Returns:
        `States`.
    """
    (batch, tokens, heads, width), keys = chunks.u.shape, chunks.w.shape[3]
    count = chunks_of(tokens)
    made = States(
        torch.empty_like(chunks.u),
        torch.empty(batch, count * heads * keys, width, dtype=chunks.u.dtype, device=chunks.u.device),
        torch.empty(batch, heads, keys, width, dtype=torch.float32, device=chunks.u.device),
    )
    tile, options = options_of("channel_scan", chunks.u, keys, V=width)
    options |= dict(KEYS=max(next_power_of_2(keys), tile.step), BLOCK=tile.block)
    grid = (batch, heads, triton.cdiv(width, tile.block))
    launch(scan_kernel, grid, chunks.k_out, chunks.w, chunks.u, chunks.through, *made, tokens, count, **options)
    return made


def outputs(chunks, states):
    """The output of each token, from the states and from its chunk.

    Args:
        chunks, states: from `prepare` and `scan`.

    Returns:
        [B, T, H, V] in v's dtype.
    """
    (batch, tokens, heads, width), count = chunks.u.shape, chunks_of(chunks.u.shape[1])
    out = torch.empty_like(chunks.u)
    tile, options = options_of("channel_outputs", chunks.u, chunks.w.shape[3], V=width)
    grid = (batch * count, heads, triton.cdiv(width, tile.block))
    tensors = (chunks.q_in, chunks.scores, states.written, states.entering, out)
    launch(outputs_kernel, grid, *tensors, tokens, count, KEYS=tile.step, BLOCK=tile.block, **options)
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
    if q.shape[3] % 16 or v.shape[3] % 16 or q.shape[3] > 256 or q.shape[2] != v.shape[2]:
        raise ValueError(f"keys of {q.shape[3]} and values of {v.shape[3]}, {q.shape[2]} and {v.shape[2]} heads")
    chunks = prepare(q, k, v, sums(g, v), beta, documents, scale)
    states = scan(chunks)
    return outputs(chunks, states), states.final
