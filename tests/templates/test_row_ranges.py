"""Scratch with a part for each range of rows: with two ranges or more no graph asks how many, and one without rows adds nothing."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

pytest.importorskip("triton")
from tunecompile._torch.fake_tensors import size_hint  # noqa: E402
from tunecompile.templates import lora_mlp, norms  # noqa: E402
from tunecompile.templates._launch import row_ranges  # noqa: E402
from tunecompile.templates.recurrent import selective_scan  # noqa: E402

ROWS, COLUMNS = 20, 32


def rows(count):
    """A tensor of so many rows, which are a symbol."""
    dims = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
    return FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.empty(count, COLUMNS), symbolic_context=dims)


@pytest.mark.parametrize(
    "count, each, most, ranges", [(20, 512, None, 2), (1025, 512, None, 4), (513, 512, 1, 2), (50, 4, 528, 528)]
)
def test_of_a_symbol(count, each, most, ranges):
    x = rows(count)
    made = row_ranges(x.shape[0], each, most)
    with x.fake_mode:
        assert torch.empty(made, COLUMNS).sum(0).is_contiguous() and torch.zeros(made, COLUMNS)[0].is_contiguous()
    assert size_hint(made) == ranges and not x.fake_mode.shape_env.guards


def test_of_a_number():
    """Nothing is added where there is no symbol that could be asked."""
    assert [row_ranges(count, 512) for count in (1, 512, 513)] == [1, 1, 2]
    assert row_ranges(5000, 4, 528) == 528 and row_ranges(0, 4) == 0


def made(name, device):
    """The gradients that a template sums over rows."""
    torch.manual_seed(0)
    x, grad = (torch.randn(ROWS, COLUMNS).to(device, torch.float16) for _ in range(2))
    weight = torch.randn(COLUMNS).to(device, torch.float16)
    if name == "norms":
        return norms.backward(grad, x, weight, sums=2)
    down, xa, wide = (torch.randn(ROWS, n).to(device, torch.float16) for n in (4, 8, 2 * COLUMNS))
    return lora_mlp.backward(grad, wide, down, xa, (4, 4))


@pytest.mark.parametrize("name, template", [("norms", norms), ("lora_mlp", lora_mlp)])
def test_a_program_without_rows_adds_nothing(name, template, device, monkeypatch):
    expected = made(name, device)
    asked = []
    monkeypatch.setattr(template, "row_ranges", lambda *sizes: asked.append(sizes) or row_ranges(*sizes) + 3)
    blank = torch.empty  # what nothing writes shows
    monkeypatch.setattr(
        torch, "empty", lambda *size, **kind: blank(*size, **kind).fill_(torch.nan if "dtype" in kind else 0)
    )
    found = made(name, device)
    assert asked and all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


def test_a_scans_parts_are_two_where_chunks_are_a_symbol():
    x = rows(1 + ROWS)
    with x.fake_mode:
        states, a = torch.empty(1, 6, 2), torch.empty(3, 2)
        parts = selective_scan._parts((x.shape[0] + 31) // 32, states, a)
        assert parts.sum(0).is_contiguous() and parts.shape[1:] == (3, 2)
    assert size_hint(parts.shape[0]) == 2 and not x.fake_mode.shape_env.guards
    assert selective_scan._parts(1, torch.empty(1, 3, 2), torch.empty(3, 2)).shape == (1, 3, 2)
