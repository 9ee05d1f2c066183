"""Operands in 8 bits: what they stand for is within the format's rounding of what they were made from, and adapters within bf16's."""

import pytest
import torch

pytest.importorskip("triton")
from tests.support.ops.templates import Weight
from tunecompile.templates import eight_bits, int8_product  # noqa: E402
from tunecompile.templates._tiles import Tile  # noqa: E402

HALF_ULP = 2.0**-4  # of e4m3, relative; half of its smallest number is added where values may be tiny
SMALLEST = 2.0**-10


def make(*shape, device, dtype=torch.float32, seed=0, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(device, dtype)


def assert_rounded(quantized, scale, exact):
    """Each value is off by at most half a unit in its last place."""
    value, exact = quantized.double() * scale.double(), exact.double()
    limit = torch.maximum(HALF_ULP * exact.abs(), SMALLEST * scale.double())
    limit = 1.001 * (0.5 * scale.double() if quantized.dtype == torch.int8 else limit)
    assert ((value - exact).abs() <= limit).all(), ((value - exact).abs() / limit).max()


@pytest.mark.parametrize(
    "rows,columns,ranks,width", [(1, 16, 0, 16), (5, 576, 4, 592), (3, 1000, 16, 1056), (2, 96, 33, 256)]
)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_rows(device, dtype, rows, columns, ranks, width):
    x = make(rows, 2 * columns, device=device, dtype=dtype)[:, :columns]  # row-strided
    extra = make(rows, ranks, device=device, seed=1, scale=3.0) if ranks else None
    got, scale = eight_bits.quantize_rows(x, extra, width)
    assert got.shape == (rows, width) and scale.shape == (rows, 1) and got.is_contiguous()
    largest = (
        x.float().abs().amax(1, keepdim=True)
        if extra is None
        else torch.cat([x.float(), extra], 1).abs().amax(1, keepdim=True)
    )
    torch.testing.assert_close(scale, largest / 448, rtol=1e-6, atol=0)
    assert_rounded(got[:, :columns], scale, x)
    assert (got[:, columns + 3 * ranks :].float() == 0).all()
    if ranks:
        high, low, again = got[:, columns : columns + 3 * ranks].split(ranks, 1)
        assert torch.equal(high.float(), again.float())
        assert_rounded(high, scale, extra)
        error = ((high.double() + low.double()) * scale.double() - extra.double()).abs()
        assert (error <= 1.01 * torch.maximum(HALF_ULP**2 * extra.double().abs(), SMALLEST * scale.double())).all()


@pytest.mark.parametrize("dtype", (torch.float8_e4m3fn, torch.int8))
def test_zeros_and_what_is_no_number(device, dtype):
    x = torch.zeros(3, 32, device=device)
    x[1, 5], x[2, 5] = float("inf"), float("nan")
    got, scale = eight_bits.quantize_rows(x, None, 32, dtype)
    assert (got[0].float() == 0).all() and scale[0] > 0
    assert (got[1:].float() * scale[1:]).isnan().any(1).all()


@pytest.mark.parametrize("rows, columns, width", [(1, 16, 16), (5, 1000, 1024)])
@pytest.mark.parametrize("weighted", (False, True))
def test_rows_in_integers(device, rows, columns, width, weighted):
    x = make(rows, columns, device=device, dtype=torch.float16)
    factors = make(columns, device=device, seed=1).exp() if weighted else None
    got, scale = eight_bits.quantize_rows(x, None, width, torch.int8, factors)
    exact = x.float() if factors is None else x.float() * factors
    torch.testing.assert_close(scale, exact.abs().amax(1, keepdim=True) / 127, rtol=1e-6, atol=0)
    assert_rounded(got[:, :columns], scale, exact)
    assert (got[:, columns:] == 0).all() and (got.abs().amax(1) == 127).all()


@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize("ranks", (0, 5, 40))
def test_product_of_integers(device, error, ranks, transposed):
    """Beside that of the same integers in fp64, in both directions: only the result is rounded."""
    n, k = 70, 200
    x, w = make(37, n if transposed else k, device=device, dtype=torch.float16), make(n, k, device=device, seed=1)
    scales = w.abs().amax(1) / 127
    a, a_scales = eight_bits.quantize_rows(x, None, 256, torch.int8, scales if transposed else None)
    b = torch.full((k if transposed else n, 256), 99, dtype=torch.int8, device=device)
    eight_bits.write_dense(w.t() if transposed else w, scales, b, by_column=transposed)
    assert_rounded(b[:, :n].t() if transposed else b[:, :k], scales[:, None], w)
    extra = make(37, ranks, device=device, dtype=torch.float16) if ranks else None
    adapter = make(ranks, b.shape[0], device=device, dtype=torch.float16).t() if ranks else None
    b_scales = None if transposed else scales
    tile = Tile(64, rows=32, step=64, num_warps=4)
    got = int8_product.product(a, a_scales, b, b_scales, extra, adapter, torch.float16, tile=tile)
    exact = a.double() @ b.double().t() * a_scales.double() * (1.0 if transposed else scales.double())
    exact = exact if extra is None else exact + extra.double() @ adapter.double().t()
    assert error(got, exact) < 2.0**-11
    assert error(exact, x.double() @ (w.double() if transposed else w.double().t())) < 0.02 or ranks


def product(a, sa, b, sb):
    return (a.double() @ b.double().t()) * sa.double() * sb.double()


@pytest.mark.parametrize("largest", (1.0, 1e-3), ids=("weight_is_larger", "adapter_is_larger"))
@pytest.mark.parametrize("strided", (False, True))
def test_the_adapter_beside_the_weight(device, error, largest, strided):
    """Its term of the product has bf16's precision, and larger values than the weight's raise their row's scale."""
    adapter = make(6, 70, device=device, scale=0.2).t() if strided else make(70, 6, device=device, scale=0.2)
    extra = make(9, 6, device=device, seed=1)
    out, scale = eight_bits.begin_weight(torch.tensor(largest, device=device), adapter, 70, 32, 64)
    torch.testing.assert_close(scale[0], adapter.abs().amax(1).clamp_min(largest) / 448, rtol=1e-6, atol=0)
    eight_bits.write_dense(torch.zeros(70, 32, device=device), scale, out)
    rows, row_scale = eight_bits.quantize_rows(torch.zeros(9, 32, device=device), extra, 64)
    assert error(product(rows, row_scale, out, scale), extra.double() @ adapter.double().t()) < 2.0**-8
    assert (out[:, 50:].float() == 0).all()


def test_dense_siblings_in_both_directions(device):
    w, v = make(5, 40, device=device, dtype=torch.bfloat16), make(3, 40, device=device, dtype=torch.bfloat16, seed=1)
    largest = torch.cat([w, v]).float().abs().max()
    out, scale = eight_bits.begin_weight(largest, None, 8, 40, 48)
    eight_bits.write_dense(w, scale, out)
    eight_bits.write_dense(v, scale, out, row=5)
    assert_rounded(out[:, :40], scale[0][:, None], torch.cat([w, v]))
    out, scale = eight_bits.begin_weight(largest, None, 40, 8, 16)
    eight_bits.write_dense(w.t(), scale, out)
    eight_bits.write_dense(v.t(), scale, out, column=5)
    assert_rounded(out[:, :8], scale[0][:, None], torch.cat([w, v]).t())
    assert (out[:, 8:].float() == 0).all()


@pytest.mark.parametrize("nested", (False, True), ids=("fp32_absmax", "nested"))
@pytest.mark.parametrize("quant_type", ("nf4", "fp4"))
@pytest.mark.parametrize(
    "n,k,blocksize",
    [(1, 64, 64), (37, 200, 32)],
)
def test_nf4_in_both_directions(device, n, k, blocksize, quant_type, nested):
    w = Weight(n, k, device, blocksize=blocksize, quant_type=quant_type, nested=nested)
    exact = w.reference(torch.float32, lambda value, dtype: value)
    a = make(n, 4, device=device)
    out, scale = eight_bits.begin_weight(exact.abs().max(), a, n, k, k + 16)
    before = out[:, k:].float().clone()
    eight_bits.write_nf4(w.packed, w.absmax, w.shape, scale, out, **w.options)
    assert_rounded(out[:, :k], scale[0][:, None], exact)
    assert torch.equal(out[:, k:].float(), before)
    rows = exact.abs().amax(1).clamp_min(1e-30) / 127
    for transposed in (False, True):
        whole = torch.zeros((k, n + 9) if transposed else (n, k + 16), dtype=torch.int8, device=device)
        place = (0, 7) if transposed else (0, 0)
        scale_of = torch.cat([rows.new_ones(7), rows]) if transposed else rows
        w_options = {"transposed": transposed, "by_column": transposed, **w.options}
        eight_bits.write_nf4(w.packed, w.absmax, w.shape, scale_of, whole, *place, **w_options)
        assert_rounded(whole[:, 7 : n + 7].t() if transposed else whole[:, :k], rows[:, None], exact)
    out, scale = eight_bits.begin_weight(exact.abs().max(), None, k, n + 7, n + 9)
    eight_bits.write_nf4(w.packed, w.absmax, w.shape, scale, out, column=7, transposed=True, **w.options)
    assert_rounded(out[:, 7 : n + 7], scale[0][:, None], exact.t())
    assert (out[:, n + 7 :].float() == 0).all()


def test_what_does_not_fit_is_refused(device):
    with pytest.raises(ValueError, match="width|go into"):
        eight_bits.quantize_rows(torch.zeros(2, 16, device=device), torch.zeros(2, 4, device=device), 16)
    w = Weight(4, 12, device, blocksize=4, nested=False)
    out, scale = eight_bits.begin_weight(torch.ones((), device=device), None, 4, 12, 16)
    with pytest.raises(ValueError, match="8 does not divide"):
        eight_bits.write_nf4(w.packed, w.absmax, w.shape, scale, out, blocksize=4)


@pytest.mark.gpu
@pytest.mark.parametrize("n,k", [(14336, 4096), (4096, 14336), (1024, 4096)])
def test_real_size(gpu_only, device, n, k):
    w = Weight(n, k, device)
    exact = w.reference(torch.float32, lambda value, dtype: value)
    for transposed in (False, True):
        rows, columns = (k, n) if transposed else (n, k)
        out, scale = eight_bits.begin_weight(
            exact.abs().max(), make(rows, 16, device=device), rows, columns, columns + 48
        )
        eight_bits.write_nf4(w.packed, w.absmax, w.shape, scale, out, transposed=transposed, **w.options)
        assert_rounded(out[:, :columns], scale[0][:, None], exact.t() if transposed else exact)
    x = make(1000, n, device=device, dtype=torch.bfloat16)
    got, scale = eight_bits.quantize_rows(x, None, n)
    assert_rounded(got, scale, x)
