"""The residual add before a norm becomes one op with it, unless the sum is written or does not broadcast."""

from functools import partial

import pytest
import torch

from tests.support.passes import run
from tests.support.passes.norms import llama_norm
from tests.support.passes.run import family, random

ADD = family("rms_norm", "add_rms_norm")
check = partial(run.check, passes=ADD)


def residual(x, r, w):
    total = x + r
    return llama_norm(total, w), total


def test_residual():
    check(residual, random(2, 3, 8), random(2, 3, 8), random(8), expect={"add_rms_norm": 1})
    check(lambda x, w: residual(x, x, w), random(2, 3, 8), random(8), expect={"add_rms_norm": 1})
    check(
        residual,
        random(2, 3, 8, dtype=torch.bfloat16),
        random(2, 3, 8, dtype=torch.bfloat16),
        random(8, dtype=torch.bfloat16),
        expect={"add_rms_norm": 1},
        tol=1.2e-2,
    )


@pytest.mark.parametrize("other", [(8,), (2, 1, 8), ()])
def test_residual_that_is_broadcast(other):
    check(residual, random(2, 3, 8), random(*other), random(8), expect={"rms_norm": 1})
    check(lambda r, x, w: residual(r, x, w), random(*other), random(2, 3, 8), random(8), expect={"rms_norm": 1})


@pytest.mark.parametrize("narrow", [0, 1])
def test_residual_of_another_dtype(narrow):
    """As under autocast, whose linears add bf16 to a residual in fp32."""
    sides = [random(2, 3, 8, dtype=torch.bfloat16 if side == narrow else torch.float32) for side in range(2)]
    check(residual, *sides, random(8), expect={"add_rms_norm": 1}, tol=1e-2)


def test_total_read_before_the_norm():
    check(
        lambda x, r, w: (lambda t: torch.sin(t) * llama_norm(t, w) + t)(x + r),
        random(2, 3, 8),
        random(2, 3, 8),
        random(8),
    )


def test_constant_summand():
    check(lambda x, w: llama_norm(x + 1.0, w), random(2, 3, 8), random(8), expect={"rms_norm": 1})


def test_constant_first_summand():
    check(lambda x, w: llama_norm(1.0 + x, w), random(2, 3, 8), random(8), expect={"rms_norm": 1})


def test_two_residuals_in_a_row():
    def fn(x, r, w, v):
        n, total = residual(x, r, w)
        return residual(torch.sin(n), total, v)

    check(fn, random(2, 3, 8), random(2, 3, 8), random(8), random(8), expect={"add_rms_norm": 2})


def accumulate(x, r, w):
    total = x + r
    n = llama_norm(total, w)
    total += torch.sin(n)
    return total


def test_total_mutated_after_the_norm():
    check(
        accumulate,
        random(2, 3, 8, dtype=torch.bfloat16),
        random(2, 3, 8, dtype=torch.bfloat16),
        random(8, dtype=torch.bfloat16),
        passes=[],
        tol=1.2e-2,
    )


def test_total_mutated_after_the_norm_without_gradients():
    check(accumulate, random(2, 3, 8, grad=False), random(2, 3, 8, grad=False), random(8, grad=False))


def test_never_across_a_mutation_of_a_summand_or_the_total():
    def summand(x, r, w):
        x = x * 1.0
        total = x + r
        x.add_(1.0)
        return llama_norm(total, w) + total

    def sum_(x, r, w):
        total = x + r
        total.mul_(3.0)
        return llama_norm(total, w) + total

    for fn in (summand, sum_):
        check(fn, random(4, 8, grad=False), random(4, 8, grad=False), random(8, grad=False), expect={"rms_norm": 1})


@pytest.mark.parametrize("whole", [0, 1])
def test_whole_numbers_that_are_added(whole):
    summands = [random(2, 3, 8), random(2, 3, 8)]
    summands[whole] = torch.randint(3, (2, 3, 8))
    seen = check(residual, *summands, random(8), expect={"rms_norm": 1}, whole=False)
    assert "not of a floating dtype" in str(seen.refused)
