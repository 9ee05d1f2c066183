"""Products of few rows with packed weights, as a step of a rollout has them (`tunecompile.templates.few_rows`)."""

from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor

from tunecompile._torch.card import AMPERE, older_than
from tunecompile._torch.modules import linear
from tunecompile.ir.op import Cost, op, refuse_gpu
from tunecompile.notes import Note, note
from tunecompile.ops.frozen_weights import PackedWeights
from tunecompile.ops.nf4 import dequantize_4bit
from tunecompile.templates.few_rows.limits import MAX_RANKS, MAX_ROWS, SIBLINGS, STEP, TILE

BECAUSE = "few rows: 4-bit weights are unpacked in registers, and never written"


def refuse(
    x: Tensor, columns: int, packed: Sequence[Tensor], rows: Sequence[int], blocksize: int, a: Sequence, b: Sequence
) -> Note | None:
    """Return why the template does not multiply by these weights, or None.

    Args:
        x: [..., K], the rows.
        columns: K of the weights.
        packed: of one format, one a weight. This and rows and blocksize: as for
            `tunecompile.ops.nf4.dequantize_4bit`; a and b: as for `tunecompile.ops.lora.lora_linear`.
    """
    tokens = x.numel() // x.shape[-1]
    if not isinstance(tokens, int):  # a symbol, which is not to be compared with anything
        return note("rows-change")
    if tokens > MAX_ROWS:
        return note("too-many-rows", rows=tokens, limit=MAX_ROWS)
    if reason := refuse_gpu(x):
        return reason
    if torch.version.hip is not None:
        return note("instructions-of-nvidia")
    if older_than(x.device, AMPERE):
        return note("gpu-before-ampere")
    if (ranks := sum(m.shape[0] for m in a)) > MAX_RANKS:
        return note("rank-too-large", rank=ranks, limit=MAX_RANKS)
    fits = columns % STEP == 0 and all(n % TILE == 0 for n in rows) and (blocksize == 64 or blocksize % STEP == 0)
    if not fits or len(rows) > SIBLINGS:
        return note("arguments-not-supported")
    aligned = all(p.is_contiguous() and p.storage_offset() % 16 == 0 for p in packed)
    adapted = all(m.is_contiguous() for m in a) and all(m.stride(-1) == 1 for m in b)
    return None if aligned and adapted else note("not-contiguous", "weights or adapters are")


def product(
    x: Tensor, packed: PackedWeights, a: Sequence[Tensor], b: Sequence[Tensor], scales: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Return concat_i(x W_i^T + scale_i (x A_i^T) B_i^T) and concat_i(x A_i^T), in x's dtype.

    Args:
        x: [T, K], contiguous.
        packed: the W_i, [N_i, K].
        a: A_i, [r_i, K].
        b: B_i, [N_i, r_i].
        scales: one an adapter.
    """
    from tunecompile.templates.few_rows import launches as few_rows

    return few_rows.finish(*_parts(x, packed, a), b, scales, x.dtype)


def _parts(x: Tensor, packed: PackedWeights, a: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    from tunecompile.templates.few_rows import launches as few_rows

    kind = {"blocksize": packed.blocksize, "quant_type": packed.quant_type}
    return few_rows.begin(x, few_rows.in_order(x).contiguous(), packed.packed(), a, **kind)


def _refuse_linear(x: Tensor, packed: Tensor, rows: int, blocksize: int) -> Note | None:
    return refuse(x, x.shape[-1], [packed], [rows], blocksize, [], [])


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
    tensors = [each for each in (packed, absmax, absmax_code, absmax_scale, absmax_offset) if each is not None]
    weight = PackedWeights([tensors], [rows], x.shape[-1], blocksize, quant_type, x.dtype)
    y = _parts(x.reshape(-1, x.shape[-1]).contiguous(), weight, [])[0].sum(0).to(x.dtype)
    return (y if bias is None else y + bias).reshape(*x.shape[:-1], rows)
