"""Products grouped by expert: against fp64, whatever experts rows went to, read in place or through an order."""

import pytest
import torch

pytest.importorskip("triton")

from tunecompile.templates import experts  # noqa: E402

#: rows of each expert
LOADS = [(130, 0, 3, 61), (0, 0, 5, 0), (0, 0, 0), (16,)]
#: Triton's interpreter multiplies the bits of bf16 as if they were integers
ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="products of bf16 need a GPU")
DTYPES = [
    torch.float32,
    pytest.param(torch.float16, marks=pytest.mark.slow),
    pytest.param(torch.bfloat16, marks=ON_GPU),
]


def draw(loads, width, columns, rank, choices, dtype, device):
    """(offsets, tokens, order, row of each place, stack [E, N, K], inner, up): seven rows more are nobody's."""
    torch.manual_seed(sum(loads))
    total = -(-(sum(loads) + 7) // max(choices, 1)) * max(choices, 1)
    offsets = torch.tensor(loads).cumsum(0).to(torch.int32 if rank else torch.int64)
    order = torch.randperm(total) if choices else None
    tokens = total // choices if choices else total
    x, weight = torch.randn(tokens, width), torch.randn(len(loads), columns, width) / width**0.5
    inner, up = torch.randn(total, rank), torch.randn(len(loads), rank, columns) / 4
    made = [t.to(device, dtype) for t in (x, weight, inner, up)]
    source = torch.arange(total) if order is None else order // choices
    return offsets.to(device), None if order is None else order.to(device), source.to(device), made


def by_expert(offsets, rows):
    """(expert, its rows) of all experts with rows."""
    ends = offsets.tolist()
    return [(e, slice(start, end)) for e, (start, end) in enumerate(zip([0, *ends], ends)) if end > start]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loads", LOADS)
@pytest.mark.parametrize(
    "turned, choices, rank, width, columns", [(True, 2, 16, 48, 40), (False, 0, 0, 64, 16), (True, 0, 32, 40, 72)]
)
def test_rows(loads, turned, choices, rank, width, columns, dtype, device, error, bound):
    offsets, order, source, (x, weight, inner, up) = draw(loads, width, columns, rank, choices, dtype, device)
    exact = torch.zeros(len(source), columns, dtype=torch.float64, device=device)
    for e, mine in by_expert(offsets, len(source)):
        exact[mine] = x.double()[source[mine]] @ weight[e].double().t()
        if rank:
            exact[mine] += inner[mine].double() @ up[e].double()
    nobody = source[int(offsets[-1]) :] if not choices else []
    x[nobody] = float("nan")
    matrices = weight if turned else weight.transpose(1, 2).contiguous()
    table = experts.tiles(offsets, len(source), x)
    told = {"inner": inner, "up": up} if rank else {}
    if choices or rank:
        told["bias"] = torch.randn(len(loads), columns, device=device)
        for e, mine in by_expert(offsets, len(source)):
            exact[mine] += told["bias"][e].double()
    y = experts.rows(x, matrices, offsets, table, len(source), turned=turned, order=order, choices=choices, **told)
    assert y.dtype == dtype and error(y, exact) < bound(dtype)
    assert y[int(offsets[-1]) :].eq(0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loads", LOADS)
@pytest.mark.parametrize("choices, rank, columns", [(2, 16, 72), (0, 32, 16)])
def test_outer(loads, choices, rank, columns, dtype, device, error, bound):
    offsets, order, source, (x, _, inner, _) = draw(loads, columns, 8, rank, choices, dtype, device)
    exact = torch.zeros(len(loads), rank, columns, dtype=torch.float64, device=device)
    for e, mine in by_expert(offsets, len(source)):
        exact[e] = inner[mine].double().t() @ x.double()[source[mine]]
    inner[int(offsets[-1]) :] = float("nan")
    made = experts.outer(inner, x, offsets, order=order, choices=choices)
    assert error(made, exact) < bound(dtype)
    for e, load in enumerate(loads):
        assert load or made[e].eq(0).all()


@pytest.mark.parametrize("given, asked", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("choices", [1, 3])
def test_collect(given, asked, choices, device, error):
    torch.manual_seed(0)
    y, places = torch.randn(choices * 5, 70, device=device).to(given), torch.randperm(choices * 5).to(device)
    made = experts.collect(y, places, choices, asked)
    assert made.dtype == asked
    assert error(made, y.double()[places].unflatten(0, (5, choices)).sum(1)) < 1e-6


def test_what_does_not_fit(device):
    x, weight = torch.randn(4, 6, device=device), torch.randn(2, 3, 5, device=device)
    offsets = torch.tensor([2, 4], device=device)
    with pytest.raises(ValueError, match="do not fit"):
        experts.rows(x, weight, offsets, experts.tiles(offsets, 4, x), 4, turned=True)
    with pytest.raises(ValueError, match="unit column stride"):
        experts.collect(x.t(), torch.arange(6, device=device), 2, x.dtype)
    with pytest.raises(ValueError, match="do not fit"):
        experts.outer(x.t(), x.t(), offsets)


@pytest.mark.parametrize("loads", LOADS)
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_zeros_stand_where_products_write_nothing(loads, kind, device):
    offsets = torch.tensor(loads).cumsum(0).to(device, kind)
    stack = torch.randn(len(loads), 72, 40, device=device, dtype=torch.float16)
    rows = torch.randn(sum(loads) + 70, 40, device=device, dtype=torch.float16)
    kept, wanted = stack.clone(), rows.clone()
    experts.zero_idle(stack, offsets)
    experts.zero_behind(rows, offsets)
    for expert, load in enumerate(loads):
        kept[expert] *= load > 0
    wanted[sum(loads) :] = 0
    assert torch.equal(stack, kept) and torch.equal(rows, wanted)
    experts.zero_behind(rows[: sum(loads)], offsets)
    assert torch.equal(rows, wanted)
    with pytest.raises(ValueError):
        experts.zero_behind(rows.t(), offsets)
    with pytest.raises(ValueError):
        experts.zero_idle(stack.transpose(1, 2), offsets)
