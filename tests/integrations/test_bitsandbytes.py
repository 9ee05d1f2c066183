"""4-bit weights have the values that their codes stand for, whatever their shape."""

import pytest
import torch

from tests.support.models.packed import exact
from tunecompile.integrations.bitsandbytes import values_of
from tunecompile.ops import dequantize_4bit

bnb = pytest.importorskip("bitsandbytes")


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 64), (6, 32), (128, 16), (8, 160), (1, 64), (3, 24), (4, 2, 96)])
def test_values_that_4_bits_keep(shape, storage):
    """Read row by row, as bitsandbytes' code for AVX512 does, blocks that go on in the next row have its scale."""
    weight = exact(shape[0], torch.Size(shape[1:]).numel()).view(shape)
    packed, state = bnb.functional.quantize_4bit(
        weight, quant_type="nf4", compress_statistics=False, quant_storage=storage
    )
    before = state.shape
    assert torch.equal(values_of(packed, state), weight) and state.shape == before == shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("double", [False, True])
def test_values_are_those_of_the_op(quant_type, double, dtype):
    weight = torch.randn(8, 160).to(dtype)
    packed, state = bnb.functional.quantize_4bit(weight, compress_statistics=double, quant_type=quant_type)
    outer = (state.state2.code, state.state2.absmax, state.offset) if double else (None, None, None)
    args = (packed, state.absmax, *outer, 8, 160, 64, quant_type, dtype)
    assert torch.equal(values_of(packed, state), dequantize_4bit(*args))
