"""Cross entropy of one chunk of logits and its gradient, written over the logits.

A program computes a row in two passes. The first computes the log-sum-exp (online softmax,
https://arxiv.org/abs/1805.02867). The second reads the row in reverse, so that its end is still in L2, and writes the
gradient. Two reads and one write of the logits are the minimum, and there is no fp32 copy of them.

At full memory rate an SM has about 40 instructions per element for both passes. So every group of 8 elements (16 bytes,
all in one thread) has its own running maximum and sum: the loop has no reduction over threads, no barrier and an eighth
of the rescaling. Exponentials are base 2, a multiply-add and one instruction. Padding is loaded as -inf instead of
masked. The label's element is stored once at the end instead of compared with every element.

A row's loss has the same bits whichever outputs are wanted beside it: the policy that is trained and its copy that only
scores have to agree. So the compiler may not fuse a product into a sum where it likes; the sums that are worth it ask
for it by ``tl.fma``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import _tiles
from ._launch import launch, next_power_of_2

__all__ = ["STATISTICS", "loss_and_grad_", "statistics_and_grad_"]

#: of a row's distribution: its entropy, log(sum of p^2), the mean of its logits, whether the label is the first maximum
STATISTICS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _scaled(x, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """z = softcap * tanh(scale * x / softcap), or scale * x, and dz/dx."""
    if SOFTCAP > 0:
        s = 1.0 / (1.0 + tl.exp2(x * (-2.0 * LOG2E * SCALE / SOFTCAP)))
        # tanh(u) = 2 s(2u) - 1; 1 - tanh(u)^2 = 4 s (1 - s)
        return SOFTCAP * (2.0 * s - 1.0), (4.0 * SCALE) * s * (1.0 - s)
    else:
        return x * SCALE, SCALE


@triton.jit
def _exp(z, by):
    """2^(z LOG2E - by)."""
    return tl.exp2(tl.fma(z, LOG2E, -by))


@triton.jit
def loss_and_grad_kernel(
    logits,
    labels,
    losses,
    factors,
    entropies,
    squares,
    means,
    tops,
    entropy_factors,
    stride_row,
    ignore_index,
    V: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,  # SCALE > 0; SOFTCAP 0: none
    SMOOTHING: tl.constexpr,
    GRAD: tl.constexpr,
    FACTORS: tl.constexpr,
    ENTROPY: tl.constexpr,
    SQUARES: tl.constexpr,
    MEAN: tl.constexpr,
    TOP: tl.constexpr,
    ENTROPY_GRAD: tl.constexpr,
    GROUPS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One row: loss = lse - (1 - s) z[label] - s mean(z).

    The logits are overwritten by d loss / d logits times the row's factor. ENTROPY_GRAD adds d entropy / d logits times
    its own factor. Statistics are of labelled rows.
    """
    pid = tl.program_id(0)
    row = logits + pid.to(tl.int64) * stride_row
    label = tl.load(labels + pid)
    BLOCK: tl.constexpr = 8 * GROUPS
    LAST: tl.constexpr = (V - 1) // BLOCK * BLOCK
    lane = tl.arange(0, GROUPS)[:, None] * 8 + tl.arange(0, 8)[None, :]
    if label == ignore_index:
        tl.store(losses + pid, 0.0)
        if GRAD:
            for start in range(0, V, BLOCK):
                tl.store(row + start + lane, tl.zeros([GROUPS, 8], logits.dtype.element_ty), mask=start + lane < V)
    else:
        top = tl.full([GROUPS], -1.0e38, tl.float32)  # finite, also times LOG2E: -inf minus -inf would be NaN
        total = tl.zeros([GROUPS], tl.float32)
        plain = tl.zeros([GROUPS], tl.float32)
        weighted = tl.zeros([GROUPS], tl.float32)
        squared = tl.zeros([GROUPS], tl.float32)
        before = tl.full([GROUPS], -1.0e38, tl.float32)
        for start in tl.range(0, V, BLOCK, num_stages=STAGES):
            inside = start + lane < V
            x = tl.load(row + start + lane, mask=inside, other=float("-inf")).to(tl.float32)
            z, _ = _scaled(x, SCALE, SOFTCAP)
            if SOFTCAP > 0:
                z = tl.where(inside, z, float("-inf"))
            if SMOOTHING > 0 or MEAN:
                plain += tl.sum(tl.where(inside, z, 0.0), 1)
            if TOP:
                before = tl.maximum(before, tl.max(tl.where(start + lane < label, z, -1.0e38), 1))
            new = tl.maximum(top, tl.max(z, 1))
            shrink = tl.exp2((top - new) * LOG2E)
            e = _exp(z, (new * LOG2E)[:, None])
            total = tl.fma(total, shrink, tl.sum(e, 1))
            if ENTROPY:
                weighted = tl.fma(weighted, shrink, tl.sum(e * tl.where(inside, z, 0.0), 1))
            if SQUARES:
                squared = tl.fma(squared, shrink * shrink, tl.sum(e * e, 1))
            top = new
        # A label out of range gives a NaN loss, not an access out of bounds. Read before the row is overwritten.
        in_range = (label >= 0) & (label < V)
        target = tl.load(row + label, mask=in_range, other=float("nan")).to(tl.float32)
        target, target_slope = _scaled(target, SCALE, SOFTCAP)
        maximum = tl.max(top, 0)
        shares = tl.exp2((top - maximum) * LOG2E)
        whole = tl.sum(total * shares, 0)
        lse = maximum + tl.log(whole)
        loss = lse - target
        if SMOOTHING > 0:
            loss = lse - (1.0 - SMOOTHING) * target - (SMOOTHING / V) * tl.sum(plain, 0)
        tl.store(losses + pid, loss)
        if ENTROPY:
            tl.store(entropies + pid, lse - tl.sum(weighted * shares, 0) / whole)
        if SQUARES:
            tl.store(squares + pid, tl.log(tl.sum(squared * shares * shares, 0)) - 2.0 * tl.log(whole))
        if MEAN:
            tl.store(means + pid, tl.sum(plain, 0) / V)
        if TOP:
            tl.store(tops + pid, ((target >= maximum) & (tl.max(before, 0) < target)).to(tl.uint8))
        if GRAD:
            tl.debug_barrier()  # every thread has read the label's logit
            factor = 1.0
            if FACTORS:
                factor = tl.load(factors + pid).to(tl.float32)
            if ENTROPY_GRAD:
                entropy = lse - tl.sum(weighted * shares, 0) / whole
                rise = tl.load(entropy_factors + pid).to(tl.float32)
            for back in tl.range(0, V, BLOCK, num_stages=STAGES):
                column = LAST - back + lane
                inside = column < V
                x = tl.load(row + column, mask=inside, other=float("-inf")).to(tl.float32)
                z, slope = _scaled(x, SCALE, SOFTCAP)
                p = _exp(z, lse * LOG2E)
                g = (p - SMOOTHING / V if SMOOTHING > 0 else p) * factor
                if ENTROPY_GRAD:  # d entropy / dz = -p (log p + entropy)
                    logp = tl.where(inside, z - lse, 0.0)
                    g -= rise * p * (logp + entropy)
                tl.store(row + column, (g * slope).to(logits.dtype.element_ty), mask=inside)
            tl.debug_barrier()  # every thread has written its part; next, the label's element
            own = _exp(target, maximum * LOG2E)  # as it was summed: of a sure token, p - 1 is the sum of all others
            p = own / whole
            g = ((own - whole) / whole + (SMOOTHING - SMOOTHING / V)) * factor
            if ENTROPY_GRAD:
                g -= rise * p * (target - lse + entropy)
            tl.store(row + label, (g * target_slope).to(logits.dtype.element_ty), mask=in_range)


def loss_and_grad_(
    logits,
    labels,
    *,
    ignore_index=-100,
    softcap=None,
    scale=1.0,
    label_smoothing=0.0,
    grad=True,
    factors=None,
    tile=None,
):
    """Return the loss of each row; with ``grad``, overwrite ``logits`` by their gradient.

    The gradient is that of the sum of factors times losses.

    The loss is taken of z = softcap * tanh(scale * logits / softcap) (``scale * logits`` without a soft-cap), in
    fp32. Online softmax: Milakov & Gimelshein, 2018, arXiv:1805.02867.

    Args:
        logits: [rows, V], bf16, fp16 or fp32, unit column stride.
        labels: [rows], int64 or int32, contiguous. One out of range gives a NaN loss.
        ignore_index: label of rows that have loss and gradient 0 and are not read.
        softcap: c of c * tanh(z / c), in the units of the logits; None for none.
        scale: a positive factor of the logits.
        label_smoothing: the share, 0 to 1, of the target that is spread over all classes.
        grad: whether ``logits`` become the gradient.
        factors: [rows], fp32, contiguous: of each row's gradient, not of its loss; None for ones.
        tile: a ``_tiles.Tile`` in place of the table's.

    Returns:
        fp32 [rows].

    Raises:
        ValueError: shapes or strides do not fit, or the scale is not positive.
    """
    how = dict(SMOOTHING=float(label_smoothing), GRAD=bool(grad))
    return _launch(logits, labels, ignore_index, softcap, scale, factors, tile, **how)[0]


def statistics_and_grad_(
    logits, labels, wanted, *, softcap=None, scale=1.0, grad=True, factors=None, entropy_factors=None, tile=None
):
    """Return loss and statistics of each row; with ``grad``, overwrite ``logits`` by a gradient.

    That of the sum of factors times losses and of entropy_factors times entropies. Loss and logits are those of
    ``loss_and_grad_``, to the bit.

    Args:
        logits: [rows, V], bf16, fp16 or fp32, unit column stride.
        labels: [rows], int64 or int32, contiguous; each row has one.
        wanted: names from ``STATISTICS``.
        softcap: c of c * tanh(z / c), in the units of the logits; None for none.
        scale: a positive factor of the logits.
        grad: whether ``logits`` become the gradient.
        factors: [rows], fp32, contiguous: of each row's loss in the gradient; None for ones.
        entropy_factors: the same of its entropy; None for zeros.
        tile: a ``_tiles.Tile`` in place of the table's.

    Returns:
        (loss, values): fp32 [rows], and a dict of fp32 [rows] by name; bool for "is_top1".

    Raises:
        ValueError: shapes or strides do not fit, or the scale is not positive.
    """
    how = (torch.iinfo(torch.int64).min, softcap, scale, factors, tile, tuple(wanted), entropy_factors)
    return _launch(logits, labels, *how, SMOOTHING=0.0, GRAD=bool(grad))


def _launch(logits, labels, ignore_index, softcap, scale, factors, tile, wanted=(), entropy_factors=None, **constants):
    rows, vocabulary = logits.shape
    if logits.stride(1) != 1 or labels.shape != (rows,) or not labels.is_contiguous():
        raise ValueError(
            f"logits {tuple(logits.shape)} with strides {logits.stride()} and labels {tuple(labels.shape)}"
        )
    for given in (factors, entropy_factors):
        if given is not None and (given.shape != (rows,) or not given.is_contiguous()):
            raise ValueError(f"{tuple(given.shape)} factors for {rows} rows")
    tile = tile or _tiles.pick("cross_entropy", logits, vocabulary)
    if scale <= 0:
        raise ValueError(f"the scale of logits must be positive, not {scale}")
    # at least one group a thread: with fewer, two threads would own an element, and one could read the other's write
    groups = max(min(tile.block, next_power_of_2(vocabulary)) // 8, 32 * tile.num_warps)
    loss = torch.empty(rows, dtype=torch.float32, device=logits.device)
    values = {
        name: torch.empty(rows, dtype=torch.uint8, device=logits.device)
        if name == "is_top1"
        else torch.empty_like(loss)
        for name in STATISTICS
        if name in wanted or (name == "entropy" and entropy_factors is not None)
    }
    launch(
        loss_and_grad_kernel,
        (rows,),
        *(logits, labels, loss),
        labels if factors is None else factors,
        *(values.get(name, loss) for name in STATISTICS),
        *(labels if entropy_factors is None else entropy_factors, logits.stride(0), ignore_index),
        **dict(fuse_products=False, V=vocabulary, SCALE=float(scale), SOFTCAP=float(softcap or 0.0)),
        **dict(FACTORS=factors is not None, ENTROPY="entropy" in values, SQUARES="log_sum_sq_probs" in wanted),
        **dict(MEAN="mean_logits" in wanted, TOP="is_top1" in wanted),
        **dict(ENTROPY_GRAD=entropy_factors is not None, GROUPS=groups, STAGES=tile.num_stages),
        num_warps=tile.num_warps,
        **constants,
    )
    if "is_top1" in values:
        values["is_top1"] = values["is_top1"] == 1
    return loss, values
