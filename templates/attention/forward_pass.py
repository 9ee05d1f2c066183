"""Attention over documents, forward: the softmax is taken as keys come in, and scores stay in registers.

FlashAttention (https://arxiv.org/abs/2205.14135), with the soft-cap of Gemma 2 (https://arxiv.org/abs/2408.00118): a
score s becomes cap tanh(s / cap). A program owns BLOCK queries of one head and SLICE columns of the result. Heads are
read CHUNK columns at a time, so that tiles of any width fit a card's shared memory; a head wider than SLICE has its
scores computed once for each slice.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .. import _tiles
from .._launch import launch, next_power_of_2

__all__ = ["NARROWEST", "capped", "checked", "chunk_product", "forward", "widths"]

NARROWEST = 64  #: columns: narrower products read memory that is not theirs in Triton 3.6
WIDEST = 256  #: columns of a result that a program keeps


@triton.jit
def chunk_product(
    left,
    right,
    row,
    column,
    width,
    left_stride,
    right_stride,
    rows,
    columns,
    product,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """product + left[row] right[column]^T, over PARTS chunks of a head of `width` columns.

    Rows from `rows` on, and columns from `columns` on, are 0. Chunks are read one after the other: of a loop that is
    unrolled, all would stay in shared memory."""
    part = tl.arange(0, CHUNK)
    for index in range(PARTS):
        at = index * CHUNK + part
        a = tl.load(
            left + row[:, None].to(tl.int64) * left_stride + at[None, :],
            mask=(row < rows)[:, None] & (at < width)[None, :],
            other=0.0,
        )
        b = tl.load(
            right + column[None, :].to(tl.int64) * right_stride + at[:, None],
            mask=(column < columns)[None, :] & (at < width)[:, None],
            other=0.0,
        )
        product = tl.dot(a, b, product, input_precision="ieee")
    return product


@triton.jit
def capped(product, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """(scores, their slope by scale * product)."""
    scores = product * SCALE
    slope = tl.full(product.shape, 1.0, tl.float32)
    if SOFTCAP > 0.0:
        sigmoid = tl.sigmoid(scores * (2.0 / SOFTCAP))  # tanh(u) = 2 s(2u) - 1; 1 - tanh(u)^2 = 4 s (1 - s)
        scores = SOFTCAP * (2.0 * sigmoid - 1.0)
        slope = 4.0 * sigmoid * (1.0 - sigmoid)
    return scores, slope


@triton.jit
def forward_kernel(
    q,
    k,
    v,
    out,
    logsumexp,
    offsets,
    total,
    qs0,
    qs1,
    ks0,
    ks1,
    vs0,
    vs1,  # strides of tokens and heads; columns are next to each other
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,  # heads of q for each of k
    WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    SLICE: tl.constexpr,
    SLICES: tl.constexpr,
):
    first = tl.program_id(0) * BLOCK
    start = tl.load(offsets + tl.program_id(1))
    length = tl.load(offsets + tl.program_id(1) + 1) - start
    if first >= length:
        return
    start = start.to(tl.int64)
    head = tl.program_id(2) // SLICES
    row = first + tl.arange(0, BLOCK)
    column = tl.program_id(2) % SLICES * SLICE + tl.arange(0, SLICE)
    q += start * qs0 + head.to(tl.int64) * qs1
    k += start * ks0 + (head // SHARED).to(tl.int64) * ks1
    v += start * vs0 + (head // SHARED).to(tl.int64) * vs1
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    share = tl.zeros([BLOCK], tl.float32)
    made = tl.zeros([BLOCK, SLICE], tl.float32)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first - WINDOW + 1, 0) // STEP * STEP
    for at in range(begin, tl.minimum(first + BLOCK, length), STEP):
        key = at + tl.arange(0, STEP)
        product = tl.zeros([BLOCK, STEP], tl.float32)
        product = chunk_product(q, k, row, key, WIDTH, qs0, ks0, length, length, product, CHUNK, PARTS)
        scores, _ = capped(product, SCALE, SOFTCAP)
        seen = (key[None, :] <= row[:, None]) & (key < length)[None, :]
        if WINDOW > 0:
            seen = seen & (row[:, None] - key[None, :] < WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        now = tl.maximum(highest, tl.max(scores, 1))
        level = tl.where(now == float("-inf"), 0.0, now)  # a row that has seen no key yet
        weights = tl.exp(scores - level[:, None])
        before = tl.exp(highest - level)
        share = share * before + tl.sum(weights, 1)
        place = v + key[:, None].to(tl.int64) * vs0 + column[None, :]
        values = tl.load(place, mask=(key < length)[:, None] & (column < WIDTH)[None, :], other=0.0)
        made = tl.dot(weights.to(values.dtype), values, made * before[:, None], input_precision="ieee")
        highest = now
    valid = row < length
    place = ((start + row) * HEADS + head)[:, None] * WIDTH + column[None, :]
    made = made / tl.where(valid, share, 1.0)[:, None]
    tl.store(out + place, made.to(out.dtype.element_ty), mask=valid[:, None] & (column < WIDTH)[None, :])
    if tl.program_id(2) % SLICES == 0:
        tl.store(logsumexp + head.to(tl.int64) * total + start + row, highest + tl.log(share), mask=valid)


def widths(kernel: str, q: torch.Tensor, tile: _tiles.Tile | None) -> tuple[_tiles.Tile, dict[str, int]]:
    """The tile of a kernel, and the constants that say how heads are read and written with it.

    Args:
        kernel: a key of ``_tiles.TABLE``, of which `step` are keys or queries at a time, and `rows` columns at a time.
        q: [N, H, D].
        tile: in place of the table's, or None.
    """
    width = q.shape[-1]
    whole = max(next_power_of_2(width), NARROWEST)
    tile = tile or _tiles.pick(kernel, q, whole)
    chunk, part = min(tile.rows, whole), min(WIDEST, whole)
    made = {"CHUNK": chunk, "PARTS": -(-width // chunk), "SLICE": part, "SLICES": -(-width // part)}
    return tile, {"WIDTH": width, "BLOCK": tile.block, "STEP": tile.step, **made}


def checked(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Tensors [N, H, D] whose columns are next to each other.

    Raises:
        ValueError: shapes do not fit.
    """
    q, k, v = tensors[:3]
    if k.shape != v.shape or k.shape[::2] != q.shape[::2] or q.shape[1] % k.shape[1]:
        raise ValueError(f"queries {tuple(q.shape)}, keys {tuple(k.shape)}, values {tuple(v.shape)}")
    return [each if each.stride(-1) == 1 else each.contiguous() for each in tensors]


def forward(q, k, v, offsets, longest, scale, window=0, softcap=0.0, *, tile=None):
    """softmax(scores) v over documents, each token seeing itself and what stands before it in its own; fp32 inside.

    Args:
        q: [N, H, D], bf16, fp16 or fp32.
        k: [N, K, D], where K divides H.
        v: as k.
        offsets: int32 [S + 1], rising from 0 to N.
        longest: tokens of the longest document, or more.
        scale: of the products.
        window: how many tokens a token sees, itself included; 0 for all.
        softcap: c of c * tanh(score / c), in the units of the scores; 0 for none.
        tile: a ``_tiles.Tile`` in place of the table's.

    Returns:
        (out, logsumexp): [N, H, D] in q's dtype, and fp32 [H, N].

    Raises:
        ValueError: shapes do not fit.
    """
    q, k, v = checked(q, k, v)
    total, heads, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    logsumexp = torch.empty((heads, total), dtype=torch.float32, device=q.device)
    tile, constants = widths("attention", q, tile)
    grid = (triton.cdiv(longest, tile.block), offsets.shape[0] - 1, heads * constants["SLICES"])
    launch(
        forward_kernel,
        grid,
        q,
        k,
        v,
        out,
        logsumexp,
        offsets,
        total,
        *(size for each in (q, k, v) for size in each.stride()[:2]),
        HEADS=heads,
        SHARED=heads // k.shape[1],
        SCALE=float(scale),
        SOFTCAP=float(softcap),
        WINDOW=int(window),
        **constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out, logsumexp
