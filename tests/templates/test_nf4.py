"""NF4 dequantisation against an independent decoder, bit for bit, and against bitsandbytes."""

import pytest
import torch

from tests.support.ops.templates import NF4, Weight
from tunecompile.ops import dequantize_4bit

pytest.importorskip("triton")
from tunecompile.templates import nf4  # noqa: E402
from tunecompile.templates.nf4 import Adapter  # noqa: E402


@pytest.mark.parametrize("nested", (False, True), ids=("fp32_absmax", "nested"))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bit_equal(device, cast, dtype, nested):
    w = Weight(9, 576, device, nested=nested)
    assert torch.equal(nf4.dequantize(*w.arguments(dtype), **w.options), w.reference(dtype, cast))


@pytest.mark.parametrize("quant_type", ("nf4", "fp4"))
@pytest.mark.parametrize(
    "n,k,blocksize", [(1, 64, 64), (3, 8, 64), (5, 100, 64), (3, 7, 32), (1, 1, 64), (2, 4096, 128), (37, 24, 4096)]
)
def test_shapes(device, cast, n, k, blocksize, quant_type):
    w = Weight(n, k, device, blocksize=blocksize, quant_type=quant_type)
    assert torch.equal(nf4.dequantize(*w.arguments(torch.bfloat16), **w.options), w.reference(torch.bfloat16, cast))


def test_high_nibble_is_the_even_element(device):
    packed = torch.tensor([[0x0F], [0x7F], [0x1E], [0xF0]], dtype=torch.uint8, device=device)
    y = nf4.dequantize(packed, torch.tensor([2.0], device=device), (1, 8), torch.float32)
    assert y.flatten().tolist() == [2 * NF4[i] for i in (0, 15, 7, 15, 1, 14, 15, 0)]


def test_absmax_product_is_rounded_before_the_offset_is_added(device, cast):
    """A fused multiply-add gives another last bit for some of these."""
    w = Weight(256, 64, device, seed=3)
    code, outer, offset = w.nested.values()
    fused = (
        code.double()[w.absmax.long()] * outer.double().repeat_interleave(256)[: len(w.absmax)] + offset.double()
    ).float()
    packed = torch.full_like(w.packed, 0xFF)  # code 1.0: the result is the block's scale
    y = nf4.dequantize(packed, w.absmax, w.shape, torch.float32, **w.options)
    w.packed = packed
    assert torch.equal(y, w.reference(torch.float32, cast))
    assert not torch.equal(y[:, 0], fused), "the inputs do not tell the two apart"


def test_unaligned_storage_and_flat_packed(device, cast):
    w = Weight(6, 16, device)
    shifted = torch.cat([w.packed.new_zeros(1), w.packed.flatten()])[1:]
    assert torch.equal(
        nf4.dequantize(shifted, w.absmax, w.shape, torch.bfloat16, **w.options), w.reference(torch.bfloat16, cast)
    )


def test_as_the_ops_provider(device, cast):
    w = Weight(9, 64, device)
    (provider,) = (p for p in dequantize_4bit.providers if p.name == "triton")
    code, scale, offset = w.nested.values()
    got = provider.run(w.packed, w.absmax, code, scale, offset, *w.shape, 64, "nf4", torch.bfloat16)
    assert torch.equal(got, w.reference(torch.bfloat16, cast))


@pytest.mark.parametrize("nested", (False, True), ids=("fp32_absmax", "nested"))
@pytest.mark.parametrize("rows", [(5,), (5, 3), (5, 70, 1), (2, 3, 4, 5, 6)], ids=str)
def test_siblings_share_one_buffer(device, cast, rows, nested):
    weights = [Weight(n, 64, device, seed=n, nested=nested) for n in rows]
    out = torch.full((sum(rows) + 3, 70), 3.0, dtype=torch.bfloat16, device=device)
    nf4.dequantize_siblings([w.member() for w in weights], 64, out, row=1)
    assert torch.equal(out[1:-2, :64], torch.cat([w.reference(torch.bfloat16, cast) for w in weights]))
    assert (out[:, 64:] == 3).all() and (out[0] == 3).all() and (out[-2:] == 3).all()


@pytest.mark.parametrize("ranks, rows", [(16, (70,)), (64, (70, 3)), (12, (70, 3, 129)), (20, (4, 5, 6, 7))], ids=str)
@pytest.mark.parametrize("b_dtype", (torch.bfloat16, torch.float32))
def test_extended(device, cast, b_dtype, ranks, rows):
    weights = [Weight(n, 64, device, seed=n) for n in rows]
    out = torch.full((sum(rows), 64 + ranks), float("nan"), dtype=torch.bfloat16, device=device)
    expected, adapters, row, first = torch.zeros_like(out), [], 0, 0
    for w in weights:
        n, r = w.shape[0], 2 + len(adapters)
        b = torch.randn(n, 2 * r, generator=torch.Generator().manual_seed(r)).to(device, b_dtype)[:, :r]  # row-strided
        adapters.append(Adapter(b, 0.3, first))
        expected[row : row + n, :64] = w.reference(torch.bfloat16, cast)
        expected[row : row + n, 64 + first : 64 + first + r] = cast(b.float() * 0.3, torch.bfloat16)
        row, first = row + n, first + r
    nf4.dequantize_siblings([w.member() for w in weights], 64, out, adapters)
    assert torch.equal(out, expected)


def test_refuses_what_it_cannot_hold(device):
    w = Weight(4, 16, device)
    with pytest.raises(ValueError, match="cannot hold"):
        nf4.dequantize_siblings([w.member()], 16, torch.zeros(4, 8, dtype=torch.bfloat16, device=device))
    with pytest.raises(ValueError, match="absmax"):
        nf4.dequantize(w.packed, w.absmax, w.shape, torch.bfloat16)
    with pytest.raises(ValueError, match="does not fit"):
        nf4.dequantize_siblings(
            [w.member()], 16, torch.zeros(4, 20, device=device), [Adapter(torch.zeros(4, 8, device=device), 1.0, 0)]
        )


@pytest.mark.parametrize("quant_type", ("nf4", "fp4"))
@pytest.mark.parametrize("nested", (False, True), ids=("fp32_absmax", "nested"))
def test_against_bitsandbytes(device, cast, nested, quant_type):
    """bitsandbytes' own quantiser, state and dequantiser; real size on the GPU."""
    bnb = pytest.importorskip("bitsandbytes.functional")
    n, k = (4096, 14336) if device.type == "cuda" else (130, 128)
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    packed, state = bnb.quantize_4bit(weight, quant_type=quant_type, compress_statistics=nested)
    options = dict(blocksize=state.blocksize, quant_type=quant_type)
    if nested:
        options |= dict(absmax_code=state.state2.code, absmax_scale=state.state2.absmax, absmax_offset=state.offset)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        state.dtype = torch.float32 if device.type == "cpu" else dtype
        expected = cast(bnb.dequantize_4bit(packed, state), dtype)
        assert torch.equal(nf4.dequantize(packed, state.absmax, (n, k), dtype, **options), expected)
