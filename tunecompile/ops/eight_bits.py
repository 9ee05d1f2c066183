"""Products of frozen weights in 8 bits, under exact adapters: FP8 (e4m3) and INT8 (layouts: `templates/eight_bits.py`).

Rows of activations and of gradients differ in size by orders of magnitude: each has its own scale, computed in the pass
that rounds it.

e4m3 has 4 significant bits and 2^15 between its largest and its smallest normal number (Micikevicius et al., 2022,
arXiv:2209.05433), so a scale only has to keep values in range, and the rows of a weight share one bound. The adapter's
term is part of the product.

INT8 has one step for all sizes, so each row of a weight has its own scale (Dettmers et al., 2022, arXiv:2208.07339).
dX = dY W sums over these rows: their scales go into dY before it is rounded. Sums are exact, in int32; the adapter's
term is added to them in fp32.

The constants below were chosen with `benchmarks/kernels/eight_bits.py`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tunecompile import templates
from tunecompile._torch.card import AMPERE, capability, has_bfloat16, older_than
from tunecompile._torch.known_bugs import ROW_SCALES_ON_ADA
from tunecompile.ir.op import HALF, has_triton, refuse_spills
from tunecompile.notes import Note, note
from tunecompile.ops.frozen_weights import FrozenWeights
from tunecompile.ops.packed.few_rows import refuse_kernel

__all__ = ["FORMATS", "FP8", "INT8", "EightBits"]

E4M3, LARGEST = torch.float8_e4m3fn, 448.0
INTEGERS = 127.0  #: -128 is left out, so that a number and its negative are equally far off
TINY = 1e-30  #: a row of zeros has a scale, too
WIDTH = 128  #: the dimension that is summed over is padded to a multiple of this
WIDEST = 65536  #: columns of a row that one program quantises; int32 holds the sum of twice as many products
TURING = (7, 5)


@dataclass(frozen=True)
class EightBits:
    """A format of 8 bits, and the products in it."""

    name: str  #: of the precision, and of its providers
    because: str  #: the gain, for the report
    refuses: Callable[[Tensor], Note | None]  #: (x) -> why its dtype or its GPU is not supported, or None
    #: (x, extra, weight, adapter, transposed) -> x W^T + extra adapter^T, or x W + extra adapter^T, in x's dtype; x is
    #: [T, K] (transposed: [T, N]), extra [T, R] or None, and adapter [N, R] (transposed: [K, R])
    product: Callable[[Tensor, Tensor | None, FrozenWeights, Tensor | None, bool], Tensor]

    def refuse(self, x: Tensor, rows: Sequence[int]) -> Note | None:
        """Return why a product cannot be in this format, or None.

        Args:
            x: [..., K]; its dtype and device are checked.
            rows: N_i of each weight [N_i, K].

        Returns:
            The reason, or None: 16 divides K and the sum of rows, neither is above 65536, and if x is on a GPU, Triton
            is installed, and x has more rows than `tunecompile.ops.packed.few_rows` takes. FP8: x is bf16, and a GPU
            has compute capability 8.9, 9.0 or 10.0. INT8: x is bf16 or fp16, and a GPU has at least 7.5.
        """
        n, k = sum(rows), x.shape[-1]
        if reason := self.refuses(x):
            return reason
        if n % 16 or k % 16 or max(n, k) > WIDEST:
            return note("eight-bits-shape", rows=n, columns=k, limit=WIDEST)
        if refuse_kernel(x) is None:
            return note("eight-bits-few-rows")
        return note("no-triton") if x.is_cuda and not has_triton() else None


def _refuse_fp8(x: Tensor) -> Note | None:
    if x.dtype != torch.bfloat16:
        return note("fp8-gives-bfloat16", detail=str(x.dtype).removeprefix("torch."))
    found = capability(x.device)
    if found is not None and found not in ((8, 9), (9, 0), (10, 0)):
        return note("fp8-gpu", detail=f"{found[0]}.{found[1]}")
    if found == (8, 9) and ROW_SCALES_ON_ADA.present:
        return note("known-bug", ROW_SCALES_ON_ADA.package, str(ROW_SCALES_ON_ADA))
    return None


def _refuse_int8(x: Tensor) -> Note | None:
    if x.dtype not in HALF:
        return note("not-half-precision", detail=str(x.dtype).removeprefix("torch."))
    if older_than(x.device, TURING):
        return note("int8-gpu")
    if x.dtype == torch.bfloat16 and not has_bfloat16(x.device):
        return note("gpu-without-bfloat16")
    return refuse_spills(x)


def _width_of(columns: int, adapter: Tensor | None = None) -> int:
    """Columns of an operand: of a matrix, and in FP8 of an adapter [*, R], of which three times R are made."""
    used = columns + (0 if adapter is None else 3 * adapter.shape[1])
    return -(-used // WIDTH) * WIDTH


def _contiguous_rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


# ---------------------------------------------------------------- FP8


def _fp8_product(
    x: Tensor, extra: Tensor | None, weight: FrozenWeights, adapter: Tensor | None, transposed: bool
) -> Tensor:
    rows, row_scales = _fp8_rows(x, extra)
    columns, column_scales = _fp8_weight(weight, adapter, transposed)
    if not x.is_cuda:
        return (rows.float() @ columns.float().t() * row_scales * column_scales).bfloat16()
    # Forward, the tensor cores' own accumulator (about 14 bits) is summed in fp32 only at the end.
    return torch._scaled_mm(
        rows, columns.t(), row_scales, column_scales, out_dtype=torch.bfloat16, use_fast_accum=not transposed
    )


def _fp8_rows(x: Tensor, extra: Tensor | None) -> tuple[Tensor, Tensor]:
    """([x | extra, as sums of two | 0] in e4m3, the rows' scales: fp32 [T, 1])."""
    width = _width_of(x.shape[1], extra)
    if x.is_cuda:
        return templates.eight_bits.quantize_rows(_contiguous_rows(x), extra, width)
    largest = x.abs().amax(1, keepdim=True).float()
    if extra is not None:
        largest = torch.maximum(largest, extra.abs().amax(1, keepdim=True).float())
    scale = largest.clamp_min(TINY) / LARGEST
    parts = [] if extra is None else _split(extra / scale)
    return _join([(x / scale).to(E4M3), *([] if extra is None else (parts[0], parts[1], parts[0]))], width), scale


def _fp8_weight(weight: FrozenWeights, adapter: Tensor | None, transposed: bool) -> tuple[Tensor, Tensor]:
    """(weight, or its transpose, and adapter in e4m3: [rows, width], the rows' scales: fp32 [1, rows])."""
    rows, columns = (weight.columns, weight.height) if transposed else (weight.height, weight.columns)
    width = _width_of(columns, adapter)
    if weight.is_cuda:
        out, scales = templates.eight_bits.begin_weight(weight.bound(), adapter, rows, columns, width)
        weight.write(out, scales, transposed)
        return out, scales
    whole = torch.cat(list(weight.members()))
    whole, largest = whole.t() if transposed else whole, whole.abs().amax().float()
    if adapter is None:
        scale = largest.expand(rows, 1).clamp_min(TINY) / LARGEST
        return _join([(whole / scale).to(E4M3)], width), scale.t()
    scale = torch.maximum(adapter.abs().amax(1, keepdim=True).float(), largest).clamp_min(TINY) / LARGEST
    high, low = _split(adapter / scale)
    return _join([(whole / scale).to(E4M3), high, high, low], width), scale.t()


def _split(values: Tensor) -> tuple[Tensor, Tensor]:
    high = values.to(E4M3)
    return high, (values - high.float()).to(E4M3)


def _join(parts: list[Tensor], width: int) -> Tensor:
    """The parts side by side, padded with zeros. (Via bf16: some versions of torch cannot concatenate e4m3.)"""
    joined = torch.cat([part.bfloat16() for part in parts], 1)
    return torch.nn.functional.pad(joined, (0, width - joined.shape[1])).to(E4M3)


# ---------------------------------------------------------------- INT8


def _int8_product(
    x: Tensor, extra: Tensor | None, weight: FrozenWeights, adapter: Tensor | None, transposed: bool
) -> Tensor:
    scales, columns = _int8_weight(weight, transposed)
    rows, row_scales = _int8_rows(x, scales if transposed else None)
    column_scales = None if transposed else scales
    if x.is_cuda and not older_than(x.device, AMPERE):
        return templates.int8_product.product(rows, row_scales, columns, column_scales, extra, adapter, x.dtype)
    y = _integer_product(rows, columns) * row_scales
    y = y if column_scales is None else y * column_scales
    if extra is not None and adapter is not None:
        y = y + extra.to(x.dtype) @ adapter.to(x.dtype).t()
    return y.to(x.dtype)


def _integer_product(a: Tensor, b: Tensor) -> Tensor:
    """a b^T in int32. (Triton has no integer products on Turing, and cuBLAS none of 16 rows or fewer.)"""
    padded = torch.nn.functional.pad(a, (0, 0, 0, 16)) if a.is_cuda else a
    return torch.ops.aten._int_mm(padded, b.t())[: a.shape[0]]


def _int8_rows(x: Tensor, factors: Tensor | None) -> tuple[Tensor, Tensor]:
    """(x, its columns times factors [C], in int8: [T, width], the rows' scales: fp32 [T, 1])."""
    width = _width_of(x.shape[1])
    if x.is_cuda:
        return templates.eight_bits.quantize_rows(_contiguous_rows(x), None, width, torch.int8, factors)
    values = x.float() if factors is None else x * factors
    scale = values.abs().amax(1, keepdim=True).clamp_min(TINY) / INTEGERS
    return torch.nn.functional.pad((values / scale).round().to(torch.int8), (0, width - x.shape[1])), scale


def _int8_weight(weight: FrozenWeights, transposed: bool) -> tuple[Tensor, Tensor]:
    """(scales of the weight's rows: fp32 [N], weight, or its transpose, in int8: [*, width])."""
    rows, columns = (weight.columns, weight.height) if transposed else (weight.height, weight.columns)
    width = _width_of(columns)
    if weight.is_cuda:
        scales = weight.row_bounds().clamp_min(TINY) / INTEGERS
        # What stands behind the weight's columns is multiplied by zeros, and integers are all finite.
        out = torch.empty((rows, width), dtype=torch.int8, device=scales.device)
        weight.write(out, scales, transposed, by_column=transposed)
        return scales, out
    whole = torch.cat(list(weight.members()))
    scales = whole.abs().amax(1).float().clamp_min(TINY) / INTEGERS
    codes = (whole / scales[:, None]).round().to(torch.int8)
    return scales, torch.nn.functional.pad(codes.t() if transposed else codes, (0, width - columns))


FP8 = EightBits("fp8", "FP8 products: half the bytes, twice the rate of bf16's tensor cores", _refuse_fp8, _fp8_product)
INT8 = EightBits(
    "int8", "INT8 products: half the bytes, a third less time than bf16's (H200)", _refuse_int8, _int8_product
)
FORMATS = (FP8, INT8)
