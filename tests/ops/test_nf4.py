"""4-bit weights: the same bits as bitsandbytes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.ops.arguments import quantized
from tests.support.ops.checks import QUICK, assert_fake_is_real, error, outputs
from tunecompile.ir.pretend_gpu import as_on_gpu
from tunecompile.ops import dequantize_4bit
from tunecompile.ops.nf4 import CODES

bnb = pytest.importorskip("bitsandbytes")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("rows, columns", [(8, 64), (3, 192), (1, 64), (300, 512)])
def test_the_bits_of_bitsandbytes(rows, columns, quant_type, double, dtype):
    args, expected = quantized(rows, columns, quant_type=quant_type, double=double, dtype=dtype)
    got = dequantize_4bit(*args)
    assert got.dtype == expected.dtype and torch.equal(got, expected)


@given(
    rows=st.integers(1, 9),
    blocks=st.integers(1, 3),
    blocksize=st.sampled_from([64, 128, 256]),
    double=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([1e-4, 1.0, 100.0]),
)
@QUICK
def test_any_shape_block_and_scale(rows, blocks, blocksize, double, dtype, scale):
    torch.manual_seed(0)
    args, expected = quantized(rows, blocks * blocksize, blocksize, double=double, dtype=dtype, scale=scale)
    assert torch.equal(dequantize_4bit(*args), expected)
    assert_fake_is_real(dequantize_4bit, *args)
    run = next(p for p in dequantize_4bit.providers if p.name == "bitsandbytes").run
    assert torch.equal(run(*args), expected)


@pytest.mark.parametrize("rows, columns", [(6, 32), (2, 96), (8, 160)])
def test_rows_that_share_a_block(rows, columns):
    """Blocks run over the flat weight, as bitsandbytes' quantiser and GPU kernels have it. (Its CPU dequantisation restarts at each
    row, with errors of 11 to 42 % instead of 9.)"""
    weight = torch.randn(rows, columns)
    packed, state = bnb.functional.quantize_4bit(weight, blocksize=64, compress_statistics=False, quant_type="nf4")
    got = dequantize_4bit(packed, state.absmax, None, None, None, rows, columns, 64, "nf4", torch.float32)
    assert error(got, weight) < 0.105
    table = torch.tensor(CODES["nf4"])
    codes = torch.stack((packed.reshape(-1) >> 4, packed.reshape(-1) & 15), -1).reshape(-1)
    assert torch.equal(got.reshape(-1), table[codes.long()] * state.absmax.repeat_interleave(64))


def test_the_provider_where_rows_share_a_block():
    packed, state = bnb.functional.quantize_4bit(
        torch.randn(6, 32), blocksize=64, compress_statistics=False, quant_type="nf4"
    )
    args = (packed, state.absmax, None, None, None, 6, 32, 64, "nf4", torch.float32)
    provider = next(p for p in dequantize_4bit.providers if p.name == "bitsandbytes")
    assert not provider.supports(*args) or torch.equal(provider.run(*args), dequantize_4bit(*args))


def test_the_template_comes_first_on_a_gpu():
    """Also for stacks of experts. (Its bits are in tests/templates.)"""
    pytest.importorskip("triton")
    args, _ = quantized(8, 64, dtype=torch.bfloat16)
    with as_on_gpu():
        assert dequantize_4bit.choose(args).name == "triton"
        for place, other in ((7, 4), (9, torch.float32), (2, None)):  # blocksize, dtype, a code for absmax
            refused = [*args[:place], other, *args[place + 1 :]]
            assert dequantize_4bit.refusals(refused, None)["triton"], place


def test_packed_in_any_shape():
    args, expected = quantized(4, 64)
    for packed in (
        args[0].reshape(1, -1),
        args[0].reshape(-1),
        args[0].reshape(-1, 2),
        torch.stack([args[0], args[0]], -1)[..., 0],
    ):
        assert torch.equal(dequantize_4bit(packed, *args[1:]), expected)


def test_level_tables_are_bitsandbytes_own():
    for name, table in CODES.items():
        state = bnb.functional.get_4bit_type(name, device="cpu")
        assert torch.allclose(torch.tensor(table), state.reshape(-1)[: len(table)], rtol=0, atol=1e-7), name


def test_a_block_of_zeros():
    packed, state = bnb.functional.quantize_4bit(torch.zeros(2, 64), quant_type="nf4", compress_statistics=False)
    assert dequantize_4bit(packed, state.absmax, None, None, None, 2, 64, 64, "nf4", torch.float32).abs().max() == 0


@pytest.mark.parametrize("double", [True, False])
def test_nothing_is_differentiable(double):
    args, _ = quantized(2, 64, double=double)
    assert not outputs(dequantize_4bit(*args))[0].requires_grad


def test_opcheck():
    torch.library.opcheck(dequantize_4bit.overload, quantized(2, 64)[0])
