"""MXFP4 codes: the values of transformers, for every byte and every scale."""

import pytest
import torch

from tests.support.ops.checks import assert_fake_is_real
from tunecompile.ops import dequantize_mxfp4
from tunecompile.ops.packed.mxfp4 import LEVELS


def every_byte():
    """[255 * 16, 32]: a row of 16 bytes a scale, and 16 such rows hold all bytes. The scale 255 is no number."""
    codes = torch.arange(256, dtype=torch.uint8).reshape(16, 16).repeat(255, 1)
    scales = torch.arange(255, dtype=torch.uint8).repeat_interleave(16)[:, None]
    return codes, scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_values_of_transformers(dtype):
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    codes, scales = every_byte()
    # [1, G, B] and [1, G]; their result is [1, columns, rows]
    theirs = mxfp4.convert_moe_packed_tensors(codes[None, :, None], scales[None], dtype=dtype)[0].t()
    ours = dequantize_mxfp4(codes, scales, *codes.shape[:1], 32, dtype)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert torch.equal(ours.signbit() & (ours == 0), theirs.signbit() & (theirs == 0))


def test_levels_are_those_of_the_format():
    """E2M1 (OCP Microscaling Formats 1.0, 5.3.3): two exponent bits with a bias of 1, and a subnormal."""
    for code, level in enumerate(LEVELS):
        sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
        size = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
        assert abs(level) == size and str(level).startswith("-") == bool(sign)


def test_the_low_nibble_is_the_even_element():
    codes = torch.zeros(1, 16, dtype=torch.uint8)
    codes[0, 0] = 0x71
    got = dequantize_mxfp4(codes, torch.tensor([[128]], dtype=torch.uint8), 1, 32, torch.float32)
    assert got[0, :3].tolist() == [2 * 0.5, 2 * 6.0, 0.0]


def test_codes_in_any_shape_and_a_fake():
    codes, scales = torch.randint(256, (3, 4, 2, 16), dtype=torch.uint8), torch.full((3, 4, 2), 120).to(torch.uint8)
    args = (codes, scales, 12, 64, torch.bfloat16)
    assert torch.equal(dequantize_mxfp4(*args), dequantize_mxfp4(codes.reshape(-1, 1), scales.flatten(), *args[2:]))
    assert_fake_is_real(dequantize_mxfp4, *args)
