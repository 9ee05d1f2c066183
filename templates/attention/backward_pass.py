"""Attention over documents, backward: two passes, by keys and by queries, each of which recomputes the scores.

A program of the first owns keys of one head, for all heads of q that share it, so their gradients are summed in
registers and in order; a program of the second owns queries. As in `forward_pass`, heads are read in chunks and results
are written in slices. In a tree of documents, queries of keys go on to the end of all nodes below, which follow, and
keys of queries to the nodes above; programs own a head of q, and sums over these follow, in order as well.
(FlashAttention: https://arxiv.org/abs/2205.14135.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .._launch import launch
from .forward_pass import (
    capped,
    checked,
    chunk_product,
    dropped_of,
    first_seen,
    keeps,
    last_seen,
    sees,
    tree_of,
    widths,
)

__all__ = ["backward", "gradients_of_keys", "gradients_of_queries"]


@triton.jit
def _weights_and_slopes(
    q,
    k,
    v,
    grad,
    row,
    key,
    rows,
    keys,
    row_place,
    key_place,
    logsumexp,
    delta,
    qs0,
    ks0,
    vs0,
    gs0,
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
    """Of queries `row` (BLOCK) and keys (STEP): weights of the values, and the gradients of the products."""
    product = tl.zeros([BLOCK, STEP], tl.float32)
    product = chunk_product(q, k, row, key, WIDTH, qs0, ks0, rows, keys, product, CHUNK, PARTS)
    scores, slope = capped(product, SCALE, SOFTCAP)
    seen = sees(row, key, rows, keys, row_place, key_place, OWN, WINDOW)
    level = tl.load(logsumexp + row, mask=row < rows, other=0.0)
    weights = tl.exp(tl.where(seen, scores - level[:, None], float("-inf")))
    change = tl.zeros([BLOCK, STEP], tl.float32)
    change = chunk_product(grad, v, row, key, WIDTH, gs0, vs0, rows, keys, change, CHUNK, PARTS)
    mean = tl.load(delta + row, mask=row < rows, other=0.0)
    given = weights
    if THRESHOLD > 0:
        kept = keeps(seed, (start + row).to(tl.int32), key, head.to(tl.int32), THRESHOLD)
        given = weights * kept
        change = change * kept
    return given, weights * (change - mean[:, None]) * slope * SCALE


@triton.jit
def keys_kernel(
    q,
    k,
    v,
    grad,
    logsumexp,
    delta,
    dk,
    dv,
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
    vs1,
    gs0,
    gs1,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    MEMBERS: tl.constexpr,  # heads of q that a program sums over: all that share a key, or a part of them
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
    """dk and dv of BLOCK keys, from STEP queries at a time."""
    first = tl.program_id(0) * BLOCK
    start = tl.load(offsets + tl.program_id(1))
    length = tl.load(offsets + tl.program_id(1) + 1) - start
    if first >= length:
        return
    start = start.to(tl.int64)
    part = tl.program_id(2) // SLICES
    shared = part * MEMBERS // SHARED
    key = first + tl.arange(0, BLOCK)
    column = tl.program_id(2) % SLICES * SLICE + tl.arange(0, SLICE)
    k += start * ks0 + shared.to(tl.int64) * ks1
    v += start * vs0 + shared.to(tl.int64) * vs1
    made_k = tl.zeros([BLOCK, SLICE], tl.float32)
    made_v = tl.zeros([BLOCK, SLICE], tl.float32)
    rows = length
    key_place = key
    if TREE:
        rows = (tl.load(tree + tl.num_programs(1) + tl.program_id(1)) - start).to(tl.int32)
        places += start
        key_place = tl.load(places) + key
    end = rows
    if WINDOW > 0 and not TREE:
        end = tl.minimum(length, first + BLOCK + WINDOW - 1)
    begin = first // STEP * STEP
    if not CAUSAL:
        begin = first_seen(first, STEP, WINDOW)
    for member in range(MEMBERS):
        head = (part * MEMBERS + member).to(tl.int64)
        queries = q + start * qs0 + head * qs1
        gradients = grad + start * gs0 + head * gs1
        for at in range(begin, end, STEP):
            row = at + tl.arange(0, STEP)
            row_place = row
            if WINDOW > 0 and TREE:
                row_place = tl.load(places + row, mask=row < rows, other=0)
            weights, change = _weights_and_slopes(
                *(queries, k, v, gradients, row, key, rows, length, row_place, key_place),
                *(logsumexp + head * total + start, delta + head * total + start, qs0, ks0, vs0, gs0),
                *(seed, start, head, CAUSAL, THRESHOLD),
                *(WIDTH, SCALE, SOFTCAP, WINDOW, STEP, BLOCK, CHUNK, PARTS),
            )
            inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
            g = tl.load(gradients + row[:, None].to(tl.int64) * gs0 + column[None, :], mask=inside, other=0.0)
            made_v = tl.dot(tl.trans(weights.to(g.dtype)), g, made_v, input_precision="ieee")
            x = tl.load(queries + row[:, None].to(tl.int64) * qs0 + column[None, :], mask=inside, other=0.0)
            made_k = tl.dot(tl.trans(change.to(x.dtype)), x, made_k, input_precision="ieee")
    place = ((start + key) * (HEADS // MEMBERS) + part)[:, None] * WIDTH + column[None, :]
    inside = (key < length)[:, None] & (column < WIDTH)[None, :]
    tl.store(dk + place, made_k.to(dk.dtype.element_ty), mask=inside)
    tl.store(dv + place, made_v.to(dv.dtype.element_ty), mask=inside)


@triton.jit
def queries_kernel(
    q,
    k,
    v,
    grad,
    logsumexp,
    delta,
    dq,
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
    vs1,
    gs0,
    gs1,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
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
    """dq of BLOCK queries, from STEP keys at a time."""
    first = tl.program_id(0) * BLOCK
    start = tl.load(offsets + tl.program_id(1))
    length = tl.load(offsets + tl.program_id(1) + 1) - start
    if first >= length:
        return
    start = start.to(tl.int64)
    head = (tl.program_id(2) // SLICES).to(tl.int64)
    row = first + tl.arange(0, BLOCK)
    column = tl.program_id(2) % SLICES * SLICE + tl.arange(0, SLICE)
    q += start * qs0 + head * qs1
    grad += start * gs0 + head * gs1
    k += head // SHARED * ks1
    v += head // SHARED * vs1
    logsumexp += head * total + start
    delta += head * total + start
    own_k = k + start * ks0
    own_v = v + start * vs0
    made = tl.zeros([BLOCK, SLICE], tl.float32)
    end = last_seen(first, length, CAUSAL, WINDOW, BLOCK)
    for at in range(first_seen(first, STEP, WINDOW), end, STEP):
        key = at + tl.arange(0, STEP)
        _, change = _weights_and_slopes(
            *(q, own_k, own_v, grad, row, key, length, length, row, key, logsumexp, delta, qs0, ks0, vs0, gs0),
            *(seed, start, head, CAUSAL, THRESHOLD),
            *(WIDTH, SCALE, SOFTCAP, WINDOW, BLOCK, STEP, CHUNK, PARTS),
        )
        inside = (key < length)[:, None] & (column < WIDTH)[None, :]
        x = tl.load(own_k + key[:, None].to(tl.int64) * ks0 + column[None, :], mask=inside, other=0.0)
        made = tl.dot(change.to(x.dtype), x, made, input_precision="ieee")
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
                _, change = _weights_and_slopes(
                    *(q, above_k, above_v, grad, row, key, length, keys, row + further, key),
                    *(logsumexp, delta, qs0, ks0, vs0, gs0, seed, start, head, False, 0),
                    *(WIDTH, SCALE, SOFTCAP, WINDOW, BLOCK, STEP, CHUNK, PARTS),
                )
                inside = (key < keys)[:, None] & (column < WIDTH)[None, :]
                x = tl.load(above_k + key[:, None].to(tl.int64) * ks0 + column[None, :], mask=inside, other=0.0)
                made = tl.dot(change.to(x.dtype), x, made, input_precision="ieee")
            above = tl.load(tree + above)
    place = ((start + row) * HEADS + head)[:, None] * WIDTH + column[None, :]
    tl.store(dq + place, made.to(dq.dtype.element_ty), mask=(row < length)[:, None] & (column < WIDTH)[None, :])


def _arguments(
    grad,
    q,
    k,
    v,
    logsumexp,
    delta,
    offsets,
    scale,
    window,
    softcap,
    *,
    causal=True,
    dropped=None,
    tree=None,
    places=None,
    tile=None,
):
    """(tensors before gradients, tensors behind them, strides, constants) of both kernels.

    Raises:
        ValueError: shapes or strides do not fit.
    """
    q, k, v, grad = checked(q, k, v, grad)
    if not logsumexp.is_contiguous() or not delta.is_contiguous():
        raise ValueError("logsumexp and delta must be contiguous")
    tile, constants = widths("attention_backward", q, tile)
    strides = [size for each in (q, k, v, grad) for size in each.stride()[:2]]
    constants |= {"HEADS": q.shape[1], "SHARED": q.shape[1] // k.shape[1]}
    constants |= {"SCALE": float(scale), "SOFTCAP": float(softcap), "WINDOW": int(window)}
    tree, places, constants["TREE"] = tree_of(q, offsets, tree, places)
    seed, drop = dropped_of(offsets, dropped)
    constants |= {"CAUSAL": causal, **drop}
    constants |= {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return (q, k, v, grad, logsumexp, delta), (offsets, tree, places, seed), strides, constants


def gradients_of_keys(grad, q, k, v, logsumexp, delta, offsets, longest, scale, window=0, softcap=0.0, **named):
    """(dk, dv): the part of ``backward`` that is theirs. Arguments and errors are the same, also the named ones.

    In a tree they are in fp32 and of each head of q, [N, H, D]: the few keys of a prefix have the queries of all
    branches, so that there is a program for each of these heads.
    """
    given, where, strides, constants = _arguments(
        grad, q, k, v, logsumexp, delta, offsets, scale, window, softcap, **named
    )
    parts = constants["SHARED"] if constants["TREE"] else 1
    constants["MEMBERS"] = constants["SHARED"] // parts
    total, heads, dtype = q.shape[0], k.shape[1] * parts, torch.float32 if constants["TREE"] else k.dtype
    dk, dv = (torch.empty((total, heads, k.shape[2]), dtype=dtype, device=k.device) for _ in range(2))
    grid = triton.cdiv(longest, constants["BLOCK"]), offsets.shape[0] - 1, heads * constants["SLICES"]
    launch(keys_kernel, grid, *given, dk, dv, *where, total, *strides, **constants)
    return dk, dv


def gradients_of_queries(grad, q, k, v, logsumexp, delta, offsets, longest, scale, window=0, softcap=0.0, **named):
    """dq: the part of ``backward`` that is theirs. Arguments and errors are the same, also the named ones."""
    given, where, strides, constants = _arguments(
        grad, q, k, v, logsumexp, delta, offsets, scale, window, softcap, **named
    )
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    grid = triton.cdiv(longest, constants["BLOCK"]), offsets.shape[0] - 1, q.shape[1] * constants["SLICES"]
    launch(queries_kernel, grid, *given, dq, *where, q.shape[0], *strides, **constants)
    return dq


def backward(
    grad,
    q,
    k,
    v,
    logsumexp,
    delta,
    offsets,
    longest,
    scale,
    window=0,
    softcap=0.0,
    *,
    tree=None,
    **named,
):
    """The gradients of ``forward``, also of one whose result was scaled by what else is in its softmax.

    Args:
        grad: of out, [N, H, D] in its dtype.
        q: queries. This, k, v, offsets, all behind it and what is named: as for ``forward``.
        logsumexp: fp32 [H, N], of all that is in the softmax.
        delta: fp32 [H, N], the sums of grad * out over columns.

    Returns:
        (dq, dk, dv), contiguous, in shape and dtype of q, k and v.

    Raises:
        ValueError: shapes or strides do not fit.
    """
    rest = (logsumexp, delta, offsets, longest, scale, window, softcap)
    named["tree"] = tree
    keys = gradients_of_keys(grad, q, k, v, *rest, **named)
    if tree is not None:
        keys = (each.unflatten(1, (k.shape[1], -1)).sum(2).to(k.dtype) for each in keys)
    return gradients_of_queries(grad, q, k, v, *rest, **named), *keys
