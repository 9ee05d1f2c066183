"""RMS norm of the last dimension, forward and backward, optionally fused with the residual addition before it.

RMSNorm (https://arxiv.org/abs/1910.07467) as the model families write it, for ``xhat = x.float() * rsqrt(mean(x^2) +
eps)``: Llama, Qwen: ``xhat.to(x.dtype) * weight`` (``round_before_scale``); Gemma: ``(xhat * (1 +
weight.float())).to(x.dtype)`` (``offset=1``); OLMo 2: the same with ``offset=0``. The backward pass reads x again
instead of keeping xhat or the statistics.

Inputs may be strided in their (up to three) leading dimensions, so the norms of q and k read the fused projection in
place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import _tiles
from ._launch import launch, multiprocessors, next_power_of_2, row_ranges
from .layer_norm import start_of, strided_rows

__all__ = ["backward", "forward"]


@triton.jit
def forward_kernel(
    x,
    residual,
    weight,
    y,
    total,  # residual, weight, total: may be None
    n_rows,
    n1,
    n2,
    xs0,
    xs1,
    xs2,
    rs0,
    rs1,
    rs2,
    N: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < n_rows)[:, None] & (column < N)[None, :]
    value = tl.load(x + start_of(row, n1, n2, xs0, xs1, xs2)[:, None] + column[None, :], mask=mask, other=0.0)
    place = (row.to(tl.int64) * N)[:, None] + column[None, :]
    if HAS_RESIDUAL:
        other = tl.load(
            residual + start_of(row, n1, n2, rs0, rs1, rs2)[:, None] + column[None, :], mask=mask, other=0.0
        )
        value = (value.to(tl.float32) + other.to(tl.float32)).to(x.dtype.element_ty)  # the next layer adds to it
        tl.store(total + place, value, mask=mask)
    value = value.to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, 1) / N + EPS)[:, None]
    if ROUND_FIRST:
        value = value.to(x.dtype.element_ty).to(tl.float32)
    if HAS_WEIGHT:
        value = value * (tl.load(weight + column, mask=column < N, other=0.0).to(tl.float32) + OFFSET)[None, :]
    tl.store(y + place, value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(
    grad,
    x,
    residual_grad,
    weight,
    dx,
    dweight,  # residual_grad, weight, dweight: may be None
    n_rows,
    n1,
    n2,
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
    ROUND_FIRST: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    WEIGHT_GRAD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program takes every num_programs-th group of ROWS rows and sums their weight gradient in registers."""
    column = tl.arange(0, BLOCK)
    scale = tl.full([BLOCK], 1.0, tl.float32)
    if HAS_WEIGHT:
        scale = tl.load(weight + column, mask=column < N, other=0.0).to(tl.float32) + OFFSET
    partial = tl.zeros([BLOCK], tl.float32)
    for group in range(tl.program_id(0), tl.cdiv(n_rows, ROWS), tl.num_programs(0)):
        row = group * ROWS + tl.arange(0, ROWS)
        mask = (row < n_rows)[:, None] & (column < N)[None, :]
        g = tl.load(grad + start_of(row, n1, n2, gs0, gs1, gs2)[:, None] + column[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
        value = tl.load(x + start_of(row, n1, n2, xs0, xs1, xs2)[:, None] + column[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
        inverse = tl.rsqrt(tl.sum(value * value, 1) / N + EPS)[:, None]
        xhat = value * inverse
        if WEIGHT_GRAD:
            if ROUND_FIRST:
                partial += tl.sum(g * xhat.to(x.dtype.element_ty).to(tl.float32), 0)
            else:
                partial += tl.sum(g * xhat, 0)
        g = g * scale[None, :]
        result = inverse * (g - xhat * (tl.sum(g * xhat, 1) / N)[:, None])
        if HAS_RESIDUAL:
            where = start_of(row, n1, n2, rs0, rs1, rs2)[:, None] + column[None, :]
            result += tl.load(residual_grad + where, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx + (row.to(tl.int64) * N)[:, None] + column[None, :], result.to(dx.dtype.element_ty), mask=mask)
    if WEIGHT_GRAD:
        tl.store(dweight + tl.program_id(0).to(tl.int64) * N + column, partial, mask=column < N)


def forward(x, weight, eps=1e-6, *, offset=0.0, round_before_scale=True, residual=None, tile=None):
    """xhat * (offset + weight), with xhat = x * rsqrt(mean(x^2) + eps) over the last dimension; fp32 inside.

    Args:
        x: [..., N], bf16, fp16 or fp32.
        weight: [N], any floating dtype; or None.
        eps: added to the mean of squares, in the units of x².
        offset: added to the weight, in its units.
        round_before_scale: whether xhat is rounded to x's dtype before it is scaled.
        residual: as x in shape and dtype, added to it first; or None.
        tile: a ``_tiles.Tile`` in place of the table's.

    Returns:
        y, contiguous in x's shape and dtype; rounded before the scale, in the dtype that x and weight promote to, as
        the PyTorch expression has. With ``residual``: (y, x + residual rounded to x's dtype), y being the norm of
        that sum.

    Raises:
        ValueError: weight or residual do not fit x.
    """
    n = x.shape[-1]
    if weight is not None and weight.shape != (n,):
        raise ValueError(f"weight {tuple(weight.shape)} for rows of {n}")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(f"residual {tuple(residual.shape)}, {residual.dtype} for x {tuple(x.shape)}, {x.dtype}")
    dtype = torch.promote_types(x.dtype, weight.dtype) if round_before_scale and weight is not None else x.dtype
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    total = None if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x, (n1, n2), strides = strided_rows(x)
    residual, _, residual_strides = (None, None, (0, 0, 0)) if residual is None else strided_rows(residual)
    rows = x.numel() // n
    tile = tile or _tiles.pick("rms_norm", x, n)
    launch(
        forward_kernel,
        (triton.cdiv(rows, tile.rows),),
        *(x, residual, weight, y, total, rows, n1, n2),
        *strides,
        *residual_strides,
        **dict(N=n, EPS=float(eps), OFFSET=float(offset), ROUND_FIRST=bool(round_before_scale)),
        **dict(HAS_RESIDUAL=residual is not None, HAS_WEIGHT=weight is not None, ROWS=tile.rows),
        **dict(BLOCK=next_power_of_2(n), num_warps=tile.num_warps, num_stages=tile.num_stages),
    )
    return y if residual is None else (y, total)


def backward(
    grad,
    x,
    weight,
    eps=1e-6,
    *,
    offset=0.0,
    round_before_scale=True,
    residual_grad=None,
    need_weight_grad=False,
    tile=None,
):
    """The gradients of ``forward``. x is read again instead of xhat or the statistics.

    Args:
        grad: of y, [..., N]. This, x and residual_grad have one shape, and leading strides of their own.
        x: what was normed, bf16, fp16 or fp32 (the sum, when a residual was added).
        weight: [N], any floating dtype; or None. This and eps (in the units of x²), offset, round_before_scale and
            tile: as for ``forward``.
        residual_grad: what reaches x by the residual path, which is added to dx; or None.
        need_weight_grad: whether dweight is returned.

    Returns:
        dx, contiguous, in x's dtype; with ``need_weight_grad``: (dx, dweight fp32 [N], summed in a fixed order).

    Raises:
        ValueError: shapes differ.
    """
    n = x.shape[-1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if grad.shape != x.shape or (residual_grad is not None and residual_grad.shape != x.shape):
        raise ValueError(f"gradients must have x's shape, {tuple(x.shape)}")
    grad, _, grad_strides = strided_rows(grad)
    x, (n1, n2), strides = strided_rows(x)
    residual_grad, _, residual_strides = (
        (None, None, (0, 0, 0)) if residual_grad is None else strided_rows(residual_grad)
    )
    rows = x.numel() // n
    tile = tile or _tiles.pick("rms_norm", x, n)
    programs = triton.cdiv(rows, tile.rows)
    partial = None
    if need_weight_grad:  # as many programs as fit on the GPU at once, so that there are few partial sums
        programs = row_ranges(rows, tile.rows, multiprocessors(x.device) * max(1, 32 // tile.num_warps))
        partial = torch.empty((programs, n), dtype=torch.float32, device=x.device)
    launch(
        backward_kernel,
        (programs,),
        *(grad, x, residual_grad, weight, dx, partial, rows, n1, n2),
        *grad_strides,
        *strides,
        *residual_strides,
        **dict(N=n, EPS=float(eps), OFFSET=float(offset), ROUND_FIRST=bool(round_before_scale)),
        **dict(HAS_RESIDUAL=residual_grad is not None, HAS_WEIGHT=weight is not None),
        **dict(WEIGHT_GRAD=need_weight_grad, ROWS=tile.rows, BLOCK=next_power_of_2(n)),
        **dict(num_warps=tile.num_warps, num_stages=tile.num_stages),
    )
    return dx if partial is None else (dx, partial.sum(0))
