"""Grouped products that read rows directly from the tokens, so that no copy sorted by expert is made.

They are `grouped_lora_linear` and its backward with permuted inputs. They have no autograd formula:
`tunecompile.passes.lower.gather_rows` inserts them into forward and backward graphs.
"""

from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor

from tunecompile import templates
from tunecompile.ir.op import Cost, op, refuse_gpu
from tunecompile.notes import Note, note
from tunecompile.ops.experts import by_template, few_rows
from tunecompile.ops.experts.grouped_linear import (
    CHOICES,
    TOKENS,
    example,
    grouped_lora_linear,
    grouped_lora_linear_backward,
)
from tunecompile.ops.experts.rows import collected, spread


def forward_flops(x, weight, *rest) -> int:
    """Count one matrix a row; adapters are left out."""
    order = rest[-2]
    return 2 * order.shape[0] * weight.shape[1] * weight.shape[2]


def backward_flops(grad, x, weight, *rest, used: Sequence[bool] = (True, False)) -> int:
    """Count dX and dW, each as much as the forward, where they are read."""
    order = rest[-2]
    return 2 * (x if order is None else order).shape[0] * weight.shape[1] * weight.shape[2] * sum(used[:2])


def _example(draw) -> list:
    return [draw.normal(TOKENS, 64), *example(draw), draw.order(TOKENS * CHOICES), CHOICES]


@op(cost=Cost.MATMUL, flops=forward_flops, takes=grouped_lora_linear, example=_example)
def gathered_lora_linear(*, x, order: Tensor, choices: int, **rest) -> tuple[Tensor, Tensor]:
    """Return `grouped_lora_linear` of row order[s] // choices of x for each s (arXiv:2106.09685, 2211.15841).

    Args:
        x: [T, K], any floating dtype: tokens. Those not named here: as for `grouped_lora_linear`.
        order: [S], int64: a permutation of choices, sorted by expert.
        choices: how many rows a token has.

    Returns:
        (y, xa): [S, N] and [S, R], as `grouped_lora_linear` returns them.
    """
    return grouped_lora_linear.reference(spread(x, order, choices), **rest)


@gathered_lora_linear.provider("few_rows", because=few_rows.BECAUSE, refuses=few_rows.refuse_gathered)
def _(**given):
    return few_rows.gathered(**given)


@gathered_lora_linear.provider(
    "triton",
    refuses=by_template.refuse,
    because="tokens are read in place, and adapters added before the result is rounded",
)
def _(**given):
    return by_template.forward(**given)


def _backward_example(draw) -> list:
    """Gradients that tokens share, of rows that are read from tokens."""
    grad, order = draw.normal(TOKENS, 96), draw.order(TOKENS * CHOICES)
    given = [grad, draw.normal(TOKENS, 64), *example(draw)]
    inside = torch.arange(TOKENS * CHOICES, device=draw.device) < TOKENS * CHOICES - 2
    return [*given, draw.normal(TOKENS * CHOICES, 16) * inside[:, None], order, CHOICES, order, CHOICES]


@op(cost=Cost.MATMUL, flops=backward_flops, takes=grouped_lora_linear_backward, example=_backward_example)
def gathered_lora_linear_backward(
    *,
    grad,
    x,
    grad_order: Optional[Tensor],
    grad_choices: int,
    order: Optional[Tensor],
    choices: int,
    **rest,
) -> list[Tensor]:
    """Return the gradients of `grouped_lora_linear` for rows that are read by permutations.

    Args:
        grad: of y: [T, N], of which row s is row grad_order[s] // grad_choices; [S, N] where grad_order is None.
        x: [T, K], of which row s is row order[s] // choices; [S, K] where order is None. Those not named here: as for
            `grouped_lora_linear_backward`.
        grad_order, order: [S], int64: permutations of choices.
        grad_choices, choices: how many rows a token has.

    Returns:
        [dx, dweight, dA_i..., dB_i..., dbias]; dx is that of each row, [S, K], not yet summed by token.
    """
    rows = spread(grad, grad_order, grad_choices), spread(x, order, choices)
    return grouped_lora_linear_backward.reference(*rows, **rest)


@gathered_lora_linear_backward.provider(
    "triton",
    refuses=by_template.refuse,
    because="rows are read in place, and adapters' gradients summed in a fixed order",
)
def _(*, used, **given):
    return by_template.backward(**given, used=used)


def _sum_example(draw) -> list:
    return [draw.normal(TOKENS * CHOICES, 64), draw.order(TOKENS * CHOICES), CHOICES, draw.dtype]


@op(cost=Cost.POINTWISE, example=_sum_example)
def sum_rows(y: Tensor, places: Tensor, choices: int, dtype: torch.dtype) -> Tensor:
    """Return the sum of each token's rows, in the order of its choices, rounded to a dtype (arXiv:2211.15841).

    Args:
        y: [T * choices, ...], any floating dtype. Sums are in fp32, in fp64 for fp64.
        places: [T * choices], int64: the row of y of each choice.
        choices: how many rows a token has.
        dtype: of the result.

    Returns:
        [T, ...] in `dtype`.
    """
    return collected(y, places, choices, dtype)


def _refuse(y: Tensor) -> Note | None:
    if reason := refuse_gpu(y):
        return reason
    return None if y.dim() == 2 and y.stride(1) == 1 else note("row-not-contiguous")


@sum_rows.provider(
    "triton",
    refuses=_refuse,
    because="0.11 ms, by Inductor 0.48 (8 rows of 2048 for each of 8192 tokens, bf16, H100)",
)
def _(y, places, choices, dtype):
    return templates.experts.collect(y, places, choices, dtype)
