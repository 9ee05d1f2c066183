"""Products whose rows are read through an order: those of the rows themselves. Kernels are tested on a GPU."""

import pytest
import torch

from tests.support.ops.checks import assert_fake_is_real
from tests.support.ops.experts import operands
from tunecompile.ops import gathered_lora_linear, gathered_lora_linear_backward, grouped_lora_linear, sum_rows
from tunecompile.ops.experts.adapted_stack import padded_rank

CHOICES = 2


def draw(ranks=(3,)):
    torch.manual_seed(0)
    x, *rest = operands((3, 0, 4), 1, ranks, False, torch.float64)
    return torch.randn(len(x) // CHOICES, x.shape[1], dtype=x.dtype), torch.randperm(len(x)), rest


@pytest.mark.parametrize("ranks", [(), (3, 2)])
def test_they_are_products_of_the_rows(ranks):
    tokens, order, rest = draw(ranks)
    y, xa = gathered_lora_linear(tokens, *rest, order, CHOICES)
    wanted = grouped_lora_linear(tokens[order // CHOICES], *rest)
    assert torch.equal(y, wanted[0]) and torch.equal(xa, wanted[1])
    grads = torch.randn(len(tokens), y.shape[1], dtype=y.dtype)
    rows = [t[order // CHOICES] for t in (grads, tokens)]
    theirs = grouped_lora_linear.backward_op(*rows, *rest, xa)
    for grad, x in ((grads, tokens), (grads, None), (None, tokens)):
        sides = [(rows[i], None, 0) if side is None else (side, order, CHOICES) for i, side in enumerate((grad, x))]
        (grad, *grad_read), (x, *read) = sides
        ours = gathered_lora_linear_backward(grad, x, *rest, xa, *grad_read, *read)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs))


def test_fakes():
    tokens, order, rest = draw()
    assert_fake_is_real(gathered_lora_linear, tokens, *rest, order, CHOICES)
    _, xa = gathered_lora_linear(tokens, *rest, order, CHOICES)
    grad = torch.randn(len(order), 8, dtype=tokens.dtype)
    assert_fake_is_real(gathered_lora_linear_backward, grad, tokens, *rest, xa, None, 0, order, CHOICES)
    assert_fake_is_real(sum_rows, grad, order, CHOICES, torch.float32)


def test_ranks_are_what_tensor_cores_multiply():
    for rank, padded in ((1, 16), (16, 16), (17, 32), (40, 64)):
        assert padded_rank([torch.empty(3 * rank, 4)], 3) == padded


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_sums_are_rounded_once(dtype):
    y, places = torch.randn(8, 5).half(), torch.randperm(8)
    exact = y.double()[places].unflatten(0, (4, 2)).sum(1)
    assert torch.equal(sum_rows(y, places, 2, dtype), exact.to(dtype))
