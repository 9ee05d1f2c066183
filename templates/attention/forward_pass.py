"""Attention over documents, forward: the softmax is taken as keys come in, and scores stay in registers.

FlashAttention (https://arxiv.org/abs/2205.14135), with the soft-cap of Gemma 2 (https://arxiv.org/abs/2408.00118): a
score s becomes cap tanh(s / cap). A program owns BLOCK queries of one head and SLICE columns of the result. Heads are
read CHUNK columns at a time, so that tiles of any width fit a card's shared memory; a head wider than SLICE has its
scores computed once for each slice. Where documents are a tree, queries go on to the keys of the nodes above theirs.
Weights may be dropped, by words of a counter-based generator (`ops.attention.dropout`: Philox).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .. import _tiles
from .._launch import launch, next_power_of_2

__all__ = [
    "NARROWEST",
    "capped",
    "checked",
    "chunk_product",
    "dropped_of",
    "first_seen",
    "forward",
    "keeps",
    "last_seen",
    "sees",
    "tree_of",
    "widths",
]

NARROWEST = 64  #: columns: narrower products read memory that is not theirs in Triton 3.6
WIDEST = 256  #: columns of a result that a program keeps
ROUNDS = tl.constexpr(7)  #: of Philox, as in `ops.attention.dropout`


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
def sees(row, key, rows, keys, row_place, key_place, OWN: tl.constexpr, WINDOW: tl.constexpr):
    """Which queries see which keys; OWN: of one node, not of one above."""
    seen = (row < rows)[:, None] & (key < keys)[None, :]
    if OWN:
        seen = seen & (key[None, :] <= row[:, None])
    if WINDOW > 0:
        back = row_place[:, None] - key_place[None, :]
        seen = seen & (back < WINDOW) & (-back < WINDOW)
    return seen


@triton.jit
def first_seen(place, STEP: tl.constexpr, WINDOW: tl.constexpr):
    """Where keys begin that a query at this place sees, by steps."""
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(place - WINDOW + 1, 0) // STEP * STEP
    return begin


@triton.jit
def last_seen(first, length, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr):
    """Where keys end that any of BLOCK queries sees."""
    end = length
    if CAUSAL:
        end = tl.minimum(first + BLOCK, length)
    elif WINDOW > 0:
        end = tl.minimum(first + BLOCK + WINDOW - 1, length)
    return end


@triton.jit
def keeps(seed, token, key, head, THRESHOLD: tl.constexpr):
    """What the softmax's weights are multiplied by, [queries, keys]: 0 where a word of Philox is below THRESHOLD."""
    none = tl.zeros_like(token)[:, None] + tl.zeros_like(key)[None, :]
    words = tl.philox(tl.load(seed), token[:, None] + none, (key // 4)[None, :] + none, head + none, none, ROUNDS)
    part = (key % 4)[None, :] + none
    low = tl.where(part == 0, words[0], words[1])
    high = tl.where(part == 2, words[2], words[3])
    word = tl.where(part < 2, low, high)
    return tl.where(word >= THRESHOLD, 1.0 / (1.0 - THRESHOLD / 4294967296.0), 0.0)


@triton.jit
def _add_keys(
    q,
    k,
    v,
    row,
    key,
    column,
    rows,
    keys,
    row_place,
    key_place,
    highest,
    share,
    made,
    qs0,
    ks0,
    vs0,
    seed,
    start,
    head,
    OWN: tl.constexpr,
    THRESHOLD: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The softmax of queries, with STEP more keys."""
    product = tl.zeros([BLOCK, STEP], tl.float32)
    product = chunk_product(q, k, row, key, WIDTH, qs0, ks0, rows, keys, product, CHUNK, PARTS)
    scores, _ = capped(product, SCALE, SOFTCAP)
    scores = tl.where(sees(row, key, rows, keys, row_place, key_place, OWN, WINDOW), scores, float("-inf"))
    now = tl.maximum(highest, tl.max(scores, 1))
    level = tl.where(now == float("-inf"), 0.0, now)  # a row that has seen no key yet
    weights = tl.exp(scores - level[:, None])
    before = tl.exp(highest - level)
    share = share * before + tl.sum(weights, 1)
    if THRESHOLD > 0:
        weights = weights * keeps(seed, (start + row).to(tl.int32), key, head, THRESHOLD)
    place = v + key[:, None].to(tl.int64) * vs0 + column[None, :]
    values = tl.load(place, mask=(key < keys)[:, None] & (column < WIDTH)[None, :], other=0.0)
    made = tl.dot(weights.to(values.dtype), values, made * before[:, None], input_precision="ieee")
    return now, share, made


@triton.jit
def forward_kernel(
    q,
    k,
    v,
    out,
    logsumexp,
    offsets,
    tree,
    places,
    seed,
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
    TREE: tl.constexpr,
    CAUSAL: tl.constexpr,
    THRESHOLD: tl.constexpr,
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
    k += (head // SHARED).to(tl.int64) * ks1
    v += (head // SHARED).to(tl.int64) * vs1
    own_k = k + start * ks0
    own_v = v + start * vs0
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    share = tl.zeros([BLOCK], tl.float32)
    made = tl.zeros([BLOCK, SLICE], tl.float32)
    end = last_seen(first, length, CAUSAL, WINDOW, BLOCK)
    for at in range(first_seen(first, STEP, WINDOW), end, STEP):
        key = at + tl.arange(0, STEP)
        highest, share, made = _add_keys(
            *(q, own_k, own_v, row, key, column, length, length, row, key, highest, share, made, qs0, ks0, vs0),
            *(seed, start, head, CAUSAL, THRESHOLD),
            *(WIDTH, SCALE, SOFTCAP, WINDOW, BLOCK, STEP, CHUNK, PARTS),
        )
    if TREE:
        place_of_first = tl.load(places + start)
        above = tl.load(tree + tl.program_id(1))
        while above >= 0:
            begin = tl.load(offsets + above)
            keys = tl.load(offsets + above + 1) - begin
            begin = begin.to(tl.int64)
            further = place_of_first - tl.load(places + begin, mask=keys > 0, other=0)
            above_k = k + begin * ks0
            above_v = v + begin * vs0
            for at in range(first_seen(first + further, STEP, WINDOW), keys, STEP):
                key = at + tl.arange(0, STEP)
                highest, share, made = _add_keys(
                    *(q, above_k, above_v, row, key, column, length, keys, row + further, key),
                    *(highest, share, made, qs0, ks0, vs0, seed, begin, head, False, 0),
                    *(WIDTH, SCALE, SOFTCAP, WINDOW, BLOCK, STEP, CHUNK, PARTS),
                )
            above = tl.load(tree + above)
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


def tree_of(q, offsets, tree, places):
    """(tree, places, whether there is a tree), as kernels take them.

    Raises:
        ValueError: shapes or strides do not fit.
    """
    if tree is None:
        return offsets, offsets, False
    if tree.shape != (2, offsets.shape[0] - 1) or places.shape != q.shape[:1]:
        raise ValueError(f"tree {tuple(tree.shape)}, places {tuple(places.shape)}")
    if not tree.is_contiguous() or not places.is_contiguous():
        raise ValueError("tree and places must be contiguous")
    return tree, places, True


def dropped_of(offsets, dropped):
    """(the seed, or another tensor in its place; constants), as kernels take them. dropped: as for ``forward``."""
    share, seed = dropped or (0.0, offsets)
    return seed, {"THRESHOLD": min(round(share * 2**32), 2**32 - 1)}


def forward(
    q,
    k,
    v,
    offsets,
    longest,
    scale,
    window=0,
    softcap=0.0,
    *,
    causal=True,
    dropped=None,
    tree=None,
    places=None,
    tile=None,
):
    """softmax(scores) v over documents, each token seeing itself and what stands before it in its own; fp32 inside.

    Args:
        q: [N, H, D], bf16, fp16 or fp32.
        k: [N, K, D], where K divides H.
        v: as k.
        offsets: int32 [S + 1], rising from 0 to N.
        longest: tokens of the longest document, or more.
        scale: of the products.
        window: how many tokens a token sees, itself included, and as many behind it if it sees these; 0 for all.
        softcap: c of c * tanh(score / c), in the units of the scores; 0 for none.
        causal: whether a token sees no later token. If False, there is no tree.
        dropped: (share of weights that are dropped, seed, int64 [1]) of `ops.dropout_attention`, or None.
        tree: int32 [2, S], where documents are a tree, depth first: the parent of each, which stands before it, or -1,
            and where the last token below it ends; or None.
        places: int32 [N], with a tree: the place of each token among those that its last token sees.
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
    tree, places, has_tree = tree_of(q, offsets, tree, places)
    seed, drop = dropped_of(offsets, dropped)
    launch(
        forward_kernel,
        grid,
        *(q, k, v, out, logsumexp, offsets, tree, places, seed, total),
        *(size for each in (q, k, v) for size in each.stride()[:2]),
        **dict(HEADS=heads, SHARED=heads // k.shape[1], SCALE=float(scale), SOFTCAP=float(softcap)),
        **dict(WINDOW=int(window), TREE=has_tree, CAUSAL=causal),
        **drop,
        **constants,
        **dict(num_warps=tile.num_warps, num_stages=tile.num_stages),
    )
    return out, logsumexp
