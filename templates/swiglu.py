"""Gated activation, ``act(gate) * up`` with act SiLU or tanh-GELU (SwiGLU, GeGLU: https://arxiv.org/abs/2002.05202).

gate and up may be the two column halves of one projection's output, and the backward pass writes both gradients into
one buffer, the gradient of that output, so no concatenation is needed.

Both of these activations are ``g * sigmoid(s)``: s = g for SiLU, s = 2 sqrt(2 / pi) (g + 0.044715 g^3) for tanh-GELU.
The clamped gate, ``g sigmoid(alpha g) (u + 1)`` (https://arxiv.org/abs/2508.10925), has gate and up interleaved
by column: pairs are read and written together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import _tiles
from ._launch import launch, next_power_of_2

__all__ = ["ACTIVATIONS", "backward", "clamped", "clamped_backward", "forward", "weighted_backward"]

ACTIVATIONS = ("silu", "gelu_tanh")  #: by the names of `tunecompile.ops.swiglu.gated_activation`
GELU = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)


@triton.jit
def _gate(g, ACTIVATION: tl.constexpr):
    """sigmoid(s) and g * ds/dg."""
    if ACTIVATION == "silu":
        return tl.sigmoid(g), g
    else:
        return tl.sigmoid(g * GELU * (1.0 + 0.044715 * g * g)), g * GELU * (1.0 + 3 * 0.044715 * g * g)


@triton.jit
def forward_kernel(
    gate, up, out, columns, gate_stride, up_stride, out_stride, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    g = tl.load(gate + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    s, _ = _gate(g, ACTIVATION)
    tl.store(out + row * out_stride + column, (g * s * u).to(out.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(
    grad, gate, up, both, columns, grad_stride, gate_stride, up_stride, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    d = tl.load(grad + row * grad_stride + column, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    s, slope = _gate(g, ACTIVATION)
    act = g * s
    both += row * 2 * columns + column  # d_gate, then d_up
    tl.store(both + columns, (d * act).to(both.dtype.element_ty), mask=mask)
    d_act = s * (1.0 + slope * (1.0 - s))  # of g sigmoid(s): sigmoid + g ds/dg sigmoid (1 - sigmoid)
    tl.store(both, (d * u * d_act).to(both.dtype.element_ty), mask=mask)


def _matrix(t):
    """``t`` as [rows, F] with unit column stride; a view for slices of a contiguous buffer."""
    t = t.reshape(-1, t.shape[-1])
    return t if t.stride(1) == 1 else t.contiguous()


def _tile(gate, activation, tile):
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {ACTIVATIONS}, not {activation!r}")
    tile = tile or _tiles.pick("swiglu", gate, gate.shape[-1])
    return tile, min(tile.block, next_power_of_2(gate.shape[-1]))


def forward(gate, up, activation="silu", *, out=None, tile=None):
    """act(gate) * up, element by element; fp32 inside.

    Args:
        gate: [..., F], bf16, fp16 or fp32, any row stride.
        up: as gate in shape and dtype, any row stride.
        activation: one of ``ACTIVATIONS``.
        out: [rows or more, >= F], unit column stride: the first F columns take the result, the others stay as they
            are. None: new memory.
        tile: a ``_tiles.Tile`` in place of the table's.

    Returns:
        ``out``, or [..., F] in gate's dtype, contiguous.

    Raises:
        ValueError: the activation is unknown.
    """
    tile, block = _tile(gate, activation, tile)
    if out is None:
        out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    gate, up = _matrix(gate), _matrix(up)
    rows, columns = gate.shape
    launch(
        forward_kernel,
        (rows, triton.cdiv(columns, block)),
        *(gate, up, out, columns),
        *(gate.stride(0), up.stride(0), out.stride(-2)),
        **dict(ACTIVATION=activation, BLOCK=block, num_warps=tile.num_warps, num_stages=tile.num_stages),
    )
    return out


def backward(grad, gate, up, activation="silu", *, tile=None):
    """The gradients of ``forward``, in one buffer.

    Args:
        grad: of the result, [..., F], any row stride. gate, up, activation and tile as for ``forward``.

    Returns:
        (d_gate, d_up), the two column halves of a [..., 2F] buffer in gate's dtype.

    Raises:
        ValueError: the activation is unknown.
    """
    tile, block = _tile(gate, activation, tile)
    shape = gate.shape
    both = torch.empty((*shape[:-1], 2 * shape[-1]), dtype=gate.dtype, device=gate.device)
    grad, gate, up = _matrix(grad), _matrix(gate), _matrix(up)
    rows, columns = gate.shape
    launch(
        backward_kernel,
        (rows, triton.cdiv(columns, block)),
        *(grad, gate, up, both, columns),
        *(grad.stride(0), gate.stride(0), up.stride(0)),
        **dict(ACTIVATION=activation, BLOCK=block, num_warps=tile.num_warps, num_stages=tile.num_stages),
    )
    return both.split(shape[-1], -1)


@triton.jit
def weighted_backward_kernel(
    grad,
    gate,
    up,
    weights,
    both,
    d_weights,
    columns,
    grad_stride,
    gate_stride,
    up_stride,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row).to(tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    both += row * 2 * columns
    for begin in range(0, columns, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        mask = column < columns
        d = tl.load(grad + row * grad_stride + column, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(gate + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
        u = tl.load(up + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
        s, slope = _gate(g, ACTIVATION)
        act = g * s
        total += d * act * u
        d *= weight
        tl.store(both + columns + column, (d * act).to(both.dtype.element_ty), mask=mask)
        d_act = s * (1.0 + slope * (1.0 - s))
        tl.store(both + column, (d * u * d_act).to(both.dtype.element_ty), mask=mask)
    tl.store(d_weights + row, tl.sum(total, 0).to(d_weights.dtype.element_ty))


def weighted_backward(grad, gate, up, weights, activation="silu", *, tile=None):
    """The gradients of ``act(gate) * up * weights``, a weight for each row; fp32 inside.

    Args:
        grad: of the result, [S, F], any row stride. gate, up, activation and tile as for ``forward``.
        weights: [S, 1].

    Returns:
        (d_gate, d_up, d_weights): the two column halves of a [S, 2F] buffer in gate's dtype, and [S, 1] in weights'.

    Raises:
        ValueError: the activation is unknown.
    """
    tile, block = _tile(gate, activation, tile)
    (rows, columns), weights = gate.shape, weights.contiguous()
    both = torch.empty((rows, 2 * columns), dtype=gate.dtype, device=gate.device)
    d_weights = torch.empty_like(weights)
    grad, gate, up = _matrix(grad), _matrix(gate), _matrix(up)
    launch(
        weighted_backward_kernel,
        (rows,),
        *(grad, gate, up, weights, both, d_weights, columns),
        *(grad.stride(0), gate.stride(0), up.stride(0)),
        **dict(ACTIVATION=activation, BLOCK=block, num_warps=tile.num_warps, num_stages=tile.num_stages),
    )
    return (*both.split(columns, -1), d_weights)


@triton.jit
def _clamped_pairs(both, first, elements, limit, BLOCK: tl.constexpr):
    """Gate and up of BLOCK results, clamped; and whether each was within."""
    place = first * 2 + tl.arange(0, 2 * BLOCK)
    pairs = tl.load(both + place, mask=place < 2 * elements, other=0.0).to(tl.float32)
    g, u = tl.split(tl.reshape(pairs, (BLOCK, 2)))
    g_inside, u_inside = g <= limit, tl.abs(u) <= limit
    # not tl.minimum, which drops NaN
    g = tl.where(g > limit, limit, g)
    u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
    return g, u, g_inside, u_inside


@triton.jit
def clamped_kernel(both, out, elements, alpha, limit, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    g, u, _, _ = _clamped_pairs(both, first, elements, limit, BLOCK)
    place = first + tl.arange(0, BLOCK)
    value = g * tl.sigmoid(alpha * g) * (u + 1.0)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=place < elements)


@triton.jit
def clamped_backward_kernel(grad, both, d_both, elements, alpha, limit, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    g, u, g_inside, u_inside = _clamped_pairs(both, first, elements, limit, BLOCK)
    place = first + tl.arange(0, BLOCK)
    d = tl.load(grad + place, mask=place < elements, other=0.0).to(tl.float32)
    s = tl.sigmoid(alpha * g)
    d_g = tl.where(g_inside, d * (u + 1.0) * s * (1.0 + alpha * g * (1.0 - s)), 0.0)
    d_u = tl.where(u_inside, d * g * s, 0.0)
    pairs = tl.reshape(tl.join(d_g, d_u), (2 * BLOCK,))
    place = first * 2 + tl.arange(0, 2 * BLOCK)
    tl.store(d_both + place, pairs.to(d_both.dtype.element_ty), mask=place < 2 * elements)


def clamped(both, alpha, limit):
    """g sigmoid(alpha g) (u + 1), g and u clamped; fp32 inside.

    Args:
        both: [..., 2F], contiguous, bf16, fp16 or fp32: g at even columns, u at odd ones.
        alpha: factor inside the sigmoid.
        limit: g is at most this, u lies between -limit and limit.

    Returns:
        [..., F] in both's dtype, contiguous.
    """
    out = torch.empty((*both.shape[:-1], both.shape[-1] // 2), dtype=both.dtype, device=both.device)
    tile = _tiles.pick("clamped_gate", both, out.shape[-1])
    grid = (triton.cdiv(out.numel(), tile.block),)
    launch(clamped_kernel, grid, both, out, out.numel(), alpha, limit, BLOCK=tile.block, num_warps=tile.num_warps)
    return out


def clamped_backward(grad, both, alpha, limit):
    """The gradient of ``clamped``, in pairs as ``both`` has them.

    Args:
        grad: of the result, [..., F], any strides. The others are those of ``clamped``.
        limit: of `clamped`, or the next smaller number in fp32: then values that equal the limit get no gradient.

    Returns:
        [..., 2F] in both's dtype, contiguous.
    """
    grad, d_both = grad.contiguous(), torch.empty_like(both)
    tile = _tiles.pick("clamped_gate", both, grad.shape[-1])
    launch(
        clamped_backward_kernel,
        (triton.cdiv(grad.numel(), tile.block),),
        *(grad, both, d_both),
        *(grad.numel(), alpha, limit),
        **dict(BLOCK=tile.block, num_warps=tile.num_warps),
    )
    return d_both
