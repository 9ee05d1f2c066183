"""Grouped products: rows times the matrix of their expert, and sums of outer products by expert.

Rows are sorted by expert. Those of expert e end at `offsets[e]`; rows behind the last offset belong to no expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tunecompile import templates
from tunecompile._torch.card import has_bfloat16
from tunecompile._torch.fake_tensors import is_fake
from tunecompile.ir.op import Cost, has_triton, op
from tunecompile.ir.pretend_gpu import on_gpu
from tunecompile.notes import Note, note


@dataclass(frozen=True)
class Products:
    """An implementation of both grouped products."""

    rows: Callable[[Tensor, Tensor, Tensor], Tensor]  #: (x [S, K], matrices [E, K, N], offsets) -> [S, N]
    outer: Callable[[Tensor, Tensor, Tensor], Tensor]  #: (left [S, M], right [S, N], offsets) -> [E, M, N]


def inside(rows: int, offsets: Tensor) -> Tensor:
    """Return whether each row belongs to an expert: bool [S, 1]."""
    return (torch.arange(rows, device=offsets.device) < offsets[-1]).unsqueeze(1)


def rows_flops(x, weight, offsets) -> int:
    """Count one matrix a row."""
    return 2 * x.numel() * weight.shape[2]


def outer_flops(left, right, offsets) -> int:
    """Count one outer product a row."""
    return 2 * left.numel() * right.shape[1]


@op(cost=Cost.MATMUL, flops=rows_flops, opaque=True)
def expert_rows(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Return x_s W_e for each row s of expert e, by a loop over experts (arXiv:2211.15841).

    It reads the offsets on the host.

    Args:
        x: [S, K], sorted by expert; any floating dtype.
        weight: [E, K, N], in x's dtype.
        offsets: [E], integers: where the rows of each expert end.

    Returns:
        [S, N] in x's dtype; rows behind the last offset are 0.
    """
    made = x.new_zeros(x.shape[0], weight.shape[2])
    if is_fake(offsets):
        return made
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        if start < end:
            made[start:end] = x[start:end] @ weight[expert]
            start = end
    return made


@op(cost=Cost.MATMUL, flops=outer_flops, opaque=True)
def expert_outer(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """Return L_e^T R_e for each expert e, by a loop over experts (arXiv:2211.15841).

    It reads the offsets on the host.

    Args:
        left: [S, M], sorted by expert; any floating dtype.
        right: [S, N], in left's dtype.
        offsets: [E], integers: where the rows of each expert end.

    Returns:
        [E, M, N] in left's dtype; 0 for experts without rows.
    """
    made = left.new_zeros(offsets.shape[0], left.shape[1], right.shape[1])
    if is_fake(offsets):
        return made
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        if start < end:
            made[expert] = left[start:end].t() @ right[start:end]
            start = end
    return made


def _torch_rows(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """torch leaves rows of no expert unwritten (pytorch#154557): here they are set to 0."""
    return torch._grouped_mm(x, weight, offs=offsets.to(torch.int32))


def _torch_outer(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """torch leaves experts without rows unwritten (pytorch#172439): here they are set to 0."""
    ends = offsets.to(torch.int32)
    made = torch._grouped_mm(left.t(), right, offs=ends)
    if on_gpu(made) and has_triton():
        templates.experts.zero_idle(made, ends)
        return made
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    return torch.where((ends > starts)[:, None, None], made, 0)


def zeroed_behind(rows: Tensor, offsets: Tensor) -> Tensor:
    """Return rows [S, N] with 0 in those of no expert: in place on a GPU, where a copy of all would take as long as two
    readings."""
    if on_gpu(rows) and has_triton():
        templates.experts.zero_behind(rows, offsets)
        return rows
    return torch.where(inside(rows.shape[0], offsets), rows, 0)


#: by a loop over experts
LOOPED = Products(expert_rows, expert_outer)
#: by torch's grouped product, which needs rows of a multiple of 16 bytes
BY_TORCH = Products(_torch_rows, _torch_outer)


def biases_of_rows(bias: Tensor, rows: int, offsets: Tensor) -> Tensor:
    """Return the bias of each row's expert, [S, N], from [E, N]; undefined in rows of no expert."""
    expert = torch.searchsorted(offsets, torch.arange(rows, device=offsets.device, dtype=offsets.dtype), right=True)
    return bias[expert.clamp(max=len(bias) - 1)]


def bias_gradient(by: Products, grad: Tensor, offsets: Tensor, bias: Tensor | None) -> Tensor:
    """Return the sum of each expert's rows of a gradient, in the bias's dtype; empty without a bias."""
    if bias is None:
        return grad.new_empty(0)
    ones = grad.new_ones(grad.shape[0], 8)  # 16 bytes a row, for torch's products
    return by.outer(ones, grad.contiguous(), offsets)[:, 0].to(bias.dtype)


def refuse_grouped(x: Tensor, stacks: Sequence[Tensor]) -> Note | None:
    """Return why torch's grouped product cannot take rows and stacks [E, M, N] like these, or None.

    Under a compiler it takes only bfloat16, and rows of a multiple of 16 bytes. A stack that is neither contiguous nor
    the transpose of a contiguous one may be misread (pytorch#186365).
    """
    if any(t.dtype != torch.bfloat16 for t in (x, *stacks)):
        return note("not-bfloat16", detail=str(x.dtype).removeprefix("torch."))
    if not has_bfloat16(x.device):
        return note("gpu-without-bfloat16")
    if not all(stack.is_contiguous() for stack in stacks):
        return note("not-contiguous", "stacks of weights are")
    if any(stack.shape[1] % 8 or stack.shape[2] % 8 for stack in stacks):
        return note("not-16-bytes")
    return None
