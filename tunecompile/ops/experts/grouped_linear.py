"""Linear layers of experts, frozen, trained or with adapters: each row is multiplied by the matrix of its expert."""

from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor

from tunecompile.ir.op import Cost, op
from tunecompile.ops.experts import by_template, few_rows
from tunecompile.ops.experts.adapted_stack import downs, split_downs, split_ups, ups
from tunecompile.ops.experts.products import (
    BY_TORCH,
    LOOPED,
    Products,
    bias_gradient,
    biases_of_rows,
    inside,
    refuse_grouped,
    zeroed_behind,
)

TOKENS, CHOICES = 13, 2  #: of examples: tokens, and how many experts each has


def forward_flops(x, weight, *_) -> int:
    """Count one matrix a row; adapters are left out."""
    return 2 * x.shape[0] * weight.shape[1] * weight.shape[2]


def backward_flops(grad, *rest, used: Sequence[bool] = (True, False)) -> int:
    """Count dX and dW, each as much as the forward, where they are read."""
    return forward_flops(*rest) * sum(used[:2])


def example(draw) -> list:
    """Return all arguments but x, of TOKENS * CHOICES rows: a stack of four experts, one without rows and one with few,
    under two adapters; rows of no expert; biases.
    """
    experts, (n, k), ranks = 4, (96, 64), (4, 3)
    a = [draw.normal(experts * rank, k, scale=k**-0.5) for rank in ranks]
    b = [draw.normal(n, rank * experts, scale=0.5) for rank in ranks]
    weight, ends = draw.normal(experts, n, k, scale=k**-0.5), draw.numbers(17, 17, 20, TOKENS * CHOICES - 2)
    return [weight, ends, a, b, [0.5, 2.0], False, draw.normal(experts, n)]


@op(
    cost=Cost.MATMUL,
    flops=forward_flops,
    example=lambda draw: [draw.normal(TOKENS * CHOICES, 64), *example(draw)],
)
def grouped_lora_linear(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    scales: Sequence[float],
    transposed: bool,
    bias: Optional[Tensor],
) -> tuple[Tensor, Tensor]:
    """Return x_s W_e^T + b_e + sum_i scale_i (x_s A_ie^T) B_ie^T for each row s of expert e.

    (Sorted rows: arXiv:2211.15841; adapters: arXiv:2106.09685.) W + BA is not computed, nor the gradient of a frozen W.

    Args:
        x: [S, K], sorted by expert; any floating dtype.
        weight: [E, N, K], or [E, K, N] where `transposed`; in x's dtype.
        offsets: [E], int32 or int64: where the rows of each expert end. Rows behind the last offset have no expert.
        a: [E * r_i, K] each, any floating dtype, expert by expert; empty without adapters.
        b: [N, r_i * E] each, any floating dtype; an expert's columns are E apart.
        scales: factors, one an adapter.
        transposed: whether an expert's matrix is [K, N].
        bias: [E, N], any floating dtype, or None.

    Returns:
        (y, xa): y is [S, N] in x's dtype, 0 in rows of no expert; xa, [S, R] in x's dtype, all adapters' x A^T side by
        side, R the sum of r_i rounded up to a power of two of at least 16, is for the backward and gets no gradient.
    """
    return _forward(LOOPED, x, weight, offsets, a, b, scales, transposed, bias)


def _forward(by: Products, x, weight, offsets, a, b, scales, transposed, bias) -> tuple[Tensor, Tensor]:
    experts = weight.shape[0]
    y = by.rows(x, weight if transposed else weight.transpose(1, 2), offsets)
    if bias is not None:
        y = (y + biases_of_rows(bias, x.shape[0], offsets)).to(x.dtype)
    if not a:
        return zeroed_behind(y, offsets), x.new_zeros(x.shape[0], 0)
    xa = by.rows(x, downs(a, experts, x.dtype).transpose(1, 2), offsets)
    xa = torch.where(inside(x.shape[0], offsets), xa, 0)
    y = y + by.rows(xa, ups(b, scales, experts, x.dtype), offsets)
    return zeroed_behind(y, offsets), xa


@grouped_lora_linear.provider("few_rows", because=few_rows.BECAUSE, refuses=few_rows.refuse_dense)
def _(x, weight, offsets, a, b, scales, transposed, bias):
    return few_rows.gathered(x, None, 0, weight, offsets, a, b, scales, transposed, bias)


grouped_lora_linear.provider(
    "triton",
    because="the adapters' part is added before the result is rounded; W + BA is not computed",
    refuses=by_template.refuse_plain,
)(by_template.forward)


@grouped_lora_linear.provider(
    "grouped_mm",
    because="torch's grouped products; W + BA of all experts is not computed",
    refuses=lambda x, weight: refuse_grouped(x, [weight]),
)
def _(x, weight, offsets, a, b, scales, transposed, bias):
    return _forward(BY_TORCH, x.contiguous(), weight, offsets, a, b, scales, transposed, bias)


@grouped_lora_linear.backward(gives=("x", "weight", "a", "b", "bias"), flops=backward_flops)
def grouped_lora_linear_backward(grad, x, weight, offsets, a, b, scales, transposed, bias, out1) -> list[Tensor]:
    """Return the gradients of `grouped_lora_linear`; those of experts without rows are exactly 0.

    Args:
        grad: of y, [S, N] in its dtype.
        out1: xa, as `grouped_lora_linear` returned it. The others are its inputs.

    Returns:
        [dx, dweight, dA_i..., dB_i..., dbias], each with the shape and dtype of its input. dx is 0 in rows of no
        expert, and dbias is empty without a bias.
    """
    return _backward(LOOPED, grad, x, weight, offsets, a, b, scales, transposed, bias, out1)


def _backward(
    by: Products, grad, x, weight, offsets, a, b, scales, transposed, bias, xa, used: Sequence[bool] | None = None
) -> list[Tensor]:
    experts = weight.shape[0]
    dx = by.rows(grad, weight.transpose(1, 2) if transposed else weight, offsets)
    d_a, d_b = [], []
    if a:
        gb = by.rows(grad, ups(b, scales, experts, x.dtype).transpose(1, 2), offsets)
        dx = dx + by.rows(gb, downs(a, experts, x.dtype), offsets)
        d_a = split_downs(by.outer(gb, x, offsets), a)
        d_b = split_ups(by.outer(xa, grad, offsets), b, scales)
    d_weight = None
    if used is None or used[1]:
        d_weight = by.outer(x, grad, offsets) if transposed else by.outer(grad, x, offsets)
    d_bias = bias_gradient(by, grad, offsets, bias) if used is None or used[-1] else None
    return [zeroed_behind(dx, offsets), d_weight, *d_a, *d_b, d_bias]


grouped_lora_linear_backward.provider(
    "triton",
    because="adapters' gradients are summed by expert, in a fixed order; W + BA is not computed",
    refuses=by_template.refuse_plain,
)(by_template.backward)


@grouped_lora_linear_backward.provider(
    "grouped_mm",
    because="torch's grouped products, without the gradient of a frozen weight",
    refuses=lambda grad, weight: refuse_grouped(grad, [weight]),
)
def _(grad, x, weight, offsets, a, b, scales, transposed, bias, out1, *, used):
    rows = (t.contiguous() for t in (grad, x))
    return _backward(BY_TORCH, *rows, weight, offsets, a, b, scales, transposed, bias, out1.contiguous(), used)
