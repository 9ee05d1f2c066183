"""Products of few rows with packed weights, as a step of a rollout has them (`tunecompile.templates.few_rows`)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tunecompile._torch.card import AMPERE, older_than
from tunecompile.ir.op import refuse_gpu
from tunecompile.notes import Note, note
from tunecompile.ops.frozen_weights import PackedWeights

__all__ = ["BECAUSE", "product", "refuse"]

BECAUSE = "few rows: 4-bit weights are unpacked in registers, and never written"
MAX_ROWS, MAX_RANKS, SIBLINGS = 64, 64, 3  #: as the template's
TILE, STEP = 64, 128  #: what divides rows and columns of a weight


def refuse(
    x: Tensor, columns: int, packed: Sequence[Tensor], rows: Sequence[int], blocksize: int, a: Sequence, b: Sequence
) -> Note | None:
    """Return why the template does not multiply by these weights, or None.

    Args:
        x: [..., K], the rows.
        columns: K of the weights.
        packed: of one format, one a weight. This and rows, blocksize, a and b: as for
            `tunecompile.ops.lora_nf4.lora_linear_nf4`.
    """
    tokens = x.numel() // x.shape[-1]
    if not isinstance(tokens, int):  # a symbol, which is not to be compared with anything
        return note("rows-change")
    if tokens > MAX_ROWS:
        return note("too-many-rows", rows=tokens, limit=MAX_ROWS)
    if reason := refuse_gpu(x):
        return reason
    if torch.version.hip is not None or older_than(x.device, AMPERE):
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

    kind = {"blocksize": packed.blocksize, "quant_type": packed.quant_type}
    parts, xa = few_rows.begin(x, few_rows.in_order(x).contiguous(), packed.members(), a, **kind)
    return few_rows.finish(parts, xa, b, scales, x.dtype)
