"""E4M3 codes with scales of blocks: the values of torch and transformers."""

import pytest
import torch

from tests.support.ops.checks import assert_fake_is_real
from tunecompile.ops import dequantize_fp8_blocks


def test_every_code_is_torchs():
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(torch.float8_e4m3fn).float()
    got = dequantize_fp8_blocks(codes.reshape(1, 16, 16), torch.ones(1, 1, 1), 16, 16, torch.float32).flatten()
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    number = ~expected.isnan()
    assert torch.equal(got[number].signbit(), expected[number].signbit())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows, columns, block", [(256, 384, 128), (8, 12, 4), (100, 60, 32)])
def test_a_scale_for_each_block(rows, columns, block, dtype):
    """The last blocks are smaller where the size is no multiple of theirs."""
    torch.manual_seed(0)
    values = torch.randn(3, rows, columns).to(torch.float8_e4m3fn)
    scales = torch.rand(3, -(-rows // block), -(-columns // block))
    spread = scales.repeat_interleave(block, 1).repeat_interleave(block, 2)[:, :rows, :columns]
    args = (values.view(torch.uint8), scales, block, block, dtype)
    assert torch.equal(dequantize_fp8_blocks(*args), (values.float() * spread).to(dtype))
    assert_fake_is_real(dequantize_fp8_blocks, *args)
