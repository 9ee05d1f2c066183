"""The gated delta rule (arXiv:2412.06464) in chunks of 64 tokens, forward; ``backward_pass`` goes the other way.

The names are those of ``tunecompile.ops.recurrent.delta_chunks``. ``prepare`` computes the values within chunks, for
all chunks at once. ``scan`` iterates over chunks with a state in registers, in a program for each document, head and
block of columns. ``outputs`` reads the states.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ... import _tiles
from ..._launch import launch, next_power_of_2
from .chunks import chunks_of, documents_at, pairs_of, prepare, row_of, rows, sizes

__all__ = ["States", "forward", "outputs", "scan"]


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
    wide = column < V
    square = (key < K)[:, None] & wide[None, :]
    for chunk in range(start // C, tl.cdiv(end, C)):
        token = chunk * C + i
        own = (token >= start) & (token < end)
        place = (row.to(tl.int64) * T + token) * H + head
        at = ((row * NT + chunk).to(tl.int64) * H + head) * K
        kept = state.to(k.dtype.element_ty)
        if start <= chunk * C:
            tl.store(states + (at + key[:, None]) * V + column[None, :], kept, mask=square)
        narrow = own[:, None] & (key < K)[None, :]
        broad = own[:, None] & wide[None, :]
        value = tl.load(u + place[:, None] * V + column[None, :], mask=broad, other=0.0).to(tl.float32)
        if DELTA:
            block = tl.load(w + place[:, None] * K + key[None, :], mask=narrow, other=0.0)
            value -= tl.dot(block, kept)
            tl.store(written + place[:, None] * V + column[None, :], value.to(written.dtype.element_ty), mask=broad)
        sums = total + ((row * H + head) * NT + chunk).to(tl.int64) * C
        decay, last = tl.load(sums + i), tl.load(sums + C - 1)
        block = tl.load(
            row_of(k, row, head // GROUP, token, ks0, ks1, ks2)[:, None] + key[None, :], mask=narrow, other=0.0
        )
        value = tl.where(own, tl.exp(tl.where(own, last - decay, 0.0)), 0.0)[:, None] * value
        state = state * tl.exp(last) + tl.dot(tl.trans(block), value.to(block.dtype))
    if end == T and start < end:
        at = (row.to(tl.int64) * H + head) * K
        tl.store(final + (at + key[:, None]) * V + column[None, :], state, mask=square)


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
    chunk, head = tl.program_id(0), tl.program_id(1)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    row = chunk // NT
    first = chunk % NT * C
    i, key = tl.arange(0, C), tl.arange(0, KEYS)
    token = first + i
    there, wide = token < T, column < V
    mine, before = documents_at(documents, token, first, T, HAS_DOCUMENTS)
    decay = tl.load(total + ((row * H + head) * NT).to(tl.int64) * C + token)
    entering = tl.exp(decay)
    if HAS_DOCUMENTS:
        entering = tl.where(mine == before, entering, 0.0)
    scores = tl.zeros((C, C), dtype=tl.float32)
    made = tl.zeros((C, BLOCK), dtype=tl.float32)
    queries = row_of(q, row, head // GROUP, token, qs0, qs1, qs2)
    keys = row_of(k, row, head // GROUP, token, ks0, ks1, ks2)
    at = (chunk.to(tl.int64) * H + head) * K
    for begin in range(0, K, KEYS):
        inside = (begin + key < K)[None, :] & there[:, None]
        a = tl.load(queries[:, None] + begin + key[None, :], mask=inside, other=0.0)
        b = tl.load(keys[:, None] + begin + key[None, :], mask=inside, other=0.0)
        state = tl.load(
            states + (at + begin + key[:, None]) * V + column[None, :],
            mask=(begin + key < K)[:, None] & wide[None, :],
            other=0.0,
        )
        scores += tl.dot(a, tl.trans(b))
        made += tl.dot(a, state)
    place = (row.to(tl.int64) * T + token) * H + head
    mask = there[:, None] & wide[None, :]
    value = tl.load(written + place[:, None] * V + column[None, :], mask=mask, other=0.0)
    scores = scores * pairs_of(decay, mine, i, False)
    made = SCALE * (entering[:, None] * made + tl.dot(scores.to(value.dtype), value))
    tl.store(out + place[:, None] * V + column[None, :], made.to(out.dtype.element_ty), mask=mask)


class States(NamedTuple):
    """The results of the recurrence over chunks."""

    written: torch.Tensor  #: [B, T, H, V]: the new values n
    entering: torch.Tensor  #: [B, chunks * H * K, V]: the state at the beginning of each chunk
    final: torch.Tensor  #: [B, H, K, V], fp32


def scan(chunks, k, v, offsets):
    """Compute the recurrence over chunks.

    Args:
        chunks: from `prepare`.
        k, v: as passed to `prepare`.
        offsets: where documents begin, int [S + 1]; or None.

    Returns:
        `States`.
    """
    (batch, tokens, heads, width), keys = v.shape, k.shape[3]
    count = chunks_of(tokens)
    delta = chunks.w is not None
    made = States(
        torch.empty_like(chunks.u) if delta else chunks.u,
        torch.empty(batch, count * heads * keys, width, dtype=v.dtype, device=v.device),
        torch.empty(batch, heads, keys, width, dtype=torch.float32, device=v.device),
    )
    k, k_strides = rows(k)
    tile = _tiles.pick("delta_scan", v, width)
    documents = batch if offsets is None else offsets.shape[0]
    launch(
        scan_kernel,
        (documents, heads, triton.cdiv(width, tile.block)),
        k,
        chunks.w,
        chunks.u,
        chunks.total,
        offsets,
        made.written if delta else None,
        made.entering,
        made.final,
        tokens,
        count,
        documents,
        *k_strides,
        **sizes(k, v),
        KEYS=max(next_power_of_2(keys), tile.block),
        BLOCK=tile.block,
        HAS_DOCUMENTS=offsets is not None,
        DELTA=delta,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return made


def outputs(chunks, states, q, k, v, documents, scale):
    """The output of each token, from the states and from its chunk.

    Args:
        chunks, states: from `prepare` and `scan`.
        q, k, v, documents, scale: as passed to `forward`.

    Returns:
        [B, T, H, V] in v's dtype.
    """
    (batch, tokens, heads, width), count = v.shape, chunks_of(v.shape[1])
    out = torch.empty_like(chunks.u)
    (q, q_strides), (k, k_strides) = rows(q), rows(k)
    tile = _tiles.pick("delta_outputs", v, width)
    launch(
        outputs_kernel,
        (batch * count, heads, triton.cdiv(width, tile.block)),
        q,
        k,
        states.written,
        states.entering,
        chunks.total,
        documents,
        out,
        tokens,
        count,
        *q_strides,
        *k_strides,
        SCALE=float(scale),
        **sizes(q, v),
        KEYS=tile.step,
        BLOCK=tile.block,
        HAS_DOCUMENTS=documents is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
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
    keys, width = q.shape[3], v.shape[3]
    if keys % 16 or width % 16 or keys > 256 or (offsets is None) != (documents is None):
        raise ValueError(f"keys of {keys} and values of {width}, with documents: {documents is not None}")
    chunks = prepare(k, v, g, beta, documents, delta)
    states = scan(chunks, k, v, offsets)
    return outputs(chunks, states, q, k, v, documents, scale), states.final
