"""The norms of an adapted weight's rows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.ops.checks import DTYPES, LAYOUTS, QUICK, assert_fake_is_real, error, tensor
from tunecompile.ops import adapted_norm


def formula(weight, a, b, scale):
    return torch.linalg.norm(weight + scale * (b @ a), dim=1)


@given(
    n=st.integers(1, 9),
    k=st.integers(1, 9),
    r=st.integers(1, 3),
    dtype=DTYPES,
    adapters=st.sampled_from([torch.float32, torch.bfloat16]),
    weights=LAYOUTS,
    scale=st.sampled_from([0.5, -2.0, 0.0]),
)
@QUICK
def test_any_shape_dtype_and_stride(n, k, r, dtype, adapters, weights, scale):
    torch.manual_seed(0)
    weight, a, b = (
        tensor((n, k), weights, dtype),
        tensor((r, k), "strided", adapters),
        tensor((n, r), "transposed", adapters),
    )
    assert_fake_is_real(adapted_norm, weight, a, b, scale, dtype)
    exact = formula(weight.double(), a.double(), b.double(), scale)
    got = adapted_norm(weight, a, b, scale, dtype)
    assert got.dtype == dtype and error(got, exact) < 4 * max(torch.finfo(t).eps for t in (dtype, adapters))


def test_no_less_exact_than_what_it_replaces():
    weight, a, b = (torch.randn(shape).to(torch.bfloat16) for shape in ((64, 96), (4, 96), (64, 4)))
    exact = formula(weight.double(), a.double(), b.double(), 2.0)
    assert error(adapted_norm(weight, a, b, 2.0, torch.bfloat16), exact) <= error(formula(weight, a, b, 2.0), exact)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_values(dtype):
    weight, a, b = (torch.randn(shape, dtype=dtype) for shape in ((6, 8), (2, 8), (6, 2)))
    torch.testing.assert_close(adapted_norm(weight, a, b, 0.5, dtype), formula(weight, a, b, 0.5))
