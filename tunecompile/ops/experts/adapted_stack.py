"""A stack of weights with low-rank adapters, written out: W_e + scale B_e A_e of every expert e.

For code that uses an adapted stack (arXiv:2106.09685) other than in a grouped product. Grouped products become
`tunecompile.ops.experts.grouped_linear`, which does not compute the sum.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tunecompile.ir.op import Cost, op
from tunecompile.ops.experts.adapter_stacks import downs, split_downs, split_ups, ups


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
