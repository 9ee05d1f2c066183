"""MXFP4 dequantisation by the template: the op's bits, for every byte and scale."""

import pytest
import torch

from tunecompile.ops import dequantize_mxfp4

pytest.importorskip("triton")
from tunecompile.templates import mxfp4  # noqa: E402


@pytest.mark.filterwarnings("ignore:overflow encountered")  # of scales that are infinite, in the interpreter
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_bit_equal(device, dtype):
    """Every byte, under every scale that is a number. (Triton's interpreter rounds subnormals to bf16 as 0.)"""
    first = 0 if device.type == "cuda" or dtype == torch.float32 else 3
    scales = torch.arange(first, 255, dtype=torch.uint8, device=device).repeat_interleave(16)
    codes = torch.arange(256, dtype=torch.uint8, device=device).reshape(16, 16).repeat(255 - first, 1)
    rows = len(codes)
    got, expected = mxfp4.dequantize(codes, scales, (rows, 32), dtype), dequantize_mxfp4(codes, scales, rows, 32, dtype)
    assert torch.equal(got, expected)
    assert torch.equal(got.signbit() & (got == 0), expected.signbit() & (expected == 0))


@pytest.mark.parametrize("rows, columns", [(1, 32), (3, 96), (5, 64)])
def test_shapes_and_storage_that_is_not_aligned(device, rows, columns):
    packed = torch.randint(256, (rows * columns // 2 + 1,), dtype=torch.uint8, device=device)[1:]
    scales = torch.randint(100, 150, (rows, columns // 32), dtype=torch.uint8, device=device)
    got = mxfp4.dequantize(packed, scales, (rows, columns), torch.bfloat16)
    assert torch.equal(got, dequantize_mxfp4(packed, scales, rows, columns, torch.bfloat16))


def test_what_is_no_weight(device):
    packed, scales = torch.zeros(16, dtype=torch.uint8, device=device), torch.zeros(1, dtype=torch.uint8, device=device)
    for bad in ((packed, scales, (2, 32)), (packed, scales.int(), (1, 32)), (packed, scales, (2, 16))):
        with pytest.raises(ValueError):
            mxfp4.dequantize(*bad, torch.bfloat16)
