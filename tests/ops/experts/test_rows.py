"""Rows on their way to experts and back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.ops.checks import DTYPES, QUICK, assert_fake_is_real, error
from tunecompile.ops import collect_rows, spread_rows


def orders(tokens, choices):
    order = torch.randperm(tokens * choices)
    return order, torch.argsort(order)


@given(tokens=st.integers(0, 5), choices=st.integers(1, 4), tail=st.sampled_from([(), (1,), (6,), (2, 3)]))
@QUICK
def test_value_and_gradients(tokens, choices, tail):
    torch.manual_seed(0)
    order, places = orders(tokens, choices)
    x = torch.randn(tokens, *tail, dtype=torch.float64, requires_grad=True)
    y = torch.randn(tokens * choices, *tail, dtype=torch.float64, requires_grad=True)
    assert torch.equal(spread_rows(x, order, places, choices), x[order // choices])
    torch.testing.assert_close(
        collect_rows(y, order, places, choices), y[places].reshape(tokens, choices, *tail).sum(1), rtol=1e-14, atol=0
    )
    if tokens:
        assert torch.autograd.gradcheck(lambda x: spread_rows(x, order, places, choices), (x,))
        assert torch.autograd.gradcheck(lambda y: collect_rows(y, order, places, choices), (y,))


@given(tokens=st.integers(1, 5), choices=st.integers(1, 9), dtype=DTYPES)
@QUICK
def test_sums_are_rounded_once(tokens, choices, dtype):
    torch.manual_seed(0)
    order, places = orders(tokens, choices)
    y = torch.randn(tokens * choices, 8, dtype=dtype)
    exact = y.double()[places].reshape(tokens, choices, 8).sum(1)
    assert error(collect_rows(y, order, places, choices), exact) < torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fakes(dtype):
    order, places = orders(4, 2)
    for op, rows in ((spread_rows, 4), (collect_rows, 8)):
        assert_fake_is_real(op, torch.randn(rows, 6, dtype=dtype), order, places, 2)
        assert_fake_is_real(op.backward_op, torch.randn(12 - rows, 6, dtype=dtype), order, places, 2)


def test_opcheck():
    order, places = orders(4, 2)
    torch.library.opcheck(spread_rows.overload, (torch.randn(4, 3, requires_grad=True), order, places, 2))
    torch.library.opcheck(collect_rows.overload, (torch.randn(8, 3, requires_grad=True), order, places, 2))
