"""The elementwise backward of a gated MLP with LoRA on all projections, and the adapters' gradients, in one pass.

With g, u the two column halves of one projection's output [T, 2F] and a = act(g) * u, the backward pass needs d_gate
and d_up, d_gate^T XA and d_up^T XA (dB of gate and up), and (dY B)^T a (dA of down). Separate kernels
read [T, F] three more times and have to write `a`. Here each tile is used for all of them while it is in registers:
0.47 ms, separately 0.54 (8192x14336, H200). The products d_gate B and d_up B sum over columns instead. With them in the
same kernel, writing their partial sums costs more than it saves (0.85 against 0.66).

A program owns BLOCK columns of the halves and ROWS rows, and keeps its sums in registers. One part a row range
leaves; the parts are added outside, in a fixed order, so the result does not change from run to run.

Gated linear units: Shazeer, 2020, arXiv:2002.05202; adapters: Hu et al., 2021, arXiv:2106.09685.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import _tiles
from ._launch import launch, next_power_of_2, row_ranges
from .swiglu import ACTIVATIONS, _gate

__all__ = ["backward", "backward_of_piece", "begin", "sums"]


@triton.jit
def backward_kernel(
    grad,
    gate_up,
    both,  # [T, F], [T, 2F] and the gradient of the latter, which may take its place: a program reads what it writes
    down,
    xa,  # dY B of the down projection [T, r]; XA of gate and up side by side, or one for both
    parts,  # fp32 [row ranges, 3, RANK, F]
    rows,
    columns,
    grad_stride,
    gate_up_stride,
    both_stride,
    down_stride,
    xa_stride,
    DOWN: tl.constexpr,
    GATE: tl.constexpr,
    UP: tl.constexpr,  # the three ranks
    UP_AT: tl.constexpr,  # the column of XA where that of up begins
    RANK: tl.constexpr,  # a power of two >= 16 that holds each of them
    ACTIVATION: tl.constexpr,
    ADD: tl.constexpr,  # to what `parts` holds of earlier tokens
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = column < columns
    rank = tl.arange(0, RANK)[:, None]
    d_bg = tl.zeros([RANK, BLOCK], tl.float32)
    d_bu = tl.zeros([RANK, BLOCK], tl.float32)
    d_a = tl.zeros([RANK, BLOCK], tl.float32)
    first = tl.program_id(1).to(tl.int64) * ROWS  # pointers start there, so that what varies fits 32 bits
    grad += first * grad_stride
    gate_up += first * gate_up_stride
    both += first * both_stride
    down += first * down_stride
    xa += first * xa_stride
    for start in range(0, ROWS, STEP):
        row = start + tl.arange(0, STEP)
        valid = row < rows - first
        mask = valid[:, None] & inside
        d = tl.load(grad + row[:, None] * grad_stride + column, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(gate_up + row[:, None] * gate_up_stride + column, mask=mask, other=0.0).to(tl.float32)
        u = tl.load(gate_up + row[:, None] * gate_up_stride + columns + column, mask=mask, other=0.0).to(tl.float32)
        s, slope = _gate(g, ACTIVATION)
        act = g * s
        element = both.dtype.element_ty
        a = (act * u).to(element)
        du = (d * act).to(element)
        dg = (d * u * s * (1.0 + slope * (1.0 - s))).to(
            element
        )  # of g sigmoid(s): sigmoid + g ds/dg sigmoid (1 - sigmoid)
        target = both + row[:, None] * both_stride + column
        tl.store(target, dg, mask=mask)
        tl.store(target + columns, du, mask=mask)
        y = tl.load(down + row[None, :] * down_stride + rank, mask=valid[None, :] & (rank < DOWN), other=0.0)
        xg = tl.load(xa + row[None, :] * xa_stride + rank, mask=valid[None, :] & (rank < GATE), other=0.0)
        xu = tl.load(xa + row[None, :] * xa_stride + UP_AT + rank, mask=valid[None, :] & (rank < UP), other=0.0)
        d_bg = tl.dot(xg, dg, d_bg)
        d_bu = tl.dot(xu, du, d_bu)
        d_a = tl.dot(y, a, d_a)
    part = parts + (tl.program_id(1) * 3 * RANK + rank).to(tl.int64) * columns + column
    if ADD:
        d_bg += tl.load(part, mask=inside)
        d_bu += tl.load(part + RANK * columns, mask=inside)
        d_a += tl.load(part + 2 * RANK * columns, mask=inside)
    tl.store(part, d_bg, mask=inside)
    tl.store(part + RANK * columns, d_bu, mask=inside)
    tl.store(part + 2 * RANK * columns, d_a, mask=inside)


def backward(grad, gate_up, down, xa, ranks, activation="silu", *, both=None, width=None, tile=None):
    """The gradients of a gated MLP's activation and adapters that depend on its wide tensors.

    Args:
        grad: [T, F], of a = act(gate) * up. This and gate_up, down and xa are of one half-precision dtype and have
            unit column strides.
        gate_up: [T, 2F], gate | up.
        down: [T, r], dY B of the down projection.
        xa: [T, sum(ranks)], XA of gate | of up, or of the one projection that gives both.
        ranks: (r_gate, r_up), of their adapters, or (r,) of one projection; meant for 64 and less, as r: the sums are
            kept in registers.
        activation: one of ``swiglu.ACTIVATIONS``.
        both: [T, >= 2F], where d_gate | d_up are written, columns behind left as they are; gate_up may be its first
            columns. None: new memory.
        width: columns of that new memory; None for 2F.
        tile: a ``_tiles.Tile`` in place of the table's.

    Returns:
        (both, d_b_gate, d_b_up, d_a_down): the last three in fp32, xa^T d_gate [r_gate, F], xa^T d_up [r_up, F] and
        down^T a [r, F]. (Both xa are one where there is one projection.)

    Raises:
        ValueError: the activation is unknown, or shapes or strides do not fit.
    """
    tile = tile or _pick(grad, ranks, down)
    parts = torch.empty(
        _shape_of_parts(grad.shape[0], grad.shape[1], ranks, down, tile), dtype=torch.float32, device=grad.device
    )
    if both is None:
        both = torch.empty((grad.shape[0], width or 2 * grad.shape[1]), dtype=grad.dtype, device=grad.device)
    _start(grad, gate_up, down, xa, ranks, activation, parts, False, both, tile)
    return both, *sums(parts, ranks, down.shape[1])


def begin(rows, columns, ranks, down, tile=None):
    """Sums of zeros, to which ``backward_of_piece`` adds.

    Args:
        rows: tokens of the largest piece.
        columns: F.
        ranks: (r_gate, r_up), or (r,).
        down: as for ``backward_of_piece``, [*, r] with any number of rows.
        tile: as for ``backward``.

    Returns:
        fp32 [row ranges, 3, rank, F], rank being the least power of two, 16 or more, that holds all ranks.
    """
    return torch.zeros(
        _shape_of_parts(rows, columns, ranks, down, tile or _pick(down, ranks, down)),
        dtype=torch.float32,
        device=down.device,
    )


def backward_of_piece(grad, gate_up, down, xa, ranks, activation, parts, both, *, tile=None):
    """``backward`` for a part of the tokens.

    Args:
        grad: of this piece, [t, F]. gate_up, down, xa, ranks, activation and tile as for ``backward``, with t rows.
        parts: the result of ``begin``. Sums over tokens are added to it, in fp32.
        both: [t, >= 2F], where d_gate | d_up are written; gate_up may be its first columns.

    Raises:
        ValueError: the activation is unknown, or shapes or strides do not fit.
    """
    _start(grad, gate_up, down, xa, ranks, activation, parts, True, both, tile or _pick(grad, ranks, down))


def sums(parts, ranks, down_rank):
    """The sums over all parts of the tokens.

    Args:
        parts: the result of ``begin``, fp32 [row ranges, 3, rank, F].
        ranks: (r_gate, r_up), or (r,).
        down_rank: r, of the down projection's adapter.

    Returns:
        (d_b_gate, d_b_up, d_a_down) in fp32, as ``backward`` gives them.
    """
    d_b_gate, d_b_up, d_a = parts.sum(0)
    return d_b_gate[: ranks[0]], d_b_up[: ranks[-1]], d_a[:down_rank]


def _pick(like, ranks, down):
    return _tiles.pick("lora_mlp", like, _rank(ranks, down))


def _rank(ranks, down):
    return max(16, next_power_of_2(max(*ranks, down.shape[1])))


def _shape_of_parts(rows, columns, ranks, down, tile):
    return row_ranges(rows, tile.rows), 3, _rank(ranks, down), columns


def _start(grad, gate_up, down, xa, ranks, activation, parts, add, both, tile):
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {ACTIVATIONS}, not {activation!r}")
    rows, columns = grad.shape
    if any(t.stride(1) != 1 for t in (grad, gate_up, down, xa)):
        raise ValueError("all arguments must have unit column stride")
    if gate_up.shape != (rows, 2 * columns) or xa.shape != (rows, sum(ranks)):
        raise ValueError(
            f"gate_up {tuple(gate_up.shape)}, xa {tuple(xa.shape)} do not fit grad {tuple(grad.shape)}, ranks {ranks}"
        )
    launch(
        backward_kernel,
        (triton.cdiv(columns, tile.block), row_ranges(rows, tile.rows)),
        *(grad, gate_up, both, down, xa, parts, rows, columns),
        *(grad.stride(0), gate_up.stride(0), both.stride(0), down.stride(0), xa.stride(0)),
        **dict(DOWN=down.shape[1], GATE=ranks[0], UP=ranks[-1], UP_AT=sum(ranks[:-1])),
        **dict(RANK=_rank(ranks, down), ACTIVATION=activation, ADD=add),
        **dict(BLOCK=tile.block, STEP=tile.step, ROWS=tile.rows, num_warps=tile.num_warps, num_stages=tile.num_stages),
    )
