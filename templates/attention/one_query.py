"""Attention of one query a row over a cache of keys and values, whose tokens are split over programs.

A row of a rollout has one query: heads and rows alone would leave most of a GPU idle. So each program takes a part of
the keys of one head, for all queries that share it, and keeps a maximum, a sum and a weighted sum of values;
`combine_kernel` joins them (Flash-Decoding: https://pytorch.org/blog/flash-decoding), and the sink of a head, one more
score without a value. Keys that the mask hides are not read."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .._launch import launch, next_power_of_2

__all__ = ["combine", "forward", "split"]

PROGRAMS = 512  #: of one call, about: heads of all rows, and parts of the keys
MOST = 32  #: parts
STEP = 64  #: keys at once
LOG2E = tl.constexpr(1.4426950408889634)
#: half of fp16's least number: what is added to a score that counts for nothing is less
HIDDEN = tl.constexpr(-32752.0)


@triton.jit
def _mask(mask, token, end, stride, ADDED: tl.constexpr):
    """(Which keys are seen, what is added to their scores)."""
    if ADDED:
        added = tl.load(mask + token * stride, mask=token < end, other=-float("inf")).to(tl.float32)
        return added > HIDDEN, tl.where(added > HIDDEN, added, 0.0)
    else:
        seen = tl.load(mask + token * stride, mask=token < end, other=0) != 0
        return seen, seen


@triton.jit
def part_kernel(
    q,
    k,
    v,
    mask,
    sums,  # [rows, heads of keys, PARTS, GROUP, D]
    tops,  # [rows, heads of keys, PARTS, 2, GROUP]: maxima in units of log 2, and sums
    length,
    q_row,
    q_head,
    k_row,
    k_head,
    k_token,
    v_row,
    v_head,
    v_token,
    mask_row,
    mask_token,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,  # 0: none
    ADDED: tl.constexpr,  # whether the mask is added
    GROUP: tl.constexpr,  # heads of queries that share one of keys
    D: tl.constexpr,
    PARTS: tl.constexpr,
    STEP: tl.constexpr,
    GROUP_POW2: tl.constexpr,
    D_POW2: tl.constexpr,
):
    """Program (row, head of keys, part)."""
    row, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    g, d = tl.arange(0, GROUP_POW2), tl.arange(0, D_POW2)
    mine = (g < GROUP)[:, None] & (d < D)[None, :]
    query = tl.load(q + row * q_row + (head * GROUP + g)[:, None] * q_head + d[None, :], mask=mine, other=0.0)
    k += row * k_row + head * k_head
    v += row * v_row + head * v_head
    each = tl.cdiv(tl.cdiv(length, PARTS), STEP) * STEP
    top = tl.full([GROUP_POW2], -1.0e38, tl.float32)
    total = tl.zeros([GROUP_POW2], tl.float32)
    out = tl.zeros([GROUP_POW2, D_POW2], tl.float32)
    begin, end = part * each, tl.minimum(part * each + each, length)
    mask += row * mask_row
    token = begin + tl.arange(0, STEP)
    seen, added = _mask(mask, token, end, mask_token, ADDED)
    for _ in range(begin, end, STEP):
        at = token.to(tl.int64)
        there = seen[:, None] & (d < D)[None, :]
        keys = tl.load(k + at[:, None] * k_token + d[None, :], mask=there, other=0.0)
        values = tl.load(v + at[:, None] * v_token + d[None, :], mask=there, other=0.0)
        token += STEP
        then, add = _mask(mask, token, end, mask_token, ADDED)  # loads of keys would wait for it
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * SCALE
        if SOFTCAP > 0:  # c tanh(s / c)
            scores = SOFTCAP - 2 * SOFTCAP / (1 + tl.exp2(scores * (2 * LOG2E / SOFTCAP)))
        if ADDED:
            scores += added[None, :]
        scores *= LOG2E
        scores = tl.where(seen[None, :], scores, -1.0e38)
        new = tl.maximum(top, tl.max(scores, 1))
        weights = tl.where(seen[None, :], tl.exp2(scores - new[:, None]), 0.0)
        shrink = tl.exp2(top - new)
        total = total * shrink + tl.sum(weights, 1)
        out = out * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        top, seen, added = new, then, add
    place = (row * tl.num_programs(1) + head) * PARTS + part
    tl.store(sums + place * GROUP * D + g[:, None] * D + d[None, :], out, mask=mine)
    tl.store(tops + place * 2 * GROUP + g, top, mask=g < GROUP)
    tl.store(tops + place * 2 * GROUP + GROUP + g, total, mask=g < GROUP)


@triton.jit
def _of_hidden(v, mask, length, token_stride, mask_stride, d, D: tl.constexpr, STEP: tl.constexpr):
    """The values of keys that are all hidden, weighed by what is added: beside it scores vanish."""
    top = -float("inf")
    for begin in range(0, length, STEP):
        token = begin + tl.arange(0, STEP)
        added = tl.load(mask + token * mask_stride, mask=token < length, other=-float("inf")).to(tl.float32)
        top = tl.maximum(top, tl.max(added, 0))
    whole, made = 0.0, tl.zeros([d.shape[0]], tl.float32)
    for begin in range(0, length, STEP):
        token = begin + tl.arange(0, STEP)
        added = tl.load(mask + token * mask_stride, mask=token < length, other=-float("inf")).to(tl.float32)
        weights = tl.exp(added - top)
        there = (token < length)[:, None] & (d < D)[None, :]
        values = tl.load(v + token[:, None].to(tl.int64) * token_stride + d[None, :], mask=there, other=0.0)
        whole += tl.sum(weights, 0)
        made += tl.sum(weights[:, None] * values, 0)
    return made / whole


@triton.jit
def combine_kernel(
    sums,
    tops,
    v,
    mask,
    sinks,  # [heads], or None
    out,  # [rows, heads, 1, D], contiguous
    length,
    v_row,
    v_head,
    v_token,
    mask_row,
    mask_token,
    HEADS: tl.constexpr,  # of keys
    SINKS: tl.constexpr,
    ADDED: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    PARTS: tl.constexpr,
    D_POW2: tl.constexpr,
    STEP: tl.constexpr,
):
    """Program (row and head of keys, query of its group)."""
    place, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    part, d = tl.arange(0, PARTS), tl.arange(0, D_POW2)
    at = (place * PARTS + part) * 2 * GROUP + g
    top, total = tl.load(tops + at), tl.load(tops + at + GROUP)
    most = tl.max(top, 0)
    sink = most
    if SINKS:
        sink = tl.load(sinks + place % HEADS * GROUP + g).to(tl.float32) * LOG2E
        most = tl.maximum(most, sink)
    share = tl.exp2(top - most)
    whole = tl.sum(total * share, 0)
    if SINKS:
        whole += tl.exp2(sink - most)
    there = (d < D)[None, :]
    parts = tl.load(sums + ((place * PARTS + part) * GROUP + g)[:, None] * D + d[None, :], mask=there, other=0.0)
    made = tl.sum(parts * share[:, None], 0) / tl.where(whole == 0, 1.0, whole)
    if ADDED:
        if whole == 0:
            row, head = place // HEADS, place % HEADS
            v += row * v_row + head * v_head
            made = _of_hidden(v, mask + row * mask_row, length, v_token, mask_token, d, D, STEP)
    tl.store(out + (place * GROUP + g) * D + d, made, mask=d < D)


def forward(q, k, v, mask, scale, sinks=None, softcap=0.0):
    """Attention of one query a row.

    Args:
        q: [B, H, 1, D], bf16 or fp16, unit stride in D.
        k: [B, K, L, D], unit stride in D, where K divides H.
        v: as k.
        mask: [B or 1, 1, 1, L]: bool, where the query sees the key, or floating, what is added to its score. A query
            that sees none by the first kind gives 0.
        scale: of the scores.
        sinks: [H], any floating dtype, contiguous, or None.
        softcap: c of c tanh(score / c), before the mask; 0 for none.

    Returns:
        [B, H, 1, D], in q's dtype.
    """
    return combine(*split(q, k, v, mask, scale, softcap), v, mask, sinks)


def split(q, k, v, mask, scale, softcap=0.0):
    """Parts of the keys, each by a program. Arguments: as `forward`.

    Returns:
        (sums, tops), fp32 [B, K, P, H / K, D] and [B, K, P, 2, H / K]: weighted sums of values; maxima of the scores in
        units of log 2, and sums of weights.
    """
    (rows, _, _, width), heads, shared = q.shape, k.shape[1], q.shape[1] // k.shape[1]
    parts = min(MOST, max(4, next_power_of_2(PROGRAMS // (rows * heads))))
    sums = torch.empty(rows, heads, parts, shared, width, dtype=torch.float32, device=q.device)
    tops = torch.empty(rows, heads, parts, 2, shared, dtype=torch.float32, device=q.device)
    launch(
        part_kernel,
        (rows, heads, parts),
        *(q, k, v, mask, sums, tops),
        *(k.shape[2], q.stride(0), q.stride(1)),
        *k.stride()[:3],
        *v.stride()[:3],
        *_strides(mask),
        **dict(
            SCALE=scale, SOFTCAP=softcap, ADDED=mask.dtype != torch.bool, GROUP=shared, D=width, PARTS=parts, STEP=STEP
        ),
        **dict(GROUP_POW2=max(16, next_power_of_2(shared)), D_POW2=max(16, next_power_of_2(width))),
        **dict(num_warps=4, num_stages=2),
    )
    return sums, tops


def combine(sums, tops, v, mask, sinks=None):
    """The attention of all parts: [B, H, 1, D] in v's dtype, from the results of `split`. Others: as `forward`."""
    rows, heads, parts, shared, width = sums.shape
    out = torch.empty(rows, heads * shared, 1, width, dtype=v.dtype, device=sums.device)
    launch(
        combine_kernel,
        (rows * heads, shared),
        *(sums, tops, v, mask, sinks, out),
        *(v.shape[2], *v.stride()[:3], *_strides(mask)),
        **dict(HEADS=heads, SINKS=sinks is not None, ADDED=mask.dtype != torch.bool, GROUP=shared, D=width),
        **dict(PARTS=parts, D_POW2=max(16, next_power_of_2(width)), STEP=16, num_warps=1, num_stages=1),
    )
    return out


def _strides(mask):
    """Of its rows and keys."""
    return mask.stride(0) if mask.shape[0] > 1 else 0, mask.stride(3)
