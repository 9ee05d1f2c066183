"""A stack of weights with low-rank adapters, written out: W_e + scale B_e A_e of every expert e.

For code that uses an adapted stack (arXiv:2106.09685) other than in a grouped product. Grouped products become
`tunecompile.ops.experts.grouped_linear`, which does not compute the sum.

Grouped products have adapters as one matrix per expert (`downs`, `ups`). PEFT stores the adapters of all E experts in
two matrices: A is [E * r, in], expert by expert; B is [out, r * E], where an expert's columns are E apart.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tunecompile.ir.op import Cost, op

NARROWEST = 16  #: columns of a tensor core's tile; torch's grouped products need rows of a multiple of 16 bytes


def padded_rank(a: Sequence[Tensor], experts: int) -> int:
    """Return the rank of all adapters side by side, rounded up to a power of two of at least 16."""
    rank = sum(m.shape[0] for m in a) // experts
    return max(NARROWEST, 1 << (rank - 1).bit_length())


def _fill(parts: list[Tensor], rank: int) -> Tensor:
    """Concatenate along the rank, dim 1, and pad with zeros up to `rank`."""
    missing = rank - sum(part.shape[1] for part in parts)
    if missing > 0:
        parts = [*parts, parts[0].new_zeros(parts[0].shape[0], missing, parts[0].shape[2])]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _dense(stack: Tensor) -> Tensor:
    """A dense copy under Inductor, too. It may choose strides for a plain copy that a grouped product cannot read."""
    strides = stack.shape[1] * stack.shape[2], stack.shape[2], 1
    return stack.clone(memory_format=torch.contiguous_format).as_strided(stack.shape, strides)


def downs(a: Sequence[Tensor], experts: int, dtype: torch.dtype, padded: bool = True) -> Tensor:
    """Return A of each expert, all adapters below each other: [E, R, in], R their rank or `padded_rank`."""
    parts = [m.to(dtype).reshape(experts, -1, m.shape[1]) for m in a]
    return _dense(_fill(parts, padded_rank(a, experts)) if padded else _fill(parts, 0))


def ups(b: Sequence[Tensor], scales: Sequence[float], experts: int, dtype: torch.dtype, padded: bool = True) -> Tensor:
    """Return scale * B of each expert, transposed, all adapters below each other: [E, R, out], R as in `downs`."""
    parts = []
    for m, scale in zip(b, scales):
        wide = m.to(torch.promote_types(m.dtype, torch.float32)) * scale
        parts.append(wide.to(dtype).reshape(m.shape[0], -1, experts).permute(2, 1, 0))
    return _dense(_fill(parts, padded_rank([m.t() for m in b], experts) if padded else 0))


def split_downs(grad: Tensor, a: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradient of each A from the gradient of `downs`, [E, R, in]."""
    ranks = [m.shape[0] // grad.shape[0] for m in a]
    parts = grad[:, : sum(ranks)].split(ranks, 1)
    return [part.reshape(m.shape).to(m.dtype, copy=True) for part, m in zip(parts, a)]


def split_ups(grad: Tensor, b: Sequence[Tensor], scales: Sequence[float]) -> list[Tensor]:
    """Return the gradient of each B from the gradient of `ups`, [E, R, out]."""
    ranks = [m.shape[1] // grad.shape[0] for m in b]
    parts = grad[:, : sum(ranks)].split(ranks, 1)
    wide = torch.promote_types(grad.dtype, torch.float32)
    return [
        (part.permute(2, 1, 0).to(wide) * scale).reshape(m.shape).to(m.dtype)
        for part, m, scale in zip(parts, b, scales)
    ]


def flops(weight, a, *_) -> int:
    """Count the products of all adapters: as much work as their rank makes of the weight."""
    return 2 * weight.numel() * sum(m.shape[0] for m in a) // weight.shape[0]


def backward_flops(grad, weight, a, *_) -> int:
    """Count the gradients of A and of B: each as much as the forward."""
    return 2 * flops(grad, a)


@op(cost=Cost.MATMUL, flops=flops)
def adapted_stack(
    weight: Tensor,
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    scales: Sequence[float],
    transposed: bool,
) -> Tensor:
    """Return W_e + sum_i scale_i B_ie A_ie for every expert e: a product in fp32 or wider, rounded once.

    Args:
        weight: [E, N, K], or [E, K, N] where `transposed`; any floating dtype.
        a: [E * r_i, K] each, any floating dtype, expert by expert.
        b: [N, r_i * E] each, any floating dtype; an expert's columns are E apart.
        scales: factors, one for each adapter.
        transposed: whether an expert's matrix is [K, N].

    Returns:
        The shape and dtype of weight.
    """
    experts = weight.shape[0]
    wide = torch.promote_types(weight.dtype, torch.float32)
    down, up = downs(a, experts, wide, padded=False), ups(b, scales, experts, wide, padded=False)
    left, right = (down, up) if transposed else (up, down)
    return torch.baddbmm(weight.to(wide), left.transpose(1, 2), right).to(weight.dtype)


@adapted_stack.backward(gives=("weight", "a", "b"), flops=backward_flops)
def adapted_stack_backward(grad, weight, a, b, scales, transposed) -> list[Tensor]:
    """Return the gradients of `adapted_stack`.

    Args:
        grad: of the result, in its shape and dtype. The others are inputs of `adapted_stack`.

    Returns:
        [dweight, dA_i..., dB_i...], each with the shape and dtype of its input.
    """
    experts = weight.shape[0]
    wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
    wide = wide.transpose(1, 2) if transposed else wide  # [E, N, K]
    down, up = downs(a, experts, wide.dtype, padded=False), ups(b, scales, experts, wide.dtype, padded=False)
    d_down = torch.bmm(up, wide)
    d_up = torch.bmm(down, wide.transpose(1, 2))
    return [grad.to(weight.dtype, copy=True), *split_downs(d_down, a), *split_ups(d_up, b, scales)]
