"""Products of adapters in fp32 with rows in bf16: as exact as in fp32, also where they are rounded."""

import pytest
import torch

from tests.support.ops.checks import assert_fake_is_real, error
from tunecompile.ops.adapters import products
from tunecompile.ops.adapters.products import adapted_sum, exact_factors, outer, pieces, project


def operands(device, rows=300, width=192, rank=5):
    """(Rows, A, dY B), in the strides that they have in a layer."""
    torch.manual_seed(0)
    x = torch.randn(rows, width + 64, device=device).bfloat16()[:, :width]
    return x, torch.randn(rank, width, device=device), torch.randn(rows, 2 * rank, device=device)[:, :rank]


def forms(x, a, narrow):
    """(Result, left, right) of the products of an adapter."""
    yield project(x, a.t(), torch.float32), x, a.t()
    yield project(x, a.t().contiguous(), torch.float32), x, a.t()
    yield outer(narrow, x, torch.float32), narrow.t(), x
    yield outer(x, narrow, torch.float32), x.t(), narrow


def assert_as_exact_as_fp32(made, left, right):
    exact = left.double() @ right.double()
    assert made.dtype == torch.float32 and made.shape == exact.shape and made.is_contiguous()
    theirs = (left.float() @ right.float(), (right.float().t() @ left.float().t()).t())
    least = 2 * torch.finfo(torch.float32).eps  # tensor cores round towards zero, so short sums have about one
    assert error(made, exact) <= max(1.1 * max(error(each, exact) for each in theirs), least)


def test_without_a_gpu_they_are_in_fp32():
    for made in forms(*operands("cpu")):
        assert_as_exact_as_fp32(*made)


def test_pieces_are_the_matrix():
    m = torch.randn(100, 33) * 10.0 ** torch.randint(-25, 30, (100, 33))
    assert all(part.dtype == torch.bfloat16 for part in pieces(m))
    assert error(sum(part.double() for part in pieces(m.t())), m.t().double()) < 2**-15


@pytest.mark.slow
def test_generated_code_leaves_the_pieces():
    """It drops a cast to bf16 and back."""
    m = torch.randn(64, 32)
    made = torch.compile(lambda m: pieces(m * 2))(m)
    assert error(sum(part.double() for part in made), 2 * m.double()) < 2**-15


def test_what_is_rounded_loses_nothing_more(monkeypatch):
    monkeypatch.setattr(products, "on_gpu", lambda tensor: True)
    left, right = torch.randn(300, 8), torch.randn(8, 200)
    exact = left.double() @ right.double()
    factors = exact_factors(left, right, torch.bfloat16)
    made = adapted_sum(*factors, [torch.zeros(300, 1).bfloat16()], [torch.zeros(1, 200).bfloat16()], [0])
    assert made.dtype == factors[0].dtype == torch.bfloat16
    assert error(made, exact) <= 1.02 * error((left @ right).bfloat16(), exact)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("columns, width", [((0, 5), 8), ((0, 0), 4)], ids=["beside each other", "upon each other"])
def test_sum_of_products(columns, width, dtype):
    """Columns of rows, and turned weights, are read where they are."""
    narrow, adapter = torch.randn(6, 2).to(dtype), torch.randn(2, width).to(dtype)
    rows = list(torch.randn(6, 14).to(dtype).split(7, 1))
    weights = [torch.randn(w, 7).to(dtype).t() for w in ((5, 3) if columns[1] else (4, 4))]
    args = (narrow, adapter, rows, weights, [*columns])
    exact = narrow.double() @ adapter.double()
    for left, right, first in zip(rows, weights, columns):
        exact[:, first : first + right.shape[1]] += left.double() @ right.double()
    assert error(adapted_sum(*args), exact) < (1e-15 if dtype == torch.float64 else 2**-7)
    assert_fake_is_real(adapted_sum, *args)
    assert adapted_sum.flops(*args) == 2 * 6 * (2 * width + 7 * sum(w.shape[1] for w in weights))


@pytest.mark.gpu  # in generated code: tests/models/test_gpu_experts.py
@pytest.mark.parametrize("width, rank", [(2048, 48), (4096, 16), (136, 3)])
def test_on_a_gpu(width, rank):
    given = operands("cuda", 8192, width, rank)
    for (made, *sides), (again, *_) in zip(forms(*given), forms(*given)):
        assert_as_exact_as_fp32(made, *sides)
        assert torch.equal(made, again)
    fp16 = given[0].half()
    assert torch.equal(project(fp16, given[1].t(), torch.float32), fp16.float() @ given[1].t())
