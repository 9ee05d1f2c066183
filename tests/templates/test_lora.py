"""Adapters written below or beside a large matrix."""

import pytest
import torch

pytest.importorskip("triton")
from tunecompile.templates import lora  # noqa: E402


@pytest.mark.parametrize("source, columns", [(torch.float32, 65), (torch.bfloat16, 2050)])
def test_append_rows(device, source, columns):
    """Rows of another dtype go below the weight, and nothing else is written."""
    out = torch.full((7, columns + 3), -7.0, dtype=torch.bfloat16, device=device)
    a = torch.randn(4, columns + 1, device=device).to(source)[:, :columns]
    lora.append_rows(a, out, 2)
    expected = torch.full_like(out, -7.0)
    expected[2:6, :columns] = a.bfloat16()
    assert torch.allclose(out.float(), expected.float(), rtol=2**-7, atol=0)  # the interpreter truncates


@pytest.mark.parametrize("source, rows, rank", [(torch.float32, 65, 3), (torch.bfloat16, 130, 16)])
def test_append_columns(device, source, rows, rank):
    """They stand behind column 7; what is behind them is zeroed."""
    out = torch.full((rows, rank + 10), -7.0, dtype=torch.bfloat16, device=device)
    xa = torch.randn(rows, rank + 1, device=device).to(source)[:, :rank]
    lora.append_columns(xa, out, 7)
    expected = torch.full_like(out, -7.0)
    expected[:, 7 : 7 + rank], expected[:, 7 + rank :] = xa.bfloat16(), 0
    assert torch.allclose(out.float(), expected.float(), rtol=2**-7, atol=0)


def test_what_does_not_fit(device):
    with pytest.raises(ValueError, match="cannot hold"):
        lora.append_columns(torch.ones(2, 3, device=device), torch.ones(2, 4, device=device), 2)
    with pytest.raises(ValueError, match="unit column stride"):
        lora.append_rows(torch.ones(2, 3, device=device).t(), torch.ones(4, 4, device=device), 0)


@pytest.mark.gpu
def test_many_pieces_at_once():
    """The table holds addresses, which the interpreter cannot follow."""
    device, pieces, expected = torch.device("cuda"), [], []
    for number, (rows, columns, source, target) in enumerate(
        [
            (16, 4096, torch.float32, torch.bfloat16),
            (300, 8, torch.bfloat16, torch.bfloat16),
            (1, 5, torch.float32, torch.bfloat16),
            (3000, 16, torch.float32, torch.float16),
        ]
    ):
        whole = torch.full((rows + 2, columns + 9), -7.0, device=device, dtype=target)
        value = torch.randn(rows, columns + 1, device=device).to(source)[:, :columns]
        pieces.append((value, whole[1 : rows + 1, 3 : columns + 3], 0.5 + number))
        expected.append(whole.clone())
        expected[-1][1 : rows + 1, 3 : columns + 3] = (value.float() * (0.5 + number)).to(target)
        pieces[-1] += (whole,)
    write = lora.write_pieces([piece[:3] for piece in pieces])
    for _ in range(2):
        write()
        for (value, _, _, whole), right in zip(pieces, expected):
            assert torch.equal(whole, right)
        for piece, right in zip(pieces, expected):
            piece[0].mul_(2)  # as an optimizer does
            right[1:-1, 3:-6] = (piece[0].float() * piece[2]).to(right.dtype)


@pytest.mark.parametrize("dtype, columns", [(torch.float32, 65), (torch.bfloat16, 2050)])
def test_write_beside(device, dtype, columns):
    """All of a row is written, and rows that are not asked for stay."""
    out = torch.full((6, columns + 9), -7.0, dtype=dtype, device=device)
    x, xa = (
        torch.randn(4, columns + 1, device=device).to(dtype)[:, :columns],
        torch.randn(8, 3, device=device).to(dtype)[4:],
    )
    lora.write_beside(x, xa, out)
    assert torch.equal(out[:4], torch.cat([x, xa, out.new_zeros(4, 6)], 1)) and bool((out[4:] == -7).all())
    with pytest.raises(ValueError, match="cannot hold"):
        lora.write_beside(x, xa, out[:3])
