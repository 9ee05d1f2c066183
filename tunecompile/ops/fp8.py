"""Frozen matrix products in FP8: e4m3 operands, fp32 accumulation, exact adapters (layout: `templates/fp8.py`).

e4m3 has 4 significant bits and 2^15 between its largest and its smallest normal number (Micikevicius et al., 2022,
arXiv:2209.05433), so a scale only has to keep values in range. Rows of activations and of gradients differ in size by
orders of magnitude: each has its own scale, computed in the pass that rounds it. The rows of a weight share one bound.
The constants below were chosen with `benchmarks/kernels/fp8.py`."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tunecompile._torch.card import capability
from tunecompile._torch.known_bugs import ROW_SCALES_ON_ADA
from tunecompile.ir.op import has_triton
from tunecompile.notes import Note, note
from tunecompile.ops.adapters.products import project as by_adapter

__all__ = [
    "FAST_BACKWARD",
    "FAST_FORWARD",
    "Operand",
    "dense_operand",
    "product",
    "project",
    "quantize",
    "refuse",
    "width_of",
]

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
BECAUSE = "FP8 products: half the bytes, twice the rate of bf16's tensor cores"
WIDTH = 128  #: the dimension that is summed over is padded to a multiple of this
#: whether the tensor cores' own accumulator (about 14 bits) is summed in fp32 only at the end
FAST_FORWARD, FAST_BACKWARD = True, False
WIDEST = 65536  #: columns of a row that one program quantises

#: (adapter's factor [rows, R] or None, transposed) -> weight and adapter in e4m3, [rows, width], row scales [1, rows]
Operand = Callable[[Tensor | None, bool], tuple[Tensor, Tensor]]


def refuse(x: Tensor, rows: Sequence[int]) -> Note | None:
    """Return why a product cannot be in FP8, or None.

    Args:
        x: [..., K]; its dtype and device are checked.
        rows: N_i of each weight [N_i, K].

    Returns:
        The reason, or None: x is bf16, 16 divides K and the sum of rows, neither is above 65536, and if x is on a
        GPU, Triton is installed and the GPU has compute capability 9.0 or 10.0."""
    n, k = sum(rows), x.shape[-1]
    if x.dtype != torch.bfloat16:
        return note("fp8-gives-bfloat16", detail=str(x.dtype).removeprefix("torch."))
    if n % 16 or k % 16 or max(n, k) > WIDEST:
        return note("fp8-weight-shape", rows=n, columns=k, limit=WIDEST)
    if x.is_cuda and not has_triton():
        return note("no-triton")
    found = capability(x.device)
    if found is not None and found not in ((8, 9), (9, 0), (10, 0)):
        return note("fp8-gpu", detail=f"{found[0]}.{found[1]}")
    if found == (8, 9) and ROW_SCALES_ON_ADA.present:
        return note("known-bug", ROW_SCALES_ON_ADA.package, str(ROW_SCALES_ON_ADA))
    return None


def width_of(columns: int, adapter: Tensor | None) -> int:
    """Return the columns of an operand, adapter included.

    Args:
        columns: of activations, or of the weight beside them.
        adapter: [*, R], any dtype, of which three times R columns are made; or None.

    Returns:
        Columns, a multiple of 128.
    """
    used = columns + (0 if adapter is None else 3 * adapter.shape[1])
    return -(-used // WIDTH) * WIDTH


def quantize(x: Tensor, extra: Tensor | None) -> tuple[Tensor, Tensor]:
    """Quantise rows to e4m3, each by its own scale, with an adapter's columns beside them as sums of two numbers.

    Args:
        x: [T, C], any floating dtype.
        extra: [T, R], any floating dtype, or None.

    Returns:
        ([x | extra, as sums of two | 0] in e4m3: [T, `width_of` them], the rows' scales: fp32 [T, 1]).
    """
    width = width_of(x.shape[1], extra)
    if x.is_cuda:
        from tunecompile.templates import fp8

        return fp8.quantize_rows(x if x.stride(1) == 1 else x.contiguous(), extra, width)
    largest = x.abs().amax(1, keepdim=True).float()
    if extra is not None:
        largest = torch.maximum(largest, extra.abs().amax(1, keepdim=True).float())
    scale = largest.clamp_min(1e-30) / LARGEST
    parts = [] if extra is None else _split(extra / scale)
    return _join([(x / scale).to(E4M3), *([] if extra is None else (parts[0], parts[1], parts[0]))], width), scale


def project(x: Tensor, a: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return an adapter's inner product, and x and it in e4m3.

    Args:
        x: [T, C], any floating dtype.
        a: [R, C] in `dtype`.
        dtype: of the adapter's arithmetic.

    Returns:
        (x a^T, [T, R] in `dtype`; and the two results of `quantize` for x and x a^T).
    """
    projected = by_adapter(x, a.t(), dtype)
    return projected, *quantize(x, projected)


def dense_operand(weights: Sequence[Tensor]) -> Operand:
    """Return the operand of dense weights.

    Args:
        weights: [N_i, K] of one floating dtype; they stand below each other.

    Returns:
        An `Operand`.
    """

    def make(adapter: Tensor | None, transposed: bool) -> tuple[Tensor, Tensor]:
        largest = torch.stack([w.abs().amax() for w in weights]).amax().float()
        sizes, k = [w.shape[0] for w in weights], weights[0].shape[1]
        rows, columns = (k, sum(sizes)) if transposed else (sum(sizes), k)
        width = width_of(columns, adapter)
        if not largest.is_cuda:
            whole = torch.cat(list(weights))
            return _beside(whole.t() if transposed else whole, largest, adapter, width)
        from tunecompile.templates import fp8

        out, scales = fp8.begin_weight(largest, adapter, rows, columns, width)
        for i, w in enumerate(weights):
            start = sum(sizes[:i])
            fp8.write_dense(w.t() if transposed else w, scales, out, *((0, start) if transposed else (start, 0)))
        return out, scales

    return make


def product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, fast: bool) -> Tensor:
    """Return (a b^T) a_scale b_scale, computed by tensor cores on a GPU.

    Args:
        a: e4m3 [T, C].
        a_scale: fp32 [T, 1].
        b: e4m3 [N, C].
        b_scale: fp32 [1, N].
        fast: whether the tensor cores' own accumulator (about 14 bits) is summed in fp32 only at the end.

    Returns:
        bf16 [T, N].
    """
    if a.is_cuda:
        return torch._scaled_mm(a, b.t(), a_scale, b_scale, out_dtype=torch.bfloat16, use_fast_accum=fast)
    return (a.float() @ b.float().t() * a_scale * b_scale).bfloat16()


def _beside(weight: Tensor, largest: Tensor, adapter: Tensor | None, width: int) -> tuple[Tensor, Tensor]:
    if adapter is None:
        scale = largest.expand(weight.shape[0], 1).clamp_min(1e-30) / LARGEST
        return _join([(weight / scale).to(E4M3)], width), scale.t()
    scale = torch.maximum(adapter.abs().amax(1, keepdim=True).float(), largest).clamp_min(1e-30) / LARGEST
    high, low = _split(adapter / scale)
    return _join([(weight / scale).to(E4M3), high, high, low], width), scale.t()


def _split(values: Tensor) -> tuple[Tensor, Tensor]:
    high = values.to(E4M3)
    return high, (values - high.float()).to(E4M3)


def _join(parts: list[Tensor], width: int) -> Tensor:
    """The parts side by side, padded with zeros. (Via bf16: some versions of torch cannot concatenate e4m3.)"""
    joined = torch.cat([part.bfloat16() for part in parts], 1)
    return torch.nn.functional.pad(joined, (0, width - joined.shape[1])).to(E4M3)
