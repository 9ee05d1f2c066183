"""Products of few rows with frozen weights, against dequantised ones in fp64."""

import pytest
import torch

from tests.support.ops.templates import Weight

pytest.importorskip("triton")
from tunecompile.ops.frozen_weights import DenseWeights  # noqa: E402
from tunecompile.ops.packed.few_rows import product  # noqa: E402
from tunecompile.templates.few_rows import launches as few_rows  # noqa: E402


def adapters(sizes, k, ranks, device, dtype):
    g = torch.Generator().manual_seed(1)
    a = [torch.randn(r, k, generator=g, dtype=torch.float32).mul(k**-0.5).to(device, dtype) for r in ranks]
    b = [torch.randn(n, r, generator=g, dtype=torch.float32).to(device, dtype) for n, r in zip(sizes, ranks)]
    return a, b


@pytest.mark.parametrize(
    ("rows", "k", "sizes", "ranks", "options"),
    [
        (8, 256, (128, 64, 64), (16, 16, 16), {}),
        (1, 128, (64,), (4,), {"quant_type": "fp4"}),
        (17, 512, (64, 192), (8, 24), {"nested": False}),
        (5, 384, (64,), (16,), {"blocksize": 128}),
        (3, 320, (64, 64), (8, 8), {}),
        (4, 256, (128, 40, 8), (8, 4, 16), {}),
    ],
)
@pytest.mark.parametrize("dtype", [pytest.param(torch.bfloat16, marks=pytest.mark.gpu), torch.float32])
def test_as_with_dequantised_weights(device, cast, rows, k, sizes, ranks, options, dtype):
    weights = [Weight(n, k, device, seed=i, **options) for i, n in enumerate(sizes)]
    a, b = adapters(sizes, k, ranks, device, dtype)
    factors = [2.0, 0.5, 1.0][: len(sizes)]
    # Triton's interpreter multiplies bf16 by their bits
    made = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(2)).to(device, made)
    kind = {name: value for name, value in weights[0].options.items() if name in ("blocksize", "quant_type")}
    parts, xa = few_rows.begin(x, few_rows.in_order(x), [w.member() for w in weights], a, **kind)
    y, projected = few_rows.finish(parts, xa, b, factors, made)
    wide = x.double()
    exact_xa = [wide @ m.double().t() for m in a]
    exact = [
        wide @ w.reference(torch.float32, cast).double().t() + f * (u @ m.double().t())
        for w, u, m, f in zip(weights, exact_xa, b, factors)
    ]
    for found, right, limit in ((y, torch.cat(exact, 1), 5e-3), (projected, torch.cat(exact_xa, 1), 5e-3)):
        assert found.dtype == made and found.shape == right.shape
        assert (found.double() - right).norm() / right.norm() < limit
        apart = (found.double() - right).norm(dim=0) / right.norm(dim=0).mean()
        assert apart.max() < 3e-2, "a column is wrong"


@pytest.mark.parametrize(
    ("rows", "k", "sizes", "ranks"), [(8, 256, (128, 8, 64, 40), (16, 4, 16, 8)), (33, 320, (64,), (8,))]
)
def test_dense_weights_within_a_wider_matrix(device, rows, k, sizes, ranks):
    made = torch.bfloat16 if device.type == "cuda" else torch.float32
    matrix = torch.randn(sum(sizes), k + 64, generator=torch.Generator().manual_seed(0)).to(device, made)
    weights, factors = matrix[:, :k].split(sizes), [2.0, 0.5, 1.0, 3.0][: len(sizes)]
    a, b = adapters(sizes, k, ranks, device, torch.float32)
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(2)).to(device, made)
    y, _ = product(x, DenseWeights(weights, list(sizes), k), a, b, factors)
    wide, tables = x.double(), zip(weights, a, b, factors, strict=True)
    right = torch.cat(
        [wide @ w.double().t() + f * (wide @ u.double().t()) @ v.double().t() for w, u, v, f in tables], 1
    )
    assert (y.double() - right).norm() / right.norm() < (5e-3 if made == torch.bfloat16 else 1e-6)


def test_without_adapters(device, cast):
    made = torch.bfloat16 if device.type == "cuda" else torch.float32
    w, x = Weight(128, 256, device), torch.randn(3, 256, generator=torch.Generator().manual_seed(2)).to(device, made)
    parts, _ = few_rows.begin(x, few_rows.in_order(x), [w.member()], [])
    right = x.double() @ w.reference(torch.float32, cast).double().t()
    assert (parts.sum(0).double() - right).norm() / right.norm() < 5e-3


def test_order_of_columns():
    x = torch.arange(128).reshape(1, 128)
    found = few_rows.in_order(x)[0]
    assert found[:10].tolist() == [0, 1, 16, 17, 32, 33, 48, 49, 2, 3]
    assert found.sort().values.tolist() == x[0].tolist() and (found[64:] - found[:64] == 64).all()


def test_what_does_not_fit(device):
    x, w = torch.zeros(2, 96, dtype=torch.bfloat16, device=device), Weight(64, 96, device)
    with pytest.raises(ValueError, match="96 columns"):
        few_rows.begin(x, x, [w.member()], [torch.zeros(4, 96, device=device)])
