"""Cross entropy of one chunk of logits and its gradient, written over the logits.

A program owns a row: one pass for the log-sum-exp (online softmax, https://arxiv.org/abs/1805.02867), one pass that
reads the row again, backwards so that it finds in L2 what the first pass left there, and writes the gradient. Two
reads and one write of the logits are the least there can be, and no fp32 copy of them exists.

At full memory rate an SM has some 40 instructions for an element, both passes together. So: every group of 8 lanes
(16 bytes, all in one thread) keeps its own running maximum and sum, and the loop has no reduction over threads, no
barrier and an eighth of the rescaling; exponentials are base 2, a multiply-add and one instruction; padding is loaded
as -inf, not masked; and the label's own element is stored once at the end, not compared for in every lane."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import _tiles
from ._launch import launch, next_power_of_2

__all__ = ["loss_and_grad_"]

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _scaled(x, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """z = softcap * tanh(scale * x / softcap), or scale * x, and dz/dx."""
    if SOFTCAP > 0:
        s = 1.0 / (1.0 + tl.exp2(x * (-2.0 * LOG2E * SCALE / SOFTCAP)))
        return SOFTCAP * (2.0 * s - 1.0), (4.0 * SCALE) * s * (
            1.0 - s
        )  # tanh(u) = 2 s(2u) - 1; 1 - tanh(u)^2 = 4 s (1 - s)
    else:
        return x * SCALE, SCALE


@triton.jit
def loss_and_grad_kernel(
    logits,
    labels,
    losses,
    lses,
    factors,
    stride_row,
    ignore_index,
    V: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,  # SCALE > 0; SOFTCAP 0: none
    SMOOTHING: tl.constexpr,
    Z_LOSS: tl.constexpr,
    GRAD: tl.constexpr,
    FACTORS: tl.constexpr,
    GROUPS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One row: loss = lse - (1 - s) z[label] - s mean(z) + Z_LOSS lse^2.

    The logits are overwritten by d loss / d logits, times the row's factor.
    """
    pid = tl.program_id(0)
    row = logits + pid.to(tl.int64) * stride_row
    label = tl.load(labels + pid)
    BLOCK: tl.constexpr = 8 * GROUPS
    LAST: tl.constexpr = (V - 1) // BLOCK * BLOCK
    lane = tl.arange(0, GROUPS)[:, None] * 8 + tl.arange(0, 8)[None, :]
    if label == ignore_index:
        tl.store(losses + pid, 0.0)
        tl.store(lses + pid, 0.0)
        if GRAD:
            for start in range(0, V, BLOCK):
                tl.store(row + start + lane, tl.zeros([GROUPS, 8], logits.dtype.element_ty), mask=start + lane < V)
    else:
        top = tl.full([GROUPS], -1.0e38, tl.float32)  # finite, also times LOG2E: -inf minus -inf would be NaN
        total = tl.zeros([GROUPS], tl.float32)
        plain = tl.zeros([GROUPS], tl.float32)
        for start in tl.range(0, V, BLOCK, num_stages=STAGES):
            inside = start + lane < V
            x = tl.load(row + start + lane, mask=inside, other=float("-inf")).to(tl.float32)
            z, _ = _scaled(x, SCALE, SOFTCAP)
            if SOFTCAP > 0:
                z = tl.where(inside, z, float("-inf"))
            if SMOOTHING > 0:
                plain += tl.sum(tl.where(inside, z, 0.0), 1)
            new = tl.maximum(top, tl.max(z, 1))
            total = total * tl.exp2((top - new) * LOG2E) + tl.sum(tl.exp2(z * LOG2E - (new * LOG2E)[:, None]), 1)
            top = new
        # A label out of range gives a NaN loss, not an access out of bounds. Read before the row is overwritten.
        in_range = (label >= 0) & (label < V)
        target = tl.load(row + label, mask=in_range, other=float("nan")).to(tl.float32)
        target, target_slope = _scaled(target, SCALE, SOFTCAP)
        maximum = tl.max(top, 0)
        lse = maximum + tl.log(tl.sum(total * tl.exp2((top - maximum) * LOG2E), 0))
        loss = lse - target
        if SMOOTHING > 0:
            loss = lse - (1.0 - SMOOTHING) * target - (SMOOTHING / V) * tl.sum(plain, 0)
        if Z_LOSS > 0:
            loss += Z_LOSS * lse * lse
        tl.store(losses + pid, loss)
        tl.store(lses + pid, lse)
        if GRAD:
            tl.debug_barrier()  # every thread has read the label's logit
            weight = 1.0
            if Z_LOSS > 0:
                weight = 1.0 + 2.0 * Z_LOSS * lse
            factor = 1.0
            if FACTORS:
                factor = tl.load(factors + pid).to(tl.float32)
            for back in tl.range(0, V, BLOCK, num_stages=STAGES):
                column = LAST - back + lane
                inside = column < V
                x = tl.load(row + column, mask=inside, other=float("-inf")).to(tl.float32)
                z, slope = _scaled(x, SCALE, SOFTCAP)
                g = tl.exp2(z * LOG2E - lse * LOG2E) * weight
                if SMOOTHING > 0:
                    g -= SMOOTHING / V
                tl.store(row + column, (g * slope * factor).to(logits.dtype.element_ty), mask=inside)
            tl.debug_barrier()  # every thread has written its part: now the label's element
            g = tl.exp2(target * LOG2E - lse * LOG2E) * weight - (1.0 - SMOOTHING) - SMOOTHING / V
            tl.store(row + label, (g * target_slope * factor).to(logits.dtype.element_ty), mask=in_range)


def loss_and_grad_(
    logits,
    labels,
    *,
    ignore_index=-100,
    softcap=None,
    scale=1.0,
    label_smoothing=0.0,
    z_loss=0.0,
    grad=True,
    factors=None,
    tile=None,
):
    """Return loss and log-sum-exp of each row; with ``grad``, overwrite ``logits`` by their gradient.

    The gradient is that of the sum of factors times losses.

    The loss is taken of z = softcap * tanh(scale * logits / softcap) (``scale * logits`` without a soft-cap), in
    fp32. Online softmax: Milakov & Gimelshein, 2018, arXiv:1805.02867.

    Args:
        logits: [rows, V], bf16, fp16 or fp32, unit column stride.
        labels: [rows], int64 or int32, contiguous. One out of range gives a NaN loss.
        ignore_index: label of rows that have loss, lse and gradient 0 and are not read.
        softcap: c of c * tanh(z / c), in the units of the logits; None for none.
        scale: a positive factor of the logits.
        label_smoothing: the share, 0 to 1, of the target that is spread over all classes.
        z_loss: factor of lse^2, which the loss contains (PaLM: Chowdhery et al., 2022, arXiv:2204.02311).
        grad: whether ``logits`` become the gradient.
        factors: [rows], fp32, contiguous: of each row's gradient, not of its loss; None for ones.
        tile: a ``_tiles.Tile`` in place of the table's.

    Returns:
        (loss, lse), fp32 [rows] each.

    Raises:
        ValueError: shapes or strides do not fit, or the scale is not positive.
    """
    rows, vocabulary = logits.shape
    if logits.stride(1) != 1 or labels.shape != (rows,) or not labels.is_contiguous():
        raise ValueError(
            f"logits {tuple(logits.shape)} with strides {logits.stride()} and labels {tuple(labels.shape)}"
        )
    if factors is not None and (factors.shape != (rows,) or not factors.is_contiguous()):
        raise ValueError(f"{tuple(factors.shape)} factors for {rows} rows")
    tile = tile or _tiles.pick("cross_entropy", logits, vocabulary)
    if scale <= 0:
        raise ValueError(f"the scale of logits must be positive, not {scale}")
    # at least one group a thread: with fewer, two threads would own an element, and one could read the other's write
    groups = max(min(tile.block, next_power_of_2(vocabulary)) // 8, 32 * tile.num_warps)
    loss = torch.empty(rows, dtype=torch.float32, device=logits.device)
    lse = torch.empty_like(loss)
    launch(
        loss_and_grad_kernel,
        (rows,),
        logits,
        labels,
        loss,
        lse,
        labels if factors is None else factors,
        logits.stride(0),
        ignore_index,
        V=vocabulary,
        SCALE=float(scale),
        SOFTCAP=float(softcap or 0.0),
        SMOOTHING=float(label_smoothing),
        Z_LOSS=float(z_loss),
        GRAD=bool(grad),
        FACTORS=factors is not None,
        GROUPS=groups,
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
    )
    return loss, lse
