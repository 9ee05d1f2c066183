"""Products of few rows with frozen weights, as a step of a rollout has them (`tunecompile.templates.few_rows`)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Optional

import torch
from torch import Tensor

from tunecompile._torch.card import AMPERE, older_than
from tunecompile._torch.modules import linear
from tunecompile.ir.op import Cost, op, refuse_gpu
from tunecompile.notes import Note, note
from tunecompile.ops.frozen_weights import DenseWeights, FrozenWeights, PackedWeights
from tunecompile.ops.nf4 import dequantize_4bit
from tunecompile.templates.few_rows.limits import LEAST_STEP, MAX_RANKS, MAX_ROWS, SIBLINGS

BECAUSE = "few rows: weights are read once, where they are, and 4-bit ones unpacked in registers"


def refuse_kernel(x: Tensor, most: int = MAX_ROWS) -> Note | None:
    """Return why no template of few rows multiplies x, [..., K] of at most so many rows, or None."""
    tokens = x.numel() // x.shape[-1]
    if not isinstance(tokens, int):  # a symbol, which is not to be compared with anything
        return note("rows-change")
    if tokens > most:
        return note("too-many-rows", rows=tokens, limit=most)
    if reason := refuse_gpu(x):
        return reason
    if torch.version.hip is not None:
        return note("instructions-of-nvidia")
    return note("gpu-before-ampere") if older_than(x.device, AMPERE) else None


def refuse(x: Tensor, frozen: FrozenWeights, a: Sequence[Tensor], b: Sequence[Tensor]) -> Note | None:
    """Return why the template does not multiply by these weights, or None.

    Args:
        x: [..., K], the rows.
        frozen: of one format.
        a, b: as for `tunecompile.ops.lora.lora_linear`.
    """
    if reason := refuse_kernel(x):
        return reason
    if (rank := max((m.shape[0] for m in a), default=0)) > MAX_RANKS:
        return note("rank-too-large", rank=rank, limit=MAX_RANKS)
    if frozen.columns % LEAST_STEP:
        return note("arguments-not-supported")
    if isinstance(frozen, PackedWeights):
        if frozen.blocksize % LEAST_STEP or frozen.columns % frozen.blocksize:
            return note("arguments-not-supported")
        aligned = frozen.contiguous and all(codes.storage_offset() % 16 == 0 for codes in frozen.codes)
    else:
        weights = frozen.members()
        if any(w.dtype != x.dtype for w in weights):
            return note("dtypes-differ", "weights and activations")
        alike = len({w.stride(0) for w in weights}) == 1 and all(w.stride(1) == 1 for w in weights)
        aligned = alike and all(w.stride(0) % 8 == 0 and w.storage_offset() % 8 == 0 for w in weights)
    adapted = all(m.is_contiguous() for m in a) and all(m.stride(-1) == 1 for m in b)
    return None if aligned and adapted else note("not-contiguous", "weights or adapters are")


def product(
    x: Tensor, frozen: FrozenWeights, a: Sequence[Tensor], b: Sequence[Tensor], scales: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Return concat_i(x W_i^T + scale_i (x A_i^T) B_i^T) and concat_i(x A_i^T), in x's dtype.

    Args:
        x: [T, K], contiguous.
        frozen: the W_i, [N_i, K].
        a: A_i, [r_i, K].
        b: B_i, [N_i, r_i].
        scales: one an adapter.
    """
    from tunecompile.templates.few_rows import launches as few_rows

    made = [few_rows.finish(*_parts(x, _members(frozen, of), a[of]), b[of], scales[of], x.dtype) for of in _launches(a)]
    y, xa = (list(each) for each in zip(*made))
    return (y[0], xa[0]) if len(made) == 1 else (torch.cat(y, 1), torch.cat(xa, 1))


def _launches(a: Sequence[Tensor]) -> list[slice]:
    """The siblings of each launch: as many as it takes."""
    begins, ranks = [0], 0
    for i, m in enumerate(a):
        ranks += m.shape[0]
        if i - begins[-1] == SIBLINGS or ranks > MAX_RANKS:
            begins.append(i)
            ranks = m.shape[0]
    return [slice(begin, end) for begin, end in zip(begins, [*begins[1:], len(a)])]


def _members(frozen: FrozenWeights, of: slice) -> FrozenWeights:
    """Some of the weights."""
    if isinstance(frozen, PackedWeights):
        return replace(frozen, tensors=frozen.tensors[of], rows=frozen.rows[of])
    return DenseWeights(frozen.members()[of], frozen.rows[of], frozen.columns)


def _parts(x: Tensor, frozen: FrozenWeights, a: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    from tunecompile.templates.few_rows import launches as few_rows
    from tunecompile.templates.nf4 import Weight

    if isinstance(frozen, PackedWeights):
        kind = {"blocksize": frozen.blocksize, "quant_type": frozen.quant_type}
        return few_rows.begin(x, few_rows.in_order(x).contiguous(), frozen.packed(), a, **kind)
    dense = [Weight(w, None, None, None, None, w.shape[0]) for w in frozen.members()]
    return few_rows.begin(x, x, dense, a, quant_type="dense")


def packed_linear(
    packed: Tensor, absmax: Tensor, nested: Sequence[Tensor | None], rows: int, x: Tensor, blocksize: int, kind: str
) -> PackedWeights:
    """Return one 4-bit weight as frozen weights. The arguments are those of `linear_4bit`."""
    tensors = [each for each in (packed, absmax, *nested) if each is not None]
    return PackedWeights([tensors], [rows], x.shape[-1], blocksize, kind, x.dtype)


def _refuse_linear(
    x, packed, absmax, absmax_code, absmax_scale, absmax_offset, rows, blocksize, quant_type
) -> Note | None:
    nested = (absmax_code, absmax_scale, absmax_offset)
    return refuse(x, packed_linear(packed, absmax, nested, rows, x, blocksize, quant_type), [], [])


@op(cost=Cost.MATMUL, flops=lambda x, packed, *_: 4 * (x.numel() // x.shape[-1]) * packed.numel())
def linear_4bit(
    x: Tensor,
    packed: Tensor,
    absmax: Tensor,
    absmax_code: Optional[Tensor],
    absmax_scale: Optional[Tensor],
    absmax_offset: Optional[Tensor],
    bias: Optional[Tensor],
    rows: int,
    blocksize: int,
    quant_type: str,
) -> Tensor:
    """Return x W^T + bias of a frozen 4-bit weight without an adapter (QLoRA, arXiv:2305.14314). It has no backward.

    Args:
        x: [..., K], any floating dtype.
        packed: of W, [rows, K]. This and the following arguments: as for `tunecompile.ops.nf4.dequantize_4bit`.
        absmax: its scales.
        absmax_code: of double quantisation, or None; so are the next two.
        absmax_scale: one a 256 blocks.
        absmax_offset: one element.
        bias: [rows] in x's dtype, or None.
        rows: of W.
        blocksize: weights a block.
        quant_type: "nf4" or "fp4".

    Returns:
        [..., rows], in x's dtype.
    """
    nested = (absmax_code, absmax_scale, absmax_offset)
    weight = dequantize_4bit.reference(packed, absmax, *nested, rows, x.shape[-1], blocksize, quant_type, x.dtype)
    return linear(x, weight, bias)


@linear_4bit.provider("few_rows", because=BECAUSE, refuses=_refuse_linear)
def _(x, packed, absmax, absmax_code, absmax_scale, absmax_offset, bias, rows, blocksize, quant_type):
    nested = (absmax_code, absmax_scale, absmax_offset)
    weight = packed_linear(packed, absmax, nested, rows, x, blocksize, quant_type)
    y = _parts(x.reshape(-1, x.shape[-1]).contiguous(), weight, [])[0].sum(0)[:, :rows].to(x.dtype)
    return (y if bias is None else y + bias).reshape(*x.shape[:-1], rows)
