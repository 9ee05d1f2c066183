"""The delta rule with decays of channels (arXiv:2510.26692) within chunks of 64 tokens, for all chunks at once.

The names are those of ``tunecompile.ops.recurrent.channel_chunks``. Decays go into the operands: once ``prepare`` has
multiplied them, the recurrence over chunks and the outputs are products.

Pairs of tokens: e^-G alone would overflow, so a chunk has blocks of 16 tokens. Between blocks each factor decays from
or to the token before the later block, which makes products of them. Inside a block the decay of each pair is computed:
for each token of a block in turn, with all tokens of its block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..device import chunk_of_program, documents_at, edges_of, exp_where, inverse_of, load_block, place_of, store_block
from ..operands import CHUNK

__all__ = ["Chunks", "between_blocks", "prepare", "reference_of", "sums"]

INSIDE = tl.constexpr(16)  #: tokens of a block


@triton.jit
def sums_at(row, token, head, NT, H: tl.constexpr, C: tl.constexpr):
    """Numbers of tokens of a head in a contiguous [B, NT * C, H]."""
    return (row.to(tl.int64) * NT * C + token) * H + head


@triton.jit
def sums_kernel(g, total, T, NT, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """Program: running sums of BLOCK log decays of a chunk. Tokens behind the last have no decay."""
    row, head, _, token = chunk_of_program(NT, C)
    key = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    place = place_of(row, token, head, T, H)
    made = tl.cumsum(load_block(g + place[:, None] * K, 0, key, token < T, K).to(tl.float32), 0)
    sums = sums_at(row, token, head, NT, H, C)
    store_block(total + sums[:, None] * K, 0, key, token < NT * C, K, made)


@triton.jit
def reference_of(decay, i, block):
    """G at the token before a block, [KEYS]."""
    return tl.sum(tl.where((i == block * INSIDE - 1)[:, None], decay, 0.0), 0)


@triton.jit
def between_blocks(decay, i, block):
    """(Decay to tokens of a block from the token before it, decay from tokens before the block to that one), else 0."""
    base = reference_of(decay, i, block)[None, :]
    down = exp_where((i // INSIDE * INSIDE == block * INSIDE)[:, None], decay - base)
    return down, exp_where((i < block * INSIDE)[:, None], base - decay)


@triton.jit
def prepare_kernel(
    q,
    k,
    v,
    total,
    beta,
    documents,
    q_in,
    k_out,
    through,
    pairs,
    scores,
    inverse,
    w,
    u,
    T,
    NT,
    SCALE: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
):
    """Program: a chunk of one head."""
    row, head, first, token = chunk_of_program(NT, C)
    i, key, there = tl.arange(0, C), tl.arange(0, KEYS), token < T
    mine, before = documents_at(documents, token, first, T, HAS_DOCUMENTS)
    place = place_of(row, token, head, T, H)
    sums = sums_at(row, token, head, NT, H, C)
    begin_of = i // INSIDE * INSIDE  # of each token's block
    rate = tl.load(beta + place, mask=there, other=0.0).to(tl.float32)
    among = tl.zeros((C, C), dtype=tl.float32)
    against = tl.zeros((C, C), dtype=tl.float32)
    for begin in range(0, K, KEYS):
        decay = load_block(total + sums[:, None] * K, begin, key, i < C, K)
        inside, where = there[:, None] & (begin + key < K)[None, :], place[:, None] * K + begin + key[None, :]
        a, b = tl.load(q + where, mask=inside, other=0.0), tl.load(k + where, mask=inside, other=0.0)
        kind = b.dtype
        for block in range(1, C // INSIDE):
            down, up = between_blocks(decay, i, block)
            other = tl.trans((b.to(tl.float32) * up).to(kind))
            among += tl.dot((b.to(tl.float32) * down).to(kind), other)
            against += tl.dot((a.to(tl.float32) * down).to(kind), other)
        for step in range(0, INSIDE):
            near = begin_of + step  # a token of each one's block
            at = (row.to(tl.int64) * T + first + near) * H + head
            theirs = load_block(k + at[:, None] * K, begin, key, first + near < T, K).to(tl.float32)
            at = (row.to(tl.int64) * NT * C + first + near) * H + head
            theirs *= tl.exp(tl.minimum(decay - load_block(total + at[:, None] * K, begin, key, i < C, K), 0.0))
            here = near[:, None] == i[None, :]
            among += tl.where(here, tl.sum(b.to(tl.float32) * theirs, 1)[:, None], 0.0)
            against += tl.where(here, tl.sum(a.to(tl.float32) * theirs, 1)[:, None], 0.0)
    sees = (mine[:, None] == mine[None, :]) & (i[:, None] >= i[None, :])
    square, rows = place[:, None] * C + i[None, :], there[:, None] & (i < C)[None, :]
    tl.store(scores + square, tl.where(sees, SCALE * against, 0.0).to(scores.dtype.element_ty), mask=rows)
    among = tl.where(sees & (i[:, None] != i[None, :]), among, 0.0)
    tl.store(pairs + square, among.to(pairs.dtype.element_ty), mask=rows)
    solved = inverse_of(rate[:, None] * among, i).to(k.dtype.element_ty)
    tl.store(inverse + square, solved, mask=rows)
    enters, leaves, passes = edges_of(documents, mine, before, first, T, C, HAS_DOCUMENTS)
    for begin in range(0, K, KEYS):
        inside, where = there[:, None] & (begin + key < K)[None, :], place[:, None] * K + begin + key[None, :]
        decay = load_block(total + sums[:, None] * K, begin, key, i < C, K)
        last = reference_of(decay, i, C // INSIDE)
        a = tl.load(q + where, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(k + where, mask=inside, other=0.0).to(tl.float32)
        entering = tl.where(enters, 1.0, 0.0)[:, None] * tl.exp(decay)
        tl.store(q_in + where, (SCALE * entering * a).to(q_in.dtype.element_ty), mask=inside)
        leaving = tl.where(leaves, 1.0, 0.0)[:, None] * tl.exp(last[None, :] - decay)
        tl.store(k_out + where, (leaving * b).to(k_out.dtype.element_ty), mask=inside)
        made = tl.dot(solved, (rate[:, None] * entering * b).to(solved.dtype))
        tl.store(w + where, made.to(w.dtype.element_ty), mask=inside)
        at = (tl.program_id(0).to(tl.int64) * H + head) * K + begin + key
        tl.store(through + at, tl.where(passes, 1.0, 0.0) * tl.exp(last), mask=begin + key < K)
    for begin in range(0, V, KEYS):
        inside, where = there[:, None] & (begin + key < V)[None, :], place[:, None] * V + begin + key[None, :]
        block = tl.load(v + where, mask=inside, other=0.0).to(tl.float32)
        made = tl.dot(solved, (rate[:, None] * block).to(solved.dtype))
        tl.store(u + where, made.to(u.dtype.element_ty), mask=inside)


class Chunks(NamedTuple):
    """The values within chunks. Tensors [B, T, H, ...] are contiguous."""

    total: torch.Tensor  #: G, [B, chunks * CHUNK, H, K], fp32
    q_in: torch.Tensor  #: scale e^G q, [B, T, H, K]; 0 where the state that enters is not seen
    k_out: torch.Tensor  #: e^(G_last - G) k, [B, T, H, K]; 0 where the chunk's end does not see it
    through: torch.Tensor  #: e^G_last, [B, chunks * H * K], fp32
    pairs: torch.Tensor  #: (k, k) below the diagonal, [B, T, H, CHUNK]
    scores: torch.Tensor  #: scale (q, k), [B, T, H, CHUNK]
    inverse: torch.Tensor  #: (I + A)^-1, [B, T, H, CHUNK]
    w: torch.Tensor  #: [B, T, H, K]
    u: torch.Tensor  #: [B, T, H, V]


def sums(call):
    """Compute running sums of log decays.

    Args:
        call: `Operands`; all contiguous.

    Returns:
        [B, chunks * CHUNK, H, K] in fp32.
    """
    total = call.empty(call.chunks * CHUNK, call.heads, call.keys, dtype=torch.float32)
    call.each_chunk(sums_kernel, "channel_sums", (call.g, total), columns=call.keys)
    return total


def prepare(call, total):
    """Compute the values within chunks.

    Args:
        call: `Operands`; all contiguous, q and k already normalised if the rule requires it.
        total: from `sums`.

    Returns:
        `Chunks`.
    """
    q_in, k_out, w = (call.of_tokens(call.keys) for _ in range(3))
    through = call.empty(call.chunks * call.heads * call.keys, dtype=torch.float32)
    squares = [call.of_tokens(CHUNK) for _ in range(3)]
    made = Chunks(total, q_in, k_out, through, *squares, w, call.of_tokens(call.width))
    tensors = (call.q, call.k, call.v, total, call.beta, call.documents, *made[1:])
    call.each_chunk(prepare_kernel, "channel_prepare", tensors)
    return made
