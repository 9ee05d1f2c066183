"""The layouts in which an op accepts frozen weights, and the matrices that its products read.

Of siblings that share their input these are: dense weights W_i, [N_i, K], a matrix each; one dense matrix with the
adapters, [[W, scale B, 0], [A, 0, 0], [0, 0, 0]], in which the W_i stand below each other, and each adapter in its own
columns and rows, padded to multiples of 64; or 4-bit codes, as bitsandbytes stores them.

An op takes their tensors in one list, and a string that says how they are stored: `DENSE`, or `packed_as` of 4 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tunecompile import templates
from tunecompile._torch.fake_tensors import size_hint
from tunecompile.ir.op import refuse_gpu
from tunecompile.notes import Note, note
from tunecompile.ops.adapters.layout import below, extended_weight, padded, written_weight
from tunecompile.ops.nf4 import block_scales, dequantize_4bit

__all__ = ["DENSE", "DenseWeights", "FrozenWeights", "PackedWeights", "frozen_weights", "packed_as"]

DENSE = "dense"
TILE, TILES = 128, 96  #: rows and columns of a result that cuBLAS gives one multiprocessor; tiles that fill a GPU


def packed_as(quant_type: str, blocksize: int) -> str:
    """Return how 4-bit weights are stored, as ops take it. Each has 2 tensors in the list, or 5 (`PackedWeights`)."""
    return f"{quant_type}:{blocksize}"


def frozen_weights(
    weights: Sequence, stored: str, rows: Sequence[int], columns: int, dtype: torch.dtype
) -> FrozenWeights:
    """Return the frozen weights that an op's arguments describe.

    Args:
        weights: all tensors, or the nodes of a graph that represent them.
        stored: `DENSE`, or the result of `packed_as`.
        rows: N_i.
        columns: K.
        dtype: of the weights, once they are dequantised.
    """
    if stored == DENSE:
        return DenseWeights(weights, list(rows), columns)
    quant_type, blocksize = stored.split(":")
    each = len(weights) // len(rows)
    tensors = [weights[i : i + each] for i in range(0, len(weights), each)]
    return PackedWeights(tensors, list(rows), columns, int(blocksize), quant_type, dtype)


@dataclass(frozen=True)
class DenseWeights:
    """The frozen weights of one matrix product, W_i, [rows[i], columns]."""

    matrices: Sequence[Tensor]  #: the W_i, or one with the adapters
    rows: list[int]  #: N_i
    columns: int  #: K

    @property
    def height(self) -> int:
        """The sum of N_i."""
        return sum(self.rows)

    @property
    def fused(self) -> bool:
        """Whether one matrix holds weights and adapters."""
        return len(self.matrices) == 1 and self.matrices[0].shape[0] > self.height

    @property
    def is_cuda(self) -> bool:
        """Whether they are on a GPU."""
        return self.matrices[0].is_cuda

    @property
    def contiguous(self) -> bool:
        """Whether kernels can read them."""
        return all(matrix.stride(-1) == 1 for matrix in self.matrices)

    def refuse(self, x: Tensor) -> Note | None:
        """Return why products of x cannot read the matrices below, or None."""
        return refuse_gpu(x, triton=False)

    def refuse_eight_bits(self) -> Note | None:
        """Return why `write` cannot read them, or None."""
        return None

    def members(self) -> Sequence[Tensor]:
        """Return the W_i, [N_i, K]: views of a fused matrix."""
        return self.matrices[0][: self.height, : self.columns].split(self.rows) if self.fused else self.matrices

    def without_copy(self, tokens: int) -> Sequence[Tensor] | None:
        """Return the W_i if y is computed by a product with each, added to its adapter's term; else None.

        So y is written and read once more. For few tokens these are fewer bytes than a copy of W with scale B beside
        it. Siblings stay together where a product with one of them would leave much of a GPU idle.

        Args:
            tokens: rows of the product; may be symbolic.
        """
        tokens, alone = size_hint(tokens), len(self.matrices) == 1
        few = not self.fused and tokens < self.columns
        return self.matrices if few and (alone or -(-tokens // TILE) * min(self.rows) >= TILES * TILE) else None

    def adds(self, tokens: int) -> bool:
        """Whether dX is the sum of dY_i W_i and the adapters' term, for so many rows of dY.

        Each product reads and writes the sum so far, as large as dX. For few tokens these are fewer bytes than a copy
        of all W_i with A below them.
        """
        return not self.fused and len(self.matrices) * size_hint(tokens) < self.height

    def extended(self, b: Sequence[Tensor], scales: Sequence[float], dtype: torch.dtype) -> Tensor:
        """Return [W | scale B | 0], the factor of [x | xa | 0]; `dtype` is that of the adapters' arithmetic."""
        return self.matrices[0][: self.height] if self.fused else extended_weight(self.matrices, b, scales, dtype)

    def written(
        self, b: Sequence[Tensor], scales: Sequence[float], dtype: torch.dtype, below: Tensor | None = None
    ) -> Tensor:
        """Return [W | scale B | 0], written by kernels into one buffer, with `below` under its first K columns."""
        return written_weight(self.matrices, b, scales, dtype, below)

    def stacked(self, a: Sequence[Tensor], dtype: torch.dtype, with_adapters: bool = True) -> Tensor:
        """Return [W; A; 0] in `dtype`, the factor of [dY | dY B | 0]; or only W, the factor of dY."""
        if self.fused:
            return self.matrices[0][: None if with_adapters else self.height, : self.columns]
        parts = [*self.matrices, below(a, self.height, dtype)] if with_adapters else self.matrices
        return parts[0] if len(parts) == 1 else torch.cat(list(parts))

    def bound(self) -> Tensor:
        """Return an upper bound of all weights: fp32, one element."""
        return torch.stack([w.abs().amax() for w in self.members()]).amax().float()

    def row_bounds(self) -> Tensor:
        """Return upper bounds of the weights' rows, fp32 [height]."""
        return torch.cat([w.abs().amax(1) for w in self.members()]).float()

    def write(self, out: Tensor, scales: Tensor, transposed: bool, by_column: bool = False) -> None:
        """Write the weights below each other, divided by scales, into an operand of a product in 8 bits.

        Args:
            out: e4m3 or int8, [height, width], or transposed [columns, width]; on a GPU.
            scales: fp32, one for each row of `out`; or `by_column`, one for each column that is written.
            transposed: whether the transposed weights are written, beside each other.
            by_column: whether scales are of columns.
        """
        for place, w in zip(_places(self.rows, transposed), self.members()):
            templates.eight_bits.write_dense(w.t() if transposed else w, scales, out, *place, by_column=by_column)


@dataclass(frozen=True)
class PackedWeights:
    """4-bit weights W_i, [rows[i], columns]. What it has in common with `DenseWeights` means the same."""

    #: the first tensors that `tunecompile.ops.nf4.dequantize_4bit` takes, of each weight: two, or five where all are
    #: double-quantised
    tensors: Sequence[Sequence[Any]]
    rows: list[int]  #: N_i
    columns: int  #: K
    blocksize: int  #: weights a block, for all of them
    quant_type: str  #: "nf4" or "fp4", for all of them
    dtype: torch.dtype  #: of the dequantised weights

    @property
    def height(self) -> int:
        return sum(self.rows)

    @property
    def is_cuda(self) -> bool:
        return self.tensors[0][0].is_cuda

    @property
    def codes(self) -> list[Tensor]:
        """The packed codes of each weight."""
        return [packed for packed, *_ in self.tensors]

    @property
    def contiguous(self) -> bool:
        return all(packed.is_contiguous() for packed in self.codes)

    def refuse(self, x: Tensor) -> Note | None:
        return refuse_gpu(x) or (None if self.contiguous else note("not-contiguous", "the packed weight is"))

    def refuse_eight_bits(self) -> Note | None:
        aligned = self.contiguous and all(packed.storage_offset() % 4 == 0 for packed in self.codes)
        return None if aligned else note("eight-bits-packed-weight")

    def refuse_bitsandbytes(self) -> str | None:
        """Return why the kernel of bitsandbytes does not dequantise all weights, or None."""
        refusals = (dequantize_4bit.refusals(arguments, None).get("bitsandbytes") for arguments in self.arguments())
        return next((reason for reason in refusals if reason), None)

    def arguments(self) -> list[tuple]:
        """Return the arguments of `dequantize_4bit` for each weight."""
        rest = (self.columns, self.blocksize, self.quant_type, self.dtype)
        return [(*each, *[None] * (5 - len(each)), n, *rest) for each, n in zip(self.tensors, self.rows)]

    def members(self) -> list[Tensor]:
        """Return the W_i, dequantised by the op's reference."""
        return [dequantize_4bit.reference(*arguments) for arguments in self.arguments()]

    def dequantized(self) -> list[Tensor]:
        """Return the W_i, dequantised by the first provider that accepts them."""
        return [dequantize_4bit.choose(arguments).run(*arguments) for arguments in self.arguments()]

    def packed(self) -> list:
        """Return the weights as templates take them."""
        return [templates.nf4.Weight(*arguments[:6]) for arguments in self.arguments()]

    def without_copy(self, tokens: int) -> None:
        return None

    def adds(self, tokens: int) -> bool:
        return False

    def extended(
        self, b: Sequence[Tensor], scales: Sequence[float], dtype: torch.dtype, below: Tensor | None = None
    ) -> Tensor:
        """One kernel writes weights and adapters side by side, each sibling into its rows."""
        ranks = [m.shape[1] for m in b]
        adapters = [templates.nf4.Adapter(m, s, sum(ranks[:i])) for i, (m, s) in enumerate(zip(b, scales))]
        return self._written(padded(self.columns + sum(ranks)), adapters, below)

    written = extended

    def stacked(self, a: Sequence[Tensor], dtype: torch.dtype, with_adapters: bool = True) -> Tensor:
        return self._written(self.columns, (), below(a, self.height, dtype) if with_adapters else None)

    def _written(self, width: int, adapters: Sequence, below: Tensor | None) -> Tensor:
        height = self.height + (0 if below is None else below.shape[0])
        out = torch.empty((height, width), dtype=self.dtype, device=self.codes[0].device)
        kind = {"blocksize": self.blocksize, "quant_type": self.quant_type}
        templates.nf4.dequantize_siblings(self.packed(), self.columns, out, adapters, **kind)
        if below is not None:
            templates.lora.append_rows(below, out, self.height)
        return out

    def bound(self) -> Tensor:
        """Levels are at most 1, so a weight is at most the scale of its block.

        Double-quantised scales are bounded without decoding them, which reads a 256th of the bytes.
        """
        _, absmax, *nested = zip(*self.tensors)
        if not nested:
            return torch.stack([m.amax() for m in absmax]).amax().float()
        code, scale, offset = nested
        return (
            torch.cat(code).abs().amax() * torch.cat(scale).abs().amax()
            + torch.stack([o.reshape(()) for o in offset]).abs().amax()
        )

    def row_bounds(self) -> Tensor:
        """One for all rows where they are no whole blocks."""
        if self.columns % self.blocksize:
            return self.bound().expand(self.height)
        tables = (arguments[1:6] for arguments in self.arguments())
        return torch.cat([block_scales(*table).reshape(n, -1).abs().amax(1) for *table, n in tables])

    def write(self, out: Tensor, scales: Tensor, transposed: bool, by_column: bool = False) -> None:
        """Codes are converted directly to 8 bits."""
        for place, weight in zip(_places(self.rows, transposed), self.packed()):
            templates.eight_bits.write_nf4(
                *(weight.packed, weight.absmax, (weight.rows, self.columns), scales, out, *place),
                **dict(transposed=transposed, by_column=by_column),
                **dict(blocksize=self.blocksize, quant_type=self.quant_type),
                **dict(absmax_code=weight.code, absmax_scale=weight.scale, absmax_offset=weight.offset),
            )


FrozenWeights = DenseWeights | PackedWeights


def _places(rows: Sequence[int], transposed: bool) -> list[tuple[int, int]]:
    """Where each weight begins in an operand: its row and column."""
    starts = [sum(rows[:i]) for i in range(len(rows))]
    return [(0, start) if transposed else (start, 0) for start in starts]
