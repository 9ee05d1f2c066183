"""The softmax of causal scores that are in memory, between two products, and its backward.

A program of the first owns a row and reads it twice: the sums are those of an online softmax
(https://arxiv.org/abs/1805.02867). A program of the second owns a part of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .._launch import launch, next_power_of_2

__all__ = ["softmax", "softmax_backward"]

BLOCK = 1024  #: scores that a program has at a time, at most


@triton.jit
def softmax_kernel(scores, weights, sums, logsumexp, first, queries, keys, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    last = first + row % queries  # the key that the query sees last
    scores += row.to(tl.int64) * keys
    weights += row.to(tl.int64) * keys
    highest = float("-inf")
    total = 0.0
    for begin in range(0, last + 1, BLOCK):
        key = begin + tl.arange(0, BLOCK)
        # a mask that follows the row would be one for each element, and loads as narrow
        score = tl.load(scores + key, mask=key < keys, other=float("-inf")) * SCALE
        score = tl.where(key <= last, score, float("-inf"))
        now = tl.maximum(highest, tl.max(score, 0))
        total = total * tl.exp(highest - now) + tl.sum(tl.exp(score - now), 0)
        highest = now
    tl.store(sums + row, total)
    tl.store(logsumexp + row, highest + tl.log(total))
    for begin in range(0, keys, BLOCK):
        key = begin + tl.arange(0, BLOCK)
        weight = tl.zeros([BLOCK], tl.float32)
        if begin <= last:
            score = tl.load(scores + key, mask=key < keys, other=float("-inf")) * SCALE
            weight = tl.where(key <= last, tl.exp(score - highest), 0.0)
        tl.store(weights + key, weight.to(weights.dtype.element_ty), mask=key < keys)


@triton.jit
def softmax_backward_kernel(
    scores,
    dweights,
    weights,
    dscores,
    logsumexp,
    delta,
    first,
    queries,
    keys,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    last = first + row % queries
    key = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = row.to(tl.int64) * keys + key
    weight = tl.zeros([BLOCK], tl.float32)
    slope = tl.zeros([BLOCK], tl.float32)
    if tl.program_id(1) * BLOCK <= last:
        score = tl.load(scores + place, mask=key < keys, other=float("-inf")) * SCALE
        dweight = tl.load(dweights + place, mask=key < keys, other=0.0)
        weight = tl.where(key <= last, tl.exp(score - tl.load(logsumexp + row)), 0.0)
        slope = tl.where(key <= last, weight * (dweight - tl.load(delta + row)) * SCALE, 0.0)
    tl.store(weights + place, weight.to(weights.dtype.element_ty), mask=key < keys)
    tl.store(dscores + place, slope.to(dscores.dtype.element_ty), mask=key < keys)


def softmax(scores, first, queries, scale, dtype):
    """The softmax of causal scores, before it is divided by its sums: the largest weight is 1, which is exact.

    Args:
        scores: fp32 [S, R, K], contiguous: products of queries and keys, `queries` of each head, head by head.
        first: the place of a head's first query; keys begin at 0.
        queries: R divides by it.
        scale: of the scores.
        dtype: of the weights.

    Returns:
        (weights, sums, logsumexp): [S, R, K], 0 behind a query, and fp32 [S, R] twice.
    """
    rows, keys = scores.shape[0] * scores.shape[1], scores.shape[2]
    weights = torch.empty(scores.shape, dtype=dtype, device=scores.device)
    sums, logsumexp = (torch.empty(scores.shape[:2], dtype=torch.float32, device=scores.device) for _ in range(2))
    block = min(BLOCK, next_power_of_2(keys))
    launch(
        softmax_kernel,
        (rows,),
        *(scores, weights, sums, logsumexp, first, queries, keys),
        **dict(SCALE=float(scale), BLOCK=block, num_warps=4),
    )
    return weights, sums, logsumexp


def softmax_backward(scores, dweights, logsumexp, delta, first, queries, scale, dtype):
    """The softmax of causal scores, and the gradient of these.

    Args:
        scores: this, first, queries, scale and dtype: as for ``softmax``.
        dweights: fp32 [S, R, K], contiguous: the gradient of the weights.
        logsumexp: fp32 [S, R], contiguous.
        delta: fp32 [S, R], contiguous: the sums of weights * dweights over keys.

    Returns:
        (weights, dscores), [S, R, K], 0 behind a query.
    """
    rows, keys = scores.shape[0] * scores.shape[1], scores.shape[2]
    weights, dscores = (torch.empty(scores.shape, dtype=dtype, device=scores.device) for _ in range(2))
    block = min(BLOCK, next_power_of_2(keys))
    launch(
        softmax_backward_kernel,
        (rows, triton.cdiv(keys, block)),
        *(scores, dweights, weights, dscores, logsumexp, delta, first, queries, keys),
        **dict(SCALE=float(scale), BLOCK=block, num_warps=4),
    )
    return weights, dscores
