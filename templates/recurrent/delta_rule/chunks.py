"""The gated delta rule (arXiv:2412.06464) within chunks of 64 tokens, for all chunks at once.

The places of chunks do not depend on documents: masks separate the documents within a chunk, so the grid and all
buffers depend only on sizes.

(I + A)^-1 is built by joining blocks to 2, 4, ... 64 rows: T = T - T L T, where L is the part between two blocks. The
product ``prod (I + A^(2^k))`` would cancel: repeated tokens give an A of ones, whose powers reach 10^17.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ... import _tiles
from ..._launch import launch

__all__ = ["CHUNK", "Chunks", "chunks_of", "documents_at", "pairs_of", "prepare", "row_of", "rows", "sizes"]

CHUNK = 64


@triton.jit
def row_of(tensor, row, head, token, stride_row, stride_token, stride_head):
    """Pointers to the values of tokens, for one head of [B, T, H, ...]."""
    tensor += row.to(tl.int64) * stride_row + head.to(tl.int64) * stride_head
    return tensor + token.to(tl.int64) * stride_token


@triton.jit
def documents_at(documents, token, first, T, HAS_DOCUMENTS: tl.constexpr):
    """(The document of each token of a chunk, that of the token in front of it)."""
    mine = tl.zeros_like(token)
    before = 0
    if HAS_DOCUMENTS:
        mine = tl.load(documents + tl.minimum(token, T - 1))
        before = tl.load(documents + tl.maximum(first - 1, 0))
        before = tl.where(first > 0, before, -1)
    return mine, before


@triton.jit
def pairs_of(total, mine, i, STRICT: tl.constexpr):
    """e^(G_i - G_j) if i sees j, else 0."""
    sees = (mine[:, None] == mine[None, :]) & (i[:, None] >= i[None, :])
    if STRICT:
        sees = sees & (i[:, None] != i[None, :])
    return tl.where(sees, tl.exp(tl.where(sees, total[:, None] - total[None, :], 0.0)), 0.0)


@triton.jit
def inverse_of(system, i):
    """(I + A)^-1 of a strictly lower triangular A of 64 rows; it is rounded to half precision afterwards."""
    a, b = i[:, None], i[None, :]
    inverse = tl.where(a == b, 1.0, 0.0) - tl.where(a // 2 == b // 2, system, 0.0)
    for level in range(1, 6):  # two blocks of 2, 4, ... 32 rows are joined
        together = (a >> (level + 1)) == (b >> (level + 1))
        between = tl.where(together & ((a >> level) != (b >> level)), system, 0.0)
        step = tl.dot(inverse, between, input_precision="tf32")
        inverse -= tl.dot(step, inverse, input_precision="tf32")
    return inverse


@triton.jit
def prepare_kernel(
    k,
    v,
    g,
    beta,
    documents,
    total,
    inverse,
    w,
    u,
    T,
    NT,
    ks0,
    ks1,
    ks2,
    vs0,
    vs1,
    vs2,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    DELTA: tl.constexpr,
):
    """Program: a chunk of one head. inverse, w: None without the delta."""
    row, head = tl.program_id(0) // NT, tl.program_id(1)
    first = tl.program_id(0) % NT * C
    i = tl.arange(0, C)
    token = first + i
    there = token < T
    place = (row.to(tl.int64) * T + token) * H + head
    decay = tl.cumsum(tl.load(g + place, mask=there, other=0.0).to(tl.float32), 0)
    rate = tl.load(beta + place, mask=there, other=0.0).to(tl.float32)
    tl.store(total + ((row * H + head) * NT).to(tl.int64) * C + token, decay)
    column = tl.arange(0, BLOCK)
    if DELTA:
        mine, before = documents_at(documents, token, first, T, HAS_DOCUMENTS)
        keys = row_of(k, row, head // GROUP, token, ks0, ks1, ks2)
        products = tl.zeros((C, C), dtype=tl.float32)
        for begin in range(0, K, BLOCK):
            inside = there[:, None] & (begin + column < K)[None, :]
            block = tl.load(keys[:, None] + begin + column[None, :], mask=inside, other=0.0)
            products += tl.dot(block, tl.trans(block))
        solved = inverse_of(rate[:, None] * products * pairs_of(decay, mine, i, True), i).to(k.dtype.element_ty)
        tl.store(inverse + place[:, None] * C + i[None, :], solved, mask=there[:, None])
        entering = rate
        if HAS_DOCUMENTS:
            entering = tl.where(mine == before, rate, 0.0)
        entering *= tl.exp(decay)
        for begin in range(0, K, BLOCK):
            inside = there[:, None] & (begin + column < K)[None, :]
            block = tl.load(keys[:, None] + begin + column[None, :], mask=inside, other=0.0)
            block = tl.dot(solved, (entering[:, None] * block.to(tl.float32)).to(solved.dtype))
            tl.store(w + place[:, None] * K + begin + column[None, :], block.to(w.dtype.element_ty), mask=inside)
    values = row_of(v, row, head, token, vs0, vs1, vs2)
    for begin in range(0, V, BLOCK):
        inside = there[:, None] & (begin + column < V)[None, :]
        block = tl.load(values[:, None] + begin + column[None, :], mask=inside, other=0.0)
        block = (rate[:, None] * block.to(tl.float32)).to(u.dtype.element_ty)
        if DELTA:
            block = tl.dot(solved, block).to(u.dtype.element_ty)
        tl.store(u + place[:, None] * V + begin + column[None, :], block, mask=inside)


class Chunks(NamedTuple):
    """The values within chunks. Tensors [B, T, H, ...] are contiguous."""

    total: torch.Tensor  #: [B, H, chunks * CHUNK], fp32: running sums of log decays
    inverse: torch.Tensor | None  #: [B, T, H, CHUNK]: (I + A)^-1; None without the delta
    w: torch.Tensor | None  #: [B, T, H, K]; None without the delta
    u: torch.Tensor  #: [B, T, H, V]


def chunks_of(tokens):
    """The number of chunks of a row.

    Args:
        tokens: of the row; may be a symbol.

    Returns:
        Their number; the last one may be incomplete. No tensor has a dimension of as many: torch asks of each
        whether it is 1, and the answer becomes a guard on the symbol. It is multiplied by other sizes.
    """
    return (tokens + CHUNK - 1) // CHUNK


def rows(x):
    """A tensor whose last dimension is contiguous, and its strides.

    Args:
        x: [B, T, H, D].

    Returns:
        (x or a copy, strides of the first three dimensions).
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x, x.stride()[:3]


def sizes(q, v):
    """The constexprs common to all kernels."""
    heads = v.shape[2]
    return dict(H=heads, GROUP=heads // q.shape[2], K=q.shape[3], V=v.shape[3], C=CHUNK)


def prepare(k, v, g, beta, documents, delta=True):
    """Compute the values within chunks.

    Args:
        k, v, g, beta: operands of the rule; k already normalised if the rule requires it, g and beta contiguous.
        documents: the number of each token's document, int [T]; or None.
        delta: whether the value that the state holds for a key is subtracted from the new value.

    Returns:
        `Chunks`.
    """
    (batch, tokens, heads, width), keys = v.shape, k.shape[3]
    count = chunks_of(tokens)
    total = torch.empty(batch, heads, count * CHUNK, dtype=torch.float32, device=v.device)
    widths = (CHUNK if delta else 0, keys if delta else 0, width)
    made = Chunks(
        total,
        *(torch.empty(batch, tokens, heads, n, dtype=v.dtype, device=v.device) if n else None for n in widths),
    )
    (k, k_strides), (v, v_strides) = rows(k), rows(v)
    tile = _tiles.pick("delta_prepare", v, keys)
    launch(
        prepare_kernel,
        (batch * count, heads),
        k,
        v,
        g,
        beta,
        documents,
        *made,
        tokens,
        count,
        *k_strides,
        *v_strides,
        **sizes(k, v),
        BLOCK=tile.block,
        HAS_DOCUMENTS=documents is not None,
        DELTA=delta,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return made
