"""The backward pass of norms of the last dimension, optionally joined with the residual path's gradient.

LayerNorm (https://arxiv.org/abs/1607.06450) with or without weight and bias, and RMSNorm, whose mean stays
(https://arxiv.org/abs/1910.07467), as the model families write it, for ``xhat = x.float() * rsqrt(mean(x^2) + eps)``:
Llama, Qwen: ``xhat.to(x.dtype) * weight`` (``round_first``); Gemma: ``(xhat * (1 + weight.float())).to(x.dtype)``
(``offset=1``); OLMo 2: the same with ``offset=0``. Both with weights and biases for groups of rows, too, as images of a
batch have in adaLN (https://arxiv.org/abs/2212.09748). x is read again, and mean and deviation are recomputed. The
forward pass is left to Inductor, which fuses it with the operations before it.

Inputs may be strided in their (up to three) leading dimensions, so the norms of q and k read the fused projection in
place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import _tiles
from ._launch import launch, multiprocessors, next_power_of_2, row_ranges

__all__ = ["backward"]


@triton.jit
def _start_of(row, n1, n2, s0, s1, s2):
    """Offset of row number ``row`` of a tensor [n0, n1, n2, :] with strides s0, s1, s2."""
    row = row.to(tl.int64)
    return row // (n1 * n2) * s0 + row // n2 % n1 * s1 + row % n2 * s2


def _strided_rows(t):
    """``t`` with a unit column stride, its leading sizes (n1, n2), and three leading strides."""
    if t.dim() > 4:
        t = t.reshape(-1, t.shape[-1])
    if t.stride(-1) != 1:
        t = t.contiguous()
    sizes, strides = (1, 1, 1, *t.shape[:-1]), (0, 0, 0, *t.stride()[:-1])
    return t, sizes[-2:], strides[-3:]


@triton.jit
def backward_kernel(
    grad,
    x,
    residual_grad,
    weight,
    dx,
    dweight,
    dbias,  # residual_grad, weight, dweight, dbias: may be None
    n_rows,  # of a group
    n1,
    n2,
    ws,  # from a group's weights to the next one's
    gs0,
    gs1,
    gs2,
    xs0,
    xs1,
    xs2,
    rs0,
    rs1,
    rs2,
    N: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    CENTRED: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    GROUPED: tl.constexpr,
    SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program takes every num_programs-th ROWS rows of a group and sums the parameters' gradients in registers."""
    column, group = tl.arange(0, BLOCK), 0
    if GROUPED:
        group = tl.program_id(1).to(tl.int64)
    scale = tl.full([BLOCK], 1.0, tl.float32)
    if HAS_WEIGHT:
        scale = tl.load(weight + group * ws + column, mask=column < N, other=0.0).to(tl.float32) + OFFSET
    weights = tl.zeros([BLOCK], tl.float32)
    biases = tl.zeros([BLOCK], tl.float32)
    for step in range(tl.program_id(0), tl.cdiv(n_rows, ROWS), tl.num_programs(0)):
        row = step * ROWS + tl.arange(0, ROWS)
        inside = (column < N)[None, :]
        mask = (row < n_rows)[:, None] & inside
        if GROUPED:
            row = group * n_rows + row
        g = tl.load(grad + _start_of(row, n1, n2, gs0, gs1, gs2)[:, None] + column[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
        value = tl.load(x + _start_of(row, n1, n2, xs0, xs1, xs2)[:, None] + column[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
        if CENTRED:
            value = tl.where(inside, value - (tl.sum(value, 1) / N)[:, None], 0.0)
        inverse = tl.rsqrt(tl.sum(value * value, 1) / N + EPS)[:, None]
        xhat = value * inverse
        if SUMS > 0:
            rounded = xhat.to(x.dtype.element_ty).to(tl.float32) if ROUND_FIRST else xhat
            weights += tl.sum(g * rounded, 0)
        if SUMS > 1:
            biases += tl.sum(g, 0)
        g = g * scale[None, :]
        result = g - xhat * (tl.sum(g * xhat, 1) / N)[:, None]
        if CENTRED:
            result -= (tl.sum(g, 1) / N)[:, None]
        result *= inverse
        if HAS_RESIDUAL:
            where = _start_of(row, n1, n2, rs0, rs1, rs2)[:, None] + column[None, :]
            result += tl.load(residual_grad + where, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx + (row.to(tl.int64) * N)[:, None] + column[None, :], result.to(dx.dtype.element_ty), mask=mask)
    place = (group * tl.num_programs(0) + tl.program_id(0).to(tl.int64)) * N + column
    if SUMS > 0:
        tl.store(dweight + place, weights, mask=column < N)
    if SUMS > 1:
        tl.store(dbias + place, biases, mask=column < N)


def backward(
    grad,
    x,
    weight,
    eps=1e-5,
    *,
    offset=0.0,
    centred=True,
    round_first=False,
    residual_grad=None,
    sums=0,
    tile=None,
):
    """The gradients of (x - mean) / sqrt(variance + eps) * (offset + weight) + bias over the last dimension.

    Arithmetic is in fp32.

    Args:
        grad: of the result, [..., N]. This, x and residual_grad have one shape, and leading strides of their own.
        x: what was normed, bf16, fp16 or fp32 (the sum, where a residual was added).
        weight: [N], any floating dtype; or None. [G, N] for G groups of as many successive rows each.
        eps: added to the variance, in the units of x².
        offset: added to the weight, in its units.
        centred: whether the mean is taken off; if not, the variance is the mean of squares.
        round_first: whether the normed value is rounded to x's dtype before it is scaled.
        residual_grad: what reaches x by the residual path, which is added to dx; or None.
        sums: gradients of parameters that are returned: 0, 1 for the weight's, 2 for the bias's, too.
        tile: a ``_tiles.Tile`` in place of the table's.

    Returns:
        (dx, dweight, dbias) or the first of them: dx contiguous, in x's dtype; the others fp32 [N] or [G, N], summed
        in a fixed order.

    Raises:
        ValueError: shapes differ.
    """
    n = x.shape[-1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if grad.shape != x.shape or (residual_grad is not None and residual_grad.shape != x.shape):
        raise ValueError(f"gradients must have x's shape, {tuple(x.shape)}")
    if weight is not None and (weight.dim() > 2 or weight.shape[-1] != n or weight.stride(-1) != 1):
        raise ValueError(f"weight {tuple(weight.shape)} for rows of {n}")
    grouped = weight is not None and weight.dim() == 2
    groups = weight.shape[0] if grouped else 1
    grad, _, grad_strides = _strided_rows(grad)
    x, (n1, n2), strides = _strided_rows(x)
    residual_grad, _, residual_strides = (
        (None, None, (0, 0, 0)) if residual_grad is None else _strided_rows(residual_grad)
    )
    rows = x.numel() // (n * groups)
    tile = tile or _tiles.pick("rms_norm", x, n)
    programs = triton.cdiv(rows, tile.rows)
    if sums:  # few programs, so that few partial sums are left: those that fit on the GPU at once
        programs = row_ranges(rows, tile.rows, multiprocessors(x.device) * max(1, 32 // tile.num_warps))
    shape = (groups, programs, n) if grouped else (programs, n)
    parts = [torch.empty(shape, dtype=torch.float32, device=x.device) for _ in range(sums)]
    launch(
        backward_kernel,
        (programs, groups),
        *(grad, x, residual_grad, weight, dx, *parts, *[None] * (2 - sums), rows, n1, n2),
        weight.stride(0) if grouped else 0,
        *grad_strides,
        *strides,
        *residual_strides,
        **dict(N=n, EPS=float(eps), OFFSET=float(offset), CENTRED=bool(centred), ROUND_FIRST=bool(round_first)),
        **dict(HAS_RESIDUAL=residual_grad is not None, HAS_WEIGHT=weight is not None, GROUPED=grouped),
        **dict(SUMS=sums, ROWS=tile.rows, BLOCK=next_power_of_2(n)),
        **dict(num_warps=tile.num_warps, num_stages=tile.num_stages),
    )
    return dx, *(part.sum(-2) for part in parts)
