"""The element-wise backward of a gated MLP with LoRA on its three projections, and every sum over its wide gradients, in one pass.

With g, u the two column halves of one projection's output [T, 2F] and a = act(g) * u, the backward pass needs d_gate and d_up,
their products with the adapters' B (for dX and dA) and with XA (for dB), and a^T (dY B) for the down projection's dA. Apart,
these read [T, F] or [T, 2F] six times more and write `a` once more; here each tile is loaded, used for all and stored once.

A program owns BLOCK columns of the halves and ROWS rows. Sums over rows stay in its registers; sums over columns leave as one
part a column tile. The parts are added outside, in a fixed order, so the result does not change from run to run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import _tiles
from ._launch import launch, next_power_of_2
from .swiglu import ACTIVATIONS, _gate


@triton.jit
def backward_kernel(
    grad, gate_up, both,  # [T, F], [T, 2F] and the gradient of the latter
    down, xa, b_gate, b_up,  # dY B of the down projection [T, r]; XA of gate and up side by side; their B, [F, r] each
    column_parts, row_parts,  # fp32: [column tiles, T, 2 RANK] and [row ranges, 3, F, RANK]
    rows, columns, grad_stride, gate_up_stride, both_stride, down_stride, xa_stride, b_gate_stride, b_up_stride,
    DOWN: tl.constexpr, GATE: tl.constexpr, UP: tl.constexpr,  # the three ranks
    RANK: tl.constexpr,  # a power of two >= 16 that holds each of them
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr,
):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    rank = tl.arange(0, RANK)
    where = column.to(tl.int64)[:, None]
    bg = tl.load(b_gate + where * b_gate_stride + rank[None, :], mask=inside[:, None] & (rank < GATE)[None, :], other=0.0)
    bu = tl.load(b_up + where * b_up_stride + rank[None, :], mask=inside[:, None] & (rank < UP)[None, :], other=0.0)
    d_bg = tl.zeros([BLOCK, RANK], tl.float32)
    d_bu = tl.zeros([BLOCK, RANK], tl.float32)
    d_a = tl.zeros([BLOCK, RANK], tl.float32)
    for start in range(0, ROWS, STEP):
        row = tl.program_id(1).to(tl.int64) * ROWS + start + tl.arange(0, STEP)
        valid = (row < rows)[:, None]
        mask = valid & inside[None, :]
        d = tl.load(grad + row[:, None] * grad_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        g = tl.load(gate_up + row[:, None] * gate_up_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        u = tl.load(gate_up + row[:, None] * gate_up_stride + columns + column[None, :], mask=mask, other=0.0).to(tl.float32)
        s, slope = _gate(g, ACTIVATION)
        act = g * s
        element = both.dtype.element_ty
        a = (act * u).to(element)
        du = (d * act).to(element)
        dg = (d * u * s * (1.0 + slope * (1.0 - s))).to(element)  # of g sigmoid(s): sigmoid + g ds/dg sigmoid (1 - sigmoid)
        target = both + row[:, None] * both_stride + column[None, :]
        tl.store(target, dg, mask=mask)
        tl.store(target + columns, du, mask=mask)
        y = tl.load(down + row[:, None] * down_stride + rank[None, :], mask=valid & (rank < DOWN)[None, :], other=0.0)
        xg = tl.load(xa + row[:, None] * xa_stride + rank[None, :], mask=valid & (rank < GATE)[None, :], other=0.0)
        xu = tl.load(xa + row[:, None] * xa_stride + GATE + rank[None, :], mask=valid & (rank < UP)[None, :], other=0.0)
        d_bg = tl.dot(tl.trans(dg), xg, d_bg)
        d_bu = tl.dot(tl.trans(du), xu, d_bu)
        d_a = tl.dot(tl.trans(a), y, d_a)
        part = column_parts + (tl.program_id(0).to(tl.int64) * rows + row)[:, None] * (2 * RANK) + rank[None, :]
        tl.store(part, tl.dot(dg, bg), mask=valid)
        tl.store(part + RANK, tl.dot(du, bu), mask=valid)
    part = row_parts + (tl.program_id(1).to(tl.int64) * 3 * columns + where) * RANK + rank[None, :]
    tl.store(part, d_bg, mask=inside[:, None])
    tl.store(part + columns.to(tl.int64) * RANK, d_bu, mask=inside[:, None])
    tl.store(part + columns.to(tl.int64) * 2 * RANK, d_a, mask=inside[:, None])


def backward(grad, gate_up, down, xa, b_gate, b_up, activation="silu", *, extra=0, tile=None):
    """(both, gate_down, up_down, d_b_gate, d_b_up, d_a_down) of one gated MLP.

    grad: [T, F], gradient of a = act(gate) * up; gate_up: [T, 2F]; down: [T, r], dY B of the down projection; xa: [T, r_gate + r_up];
    b_gate: [F, r_gate], b_up: [F, r_up], with the adapters' scales: all of one half-precision dtype and unit column stride.
    both: [T, 2F + extra], d_gate | d_up | columns left as they are. The others are fp32: d_gate b_gate [T, r_gate], d_up b_up
    [T, r_up], d_gate^T xa [F, r_gate], d_up^T xa [F, r_up] and down^T a [r, F].
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {ACTIVATIONS}, not {activation!r}")
    rows, columns = grad.shape
    ranks = down.shape[1], b_gate.shape[1], b_up.shape[1]
    rank = max(16, next_power_of_2(max(ranks)))
    tile = tile or _tiles.pick("lora_mlp", grad, rank)
    if any(t.stride(1) != 1 for t in (grad, gate_up, down, xa, b_gate, b_up)):
        raise ValueError("all arguments must have unit column stride")
    if gate_up.shape != (rows, 2 * columns) or xa.shape != (rows, ranks[1] + ranks[2]):
        raise ValueError(f"gate_up {tuple(gate_up.shape)}, xa {tuple(xa.shape)} do not fit grad {tuple(grad.shape)}, ranks {ranks}")
    tiles, ranges = triton.cdiv(columns, tile.block), triton.cdiv(rows, tile.rows)
    both = torch.empty((rows, 2 * columns + extra), dtype=grad.dtype, device=grad.device)
    column_parts = torch.empty((tiles, rows, 2 * rank), dtype=torch.float32, device=grad.device)
    row_parts = torch.empty((ranges, 3, columns, rank), dtype=torch.float32, device=grad.device)
    launch(backward_kernel, (tiles, ranges), grad, gate_up, both, down, xa, b_gate, b_up, column_parts, row_parts, rows, columns,
           grad.stride(0), gate_up.stride(0), both.stride(0), down.stride(0), xa.stride(0), b_gate.stride(0), b_up.stride(0),
           DOWN=ranks[0], GATE=ranks[1], UP=ranks[2], RANK=rank, ACTIVATION=activation, BLOCK=tile.block, STEP=tile.step,
           ROWS=tile.rows, num_warps=tile.num_warps, num_stages=tile.num_stages)
    by_row, by_column = column_parts.sum(0), row_parts.sum(0)
    return (both, by_row[:, :ranks[1]], by_row[:, rank:rank + ranks[2]], by_column[0, :, :ranks[1]], by_column[1, :, :ranks[2]],
            by_column[2, :, :ranks[0]].t())
