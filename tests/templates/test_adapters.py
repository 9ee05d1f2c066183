"""Products of fp32 adapters with bf16 rows: as exact as in fp32, at any size and stride."""

import pytest
import torch

pytest.importorskip("triton")

from tunecompile.templates import adapters  # noqa: E402

#: rows, columns and ranks that no block divides; strides of a slice; several blocks of ranks
SIZES = [(70, 72, 5), (33, 1032, 3), (65, 136, 80)]


def draw(rows, width, device):
    """Rows that are exact in bf16: in bf16 on a GPU, in fp32 in the interpreter, which multiplies no bf16."""
    torch.manual_seed(rows)
    x = torch.randn(rows, width + 8, device=device).bfloat16()[:, :width]
    return x if device.type == "cuda" else x.float()


def assert_exact(made, left, right, error):
    exact = left.double() @ right.double()
    least = 2 * torch.finfo(torch.float32).eps  # tensor cores round towards zero, so short sums have about one
    assert error(made.sum(0), exact) <= max(1.1 * error(left.float() @ right.float(), exact), least)


@pytest.mark.parametrize("rows, width, rank", SIZES)
@pytest.mark.parametrize("turned", [False, True])
def test_project(rows, width, rank, turned, device, error):
    x, m = draw(rows, width, device), torch.randn(width, rank, device=device)
    m = m.t().contiguous().t() if turned else m
    assert_exact(adapters.project(x, m), x, m, error)


@pytest.mark.parametrize("rows, width, rank", [SIZES[0], pytest.param(*SIZES[2], marks=pytest.mark.slow)])
def test_reduce(rows, width, rank, device, error):
    x, u = draw(rows, width, device), torch.randn(rows, rank + 3, device=device)[:, :rank]
    assert_exact(adapters.reduce(x, u), x.t(), u, error)
    assert_exact(adapters.reduce(x, u, turned=True), u.t(), x, error)


@pytest.mark.gpu
@pytest.mark.parametrize("rows, width, rank", [(8192, 2048, 48), (8192, 4096, 16)])
def test_long_sums(rows, width, rank, error):
    """Hopper's tensor cores round sums towards zero."""
    x = draw(rows, width, torch.device("cuda"))
    m, u = torch.randn(width, rank, device="cuda"), torch.randn(rows, rank, device="cuda")
    for made, left, right in ((adapters.project(x, m), x, m), (adapters.reduce(x, u), x.t(), u)):
        exact = left.double() @ right.double()
        assert error(made.sum(0), exact) < error(left.float() @ right.float(), exact)
    assert torch.equal(adapters.reduce(x, u), adapters.reduce(x, u))


def test_what_does_not_fit(device):
    x = torch.ones(4, 8, device=device)
    with pytest.raises(ValueError, match="do not fit"):
        adapters.project(x.t(), torch.ones(4, 2, device=device))
    with pytest.raises(ValueError, match="do not fit"):
        adapters.reduce(x, torch.ones(3, 2, device=device))
