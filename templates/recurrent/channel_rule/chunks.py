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

from ... import _tiles
from ..._launch import launch
from ..delta_rule.chunks import CHUNK, chunks_of, documents_at, inverse_of

__all__ = ["INSIDE", "Chunks", "options_of", "prepare", "reference_of", "sums"]

INSIDE = 16  #: tokens of a block


@triton.jit
def sums_kernel(g, total, T, NT, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, KEYS: tl.constexpr):
    """Program: running sums of KEYS log decays of a chunk. Tokens behind the last have no decay."""
    row, head = tl.program_id(0) // NT, tl.program_id(1)
    token = tl.program_id(0) % NT * C + tl.arange(0, C)
    key = tl.program_id(2) * KEYS + tl.arange(0, KEYS)
    place = (row.to(tl.int64) * T + token) * H + head
    inside = (token < T)[:, None] & (key < K)[None, :]
    made = tl.cumsum(tl.load(g + place[:, None] * K + key[None, :], mask=inside, other=0.0).to(tl.float32), 0)
    there = (row.to(tl.int64) * NT * C + token) * H + head
    tl.store(total + there[:, None] * K + key[None, :], made, mask=(token < NT * C)[:, None] & (key < K)[None, :])


@triton.jit
def reference_of(decay, i, block, INSIDE: tl.constexpr):
    """G at the token before a block, [KEYS]."""
    return tl.sum(tl.where((i == block * INSIDE - 1)[:, None], decay, 0.0), 0)


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
    INSIDE: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
):
    """Program: a chunk of one head."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    row, first = chunk // NT, chunk % NT * C
    i, key = tl.arange(0, C), tl.arange(0, KEYS)
    token = first + i
    there = token < T
    mine, before = documents_at(documents, token, first, T, HAS_DOCUMENTS)
    place = (row.to(tl.int64) * T + token) * H + head
    sums = (row.to(tl.int64) * NT * C + token) * H + head
    begin_of = i // INSIDE * INSIDE  # of each token's block
    rate = tl.load(beta + place, mask=there, other=0.0).to(tl.float32)
    among = tl.zeros((C, C), dtype=tl.float32)
    against = tl.zeros((C, C), dtype=tl.float32)
    for begin in range(0, K, KEYS):
        inside, known = there[:, None] & (begin + key < K)[None, :], (begin + key < K)[None, :] & (i < C)[:, None]
        where = place[:, None] * K + begin + key[None, :]
        decay = tl.load(total + sums[:, None] * K + begin + key[None, :], mask=known, other=0.0)
        a = tl.load(q + where, mask=inside, other=0.0)
        b = tl.load(k + where, mask=inside, other=0.0)
        kind = b.dtype
        for block in range(1, C // INSIDE):
            base = reference_of(decay, i, block, INSIDE)[None, :]
            later = (begin_of == block * INSIDE)[:, None]
            earlier = (i < block * INSIDE)[:, None]
            down = tl.where(later, tl.exp(tl.where(later, decay - base, 0.0)), 0.0)
            up = tl.where(earlier, tl.exp(tl.where(earlier, base - decay, 0.0)), 0.0)
            other = tl.trans((b.to(tl.float32) * up).to(kind))
            among += tl.dot((b.to(tl.float32) * down).to(kind), other)
            against += tl.dot((a.to(tl.float32) * down).to(kind), other)
        for step in range(0, INSIDE):
            near = begin_of + step  # a token of each one's block
            at = (row.to(tl.int64) * T + first + near) * H + head
            seen = (first + near < T)[:, None] & (begin + key < K)[None, :]
            theirs = tl.load(k + at[:, None] * K + begin + key[None, :], mask=seen, other=0.0).to(tl.float32)
            at = (row.to(tl.int64) * NT * C + first + near) * H + head
            theirs *= tl.exp(
                tl.minimum(decay - tl.load(total + at[:, None] * K + begin + key[None, :], mask=known, other=0.0), 0.0)
            )
            here = near[:, None] == i[None, :]
            among += tl.where(here, tl.sum(b.to(tl.float32) * theirs, 1)[:, None], 0.0)
            against += tl.where(here, tl.sum(a.to(tl.float32) * theirs, 1)[:, None], 0.0)
    sees = (mine[:, None] == mine[None, :]) & (i[:, None] >= i[None, :])
    square = place[:, None] * C + i[None, :]
    rows = there[:, None] & (i < C)[None, :]
    tl.store(scores + square, tl.where(sees, SCALE * against, 0.0).to(scores.dtype.element_ty), mask=rows)
    among = tl.where(sees & (i[:, None] != i[None, :]), among, 0.0)
    tl.store(pairs + square, among.to(pairs.dtype.element_ty), mask=rows)
    solved = inverse_of(rate[:, None] * among, i).to(k.dtype.element_ty)
    tl.store(inverse + square, solved, mask=rows)
    enters = tl.full((C,), 1.0, dtype=tl.float32)
    leaves = tl.full((C,), 1.0, dtype=tl.float32)
    passes = 1.0
    if HAS_DOCUMENTS:
        behind = tl.load(documents + tl.minimum(first + C, T) - 1)
        enters = tl.where(mine == before, 1.0, 0.0)
        leaves = tl.where(mine == behind, 1.0, 0.0)
        passes = tl.where(behind == before, 1.0, 0.0)
    for begin in range(0, K, KEYS):
        inside, known = there[:, None] & (begin + key < K)[None, :], (begin + key < K)[None, :] & (i < C)[:, None]
        where = place[:, None] * K + begin + key[None, :]
        decay = tl.load(total + sums[:, None] * K + begin + key[None, :], mask=known, other=0.0)
        last = reference_of(decay, i, C // INSIDE, INSIDE)
        a = tl.load(q + where, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(k + where, mask=inside, other=0.0).to(tl.float32)
        entering = enters[:, None] * tl.exp(decay)
        tl.store(q_in + where, (SCALE * entering * a).to(q_in.dtype.element_ty), mask=inside)
        leaving = leaves[:, None] * tl.exp(last[None, :] - decay)
        tl.store(k_out + where, (leaving * b).to(k_out.dtype.element_ty), mask=inside)
        made = tl.dot(solved, (rate[:, None] * entering * b).to(solved.dtype))
        tl.store(w + where, made.to(w.dtype.element_ty), mask=inside)
        at = (chunk.to(tl.int64) * H + head) * K + begin + key
        tl.store(through + at, passes * tl.exp(last), mask=begin + key < K)
    for begin in range(0, V, KEYS):
        inside = there[:, None] & (begin + key < V)[None, :]
        where = place[:, None] * V + begin + key[None, :]
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


def options_of(kernel, v, keys, **more):
    """A kernel's constants, its tile's among them.

    Args:
        kernel: its name in the table of tiles.
        v: [B, T, H, V].
        keys: K.
        more: further constants.

    Returns:
        (tile, constants by name).
    """
    tile = _tiles.pick(kernel, v, v.shape[3])
    sizes = dict(H=v.shape[2], K=keys, C=CHUNK)
    return tile, dict(sizes, **more, num_warps=tile.num_warps, num_stages=tile.num_stages)


def sums(g, v):
    """Compute running sums of log decays.

    Args:
        g: [B, T, H, K], contiguous.
        v: for the choice of tiles.

    Returns:
        [B, chunks * CHUNK, H, K] in fp32.
    """
    (batch, tokens, heads, keys), count = g.shape, chunks_of(g.shape[1])
    total = torch.empty(batch, count * CHUNK, heads, keys, dtype=torch.float32, device=g.device)
    tile, options = options_of("channel_sums", v, keys)
    grid = (batch * count, heads, triton.cdiv(keys, tile.step))
    launch(sums_kernel, grid, g, total, tokens, count, KEYS=tile.step, **options)
    return total


def prepare(q, k, v, total, beta, documents, scale):
    """Compute the values within chunks.

    Args:
        q, k, v, beta: operands of the rule, contiguous; q and k already normalised if the rule requires it.
        total: from `sums`.
        documents: the number of each token's document, int [T]; or None.
        scale: multiplies q.

    Returns:
        `Chunks`.
    """
    (batch, tokens, heads, width), keys, count = v.shape, k.shape[3], chunks_of(v.shape[1])

    def empty(*shape, dtype=v.dtype):
        return torch.empty(*shape, dtype=dtype, device=v.device)

    through = empty(batch, count * heads * keys, dtype=torch.float32)
    q_in, k_out, w = (empty(batch, tokens, heads, keys) for _ in range(3))
    squares = [empty(batch, tokens, heads, CHUNK) for _ in range(3)]
    made = Chunks(total, q_in, k_out, through, *squares, w, empty(batch, tokens, heads, width))
    tile, options = options_of("channel_prepare", v, keys, V=width, SCALE=float(scale), INSIDE=INSIDE)
    tensors = (q, k, v, total, beta, documents, *made[1:])
    launch(
        prepare_kernel,
        (batch * count, heads),
        *tensors,
        tokens,
        count,
        KEYS=tile.step,
        HAS_DOCUMENTS=documents is not None,
        **options,
    )
    return made
