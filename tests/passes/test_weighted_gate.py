"""Gated activations with a weight for each row, as routing weights stand before an expert's second product."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.support.passes import run
from tests.support.passes.run import family, random

check = partial(run.check, passes=family("swiglu", "weighted_gate"))


def weighted(gate, up, weights):
    return (F.silu(gate) * up * weights).to(gate.dtype) * 2


def inputs(dtype, of_weights):
    return *(random(6, 8, dtype=dtype) for _ in range(2)), random(6, 1, dtype=of_weights)


def test_rows_are_weighted_in_one_op():
    check(weighted, *inputs(torch.bfloat16, torch.float32), expect={"weighted_gate": 1}, tol=1.5e-2)


def read_twice(gate, up, weights):
    gated = F.silu(gate) * up
    return gated * weights + gated


def a_weight_each(gate, up, weights):
    return F.silu(gate) * up * weights.expand_as(gate).contiguous()


def of_columns(gate, up, weights):
    return F.silu(gate[:, :6]) * up[:, :6] * weights.t()


def in_both_dtypes(gate, up, weights):
    wide = F.silu(gate) * up * weights
    return wide.to(gate.dtype).sum() + wide.sum()


@pytest.mark.parametrize("other", [read_twice, a_weight_each, of_columns])
def test_others_are_left(other):
    check(other, *inputs(torch.float32, torch.float32), expect={"gated_activation": 1})


@pytest.mark.parametrize(
    "weights", [torch.arange(6).view(6, 1), random(1, 8), random(1, 1)], ids=["ints", "row", "one"]
)
def test_weights_that_are_none_of_rows(weights):
    """Of whole numbers, which have no gradient, or of another shape."""
    gate, up, _ = inputs(torch.float32, torch.float32)
    made = lambda gate, up: F.silu(gate) * up * weights  # noqa: E731
    check(made, gate, up, expect={"gated_activation": 1})


def test_a_product_that_is_read_in_a_wider_dtype_is_left():
    given = inputs(torch.bfloat16, torch.float32)
    seen = check(in_both_dtypes, *given, expect={"gated_activation": 1}, tol=1.5e-2)
    assert "another dtype" in str(seen.refused)


def test_a_gate_without_gradients():
    """In one op with its weights it would have some."""

    def fn(gate, up, weights):
        with torch.no_grad():
            gated = F.silu(gate) * up
        return gated * weights + gate.sum()

    given = inputs(torch.float32, torch.float32)
    seen = check(fn, *given, expect={"gated_activation": 1}, whole=False)
    assert "in place" in str(seen.refused)
