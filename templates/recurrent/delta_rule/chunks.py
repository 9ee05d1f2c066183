"""The gated delta rule (arXiv:2412.06464) within chunks of 64 tokens, for all chunks at once.

The places of chunks do not depend on documents: masks separate the documents within a chunk, so the grid and all
buffers depend only on sizes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..device import chunk_of_program, documents_at, inverse_of, load_block, pairs_of, place_of, row_of, store_block
from ..operands import CHUNK

__all__ = ["Chunks", "prepare"]


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
    row, head, first, token = chunk_of_program(NT, C)
    i, column, there = tl.arange(0, C), tl.arange(0, BLOCK), token < T
    place = place_of(row, token, head, T, H)
    decay = tl.cumsum(tl.load(g + place, mask=there, other=0.0).to(tl.float32), 0)
    rate = tl.load(beta + place, mask=there, other=0.0).to(tl.float32)
    tl.store(total + ((row * H + head) * NT).to(tl.int64) * C + token, decay)
    if DELTA:
        mine, before = documents_at(documents, token, first, T, HAS_DOCUMENTS)
        keys = row_of(k, row, head // GROUP, token, ks0, ks1, ks2)
        products = tl.zeros((C, C), dtype=tl.float32)
        for begin in range(0, K, BLOCK):
            block = load_block(keys, begin, column, there, K)
            products += tl.dot(block, tl.trans(block))
        solved = inverse_of(rate[:, None] * products * pairs_of(decay, mine, i, True), i).to(k.dtype.element_ty)
        store_block(inverse + place[:, None] * C, 0, i, there, C, solved)
        entering = tl.where(mine == before, rate, 0.0) * tl.exp(decay)
        for begin in range(0, K, BLOCK):
            block = load_block(keys, begin, column, there, K)
            block = tl.dot(solved, (entering[:, None] * block.to(tl.float32)).to(solved.dtype))
            store_block(w + place[:, None] * K, begin, column, there, K, block)
    values = row_of(v, row, head, token, vs0, vs1, vs2)
    for begin in range(0, V, BLOCK):
        block = load_block(values, begin, column, there, V)
        block = (rate[:, None] * block.to(tl.float32)).to(u.dtype.element_ty)
        if DELTA:
            block = tl.dot(solved, block)
        store_block(u + place[:, None] * V, begin, column, there, V, block)


class Chunks(NamedTuple):
    """The values within chunks. Tensors [B, T, H, ...] are contiguous."""

    total: torch.Tensor  #: [B, H, chunks * CHUNK], fp32: running sums of log decays
    inverse: torch.Tensor | None  #: [B, T, H, CHUNK]: (I + A)^-1; None without the delta
    w: torch.Tensor | None  #: [B, T, H, K]; None without the delta
    u: torch.Tensor  #: [B, T, H, V]


def prepare(call):
    """Compute the values within chunks.

    Args:
        call: `Operands`; k already normalised if the rule requires it, g and beta contiguous.

    Returns:
        `Chunks`.
    """
    total = call.empty(call.heads, call.chunks * CHUNK, dtype=torch.float32)
    squares, w = (call.of_tokens(CHUNK), call.of_tokens(call.keys)) if call.delta else (None, None)
    made = Chunks(total, squares, w, call.of_tokens(call.width))
    tensors = (call.k, call.v, call.g, call.beta, call.documents, *made)
    call.each_chunk(prepare_kernel, "delta_prepare", tensors, *call.k_strides, *call.v_strides)
    return made
