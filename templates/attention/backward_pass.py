"""Attention over documents, backward: two passes, by keys and by queries, each of which recomputes the scores.

A program of the first owns keys of one head, for all heads of q that share it, so their gradients are summed in
registers and in order; a program of the second owns queries. As in `forward_pass`, heads are read in chunks and results
are written in slices. (FlashAttention: https://arxiv.org/abs/2205.14135.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .._launch import launch
from .forward_pass import capped, checked, chunk_product, widths

__all__ = ["backward", "gradients_of_keys", "gradients_of_queries"]


@triton.jit
def _weights_and_slopes(
    q,
    k,
    v,
    grad,
    row,
    key,
    logsumexp,
    delta,
    length,
    qs0,
    ks0,
    vs0,
    gs0,
    WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Of queries `row` (BLOCK) and keys (STEP): the softmax's weights, and the gradients of the products."""
    product = tl.zeros([BLOCK, STEP], tl.float32)
    product = chunk_product(q, k, row, key, WIDTH, qs0, ks0, length, length, product, CHUNK, PARTS)
    scores, slope = capped(product, SCALE, SOFTCAP)
    seen = (key[None, :] <= row[:, None]) & (row < length)[:, None]
    if WINDOW > 0:
        seen = seen & (row[:, None] - key[None, :] < WINDOW)
    level = tl.load(logsumexp + row, mask=row < length, other=0.0)
    weights = tl.exp(tl.where(seen, scores - level[:, None], float("-inf")))
    change = tl.zeros([BLOCK, STEP], tl.float32)
    change = chunk_product(grad, v, row, key, WIDTH, gs0, vs0, length, length, change, CHUNK, PARTS)
    mean = tl.load(delta + row, mask=row < length, other=0.0)
    return weights, weights * (change - mean[:, None]) * slope * SCALE


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
    shared = tl.program_id(2) // SLICES
    key = first + tl.arange(0, BLOCK)
    column = tl.program_id(2) % SLICES * SLICE + tl.arange(0, SLICE)
    k += start * ks0 + shared.to(tl.int64) * ks1
    v += start * vs0 + shared.to(tl.int64) * vs1
    made_k = tl.zeros([BLOCK, SLICE], tl.float32)
    made_v = tl.zeros([BLOCK, SLICE], tl.float32)
    end = length
    if WINDOW > 0:
        end = tl.minimum(length, first + BLOCK + WINDOW - 1)
    for member in range(SHARED):
        head = (shared * SHARED + member).to(tl.int64)
        queries = q + start * qs0 + head * qs1
        gradients = grad + start * gs0 + head * gs1
        for at in range(first // STEP * STEP, end, STEP):
            row = at + tl.arange(0, STEP)
            weights, change = _weights_and_slopes(
                queries,
                k,
                v,
                gradients,
                row,
                key,
                logsumexp + head * total + start,
                delta + head * total + start,
                length,
                qs0,
                ks0,
                vs0,
                gs0,
                WIDTH,
                SCALE,
                SOFTCAP,
                WINDOW,
                STEP,
                BLOCK,
                CHUNK,
                PARTS,
            )
            inside = (row < length)[:, None] & (column < WIDTH)[None, :]
            g = tl.load(gradients + row[:, None].to(tl.int64) * gs0 + column[None, :], mask=inside, other=0.0)
            made_v = tl.dot(tl.trans(weights.to(g.dtype)), g, made_v, input_precision="ieee")
            x = tl.load(queries + row[:, None].to(tl.int64) * qs0 + column[None, :], mask=inside, other=0.0)
            made_k = tl.dot(tl.trans(change.to(x.dtype)), x, made_k, input_precision="ieee")
    place = ((start + key) * (HEADS // SHARED) + shared)[:, None] * WIDTH + column[None, :]
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
    k += start * ks0 + head // SHARED * ks1
    v += start * vs0 + head // SHARED * vs1
    made = tl.zeros([BLOCK, SLICE], tl.float32)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first - WINDOW + 1, 0) // STEP * STEP
    for at in range(begin, tl.minimum(first + BLOCK, length), STEP):
        key = at + tl.arange(0, STEP)
        _, change = _weights_and_slopes(
            q,
            k,
            v,
            grad,
            row,
            key,
            logsumexp + head * total + start,
            delta + head * total + start,
            length,
            qs0,
            ks0,
            vs0,
            gs0,
            WIDTH,
            SCALE,
            SOFTCAP,
            WINDOW,
            BLOCK,
            STEP,
            CHUNK,
            PARTS,
        )
        inside = (key < length)[:, None] & (column < WIDTH)[None, :]
        x = tl.load(k + key[:, None].to(tl.int64) * ks0 + column[None, :], mask=inside, other=0.0)
        made = tl.dot(change.to(x.dtype), x, made, input_precision="ieee")
    place = ((start + row) * HEADS + head)[:, None] * WIDTH + column[None, :]
    tl.store(dq + place, made.to(dq.dtype.element_ty), mask=(row < length)[:, None] & (column < WIDTH)[None, :])


def _arguments(grad, q, k, v, logsumexp, delta, scale, window, softcap, tile):
    """(tensors, strides, constants) of both kernels.

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
    constants |= {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return (q, k, v, grad, logsumexp, delta), strides, constants


def gradients_of_keys(grad, q, k, v, logsumexp, delta, offsets, longest, scale, window=0, softcap=0.0, *, tile=None):
    """(dk, dv): the part of ``backward`` that is theirs. Arguments and errors are the same."""
    given, strides, constants = _arguments(grad, q, k, v, logsumexp, delta, scale, window, softcap, tile)
    dk, dv = (torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in (k, v))
    grid = triton.cdiv(longest, constants["BLOCK"]), offsets.shape[0] - 1, k.shape[1] * constants["SLICES"]
    launch(keys_kernel, grid, *given, dk, dv, offsets, q.shape[0], *strides, **constants)
    return dk, dv


def gradients_of_queries(grad, q, k, v, logsumexp, delta, offsets, longest, scale, window=0, softcap=0.0, *, tile=None):
    """dq: the part of ``backward`` that is theirs. Arguments and errors are the same."""
    given, strides, constants = _arguments(grad, q, k, v, logsumexp, delta, scale, window, softcap, tile)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    grid = triton.cdiv(longest, constants["BLOCK"]), offsets.shape[0] - 1, q.shape[1] * constants["SLICES"]
    launch(queries_kernel, grid, *given, dq, offsets, q.shape[0], *strides, **constants)
    return dq


def backward(grad, q, k, v, logsumexp, delta, offsets, longest, scale, window=0, softcap=0.0, *, tile=None):
    """The gradients of ``forward``, also of one whose result was scaled by what else is in its softmax.

    Args:
        grad: of out, [N, H, D] in its dtype.
        q: queries. This, k, v, offsets, longest, scale, window, softcap and tile: as for ``forward``.
        logsumexp: fp32 [H, N], of all that is in the softmax.
        delta: fp32 [H, N], the sums of grad * out over columns.

    Returns:
        (dq, dk, dv), contiguous, in shape and dtype of q, k and v.

    Raises:
        ValueError: shapes or strides do not fit.
    """
    rest = (logsumexp, delta, offsets, longest, scale, window, softcap)
    dk, dv = gradients_of_keys(grad, q, k, v, *rest, tile=tile)
    return gradients_of_queries(grad, q, k, v, *rest, tile=tile), dk, dv
