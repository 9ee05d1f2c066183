"""The layouts in which an op accepts frozen weights, and the matrices that its products read.

Of siblings that share their input these are: dense weights W_i, [N_i, K], a matrix each; one dense matrix with the
adapters, [[W, scale B, 0], [A, 0, 0], [0, 0, 0]], in which the W_i stand below each other, and each adapter in its own
columns and rows, padded to multiples of 64; or 4-bit codes, as bitsandbytes stores them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tunecompile._torch.fake_tensors import size_hint
from tunecompile.ops.adapters.layout import below, extended_weight, padded, written_weight
from tunecompile.ops.nf4 import block_scales, dequantize_4bit

__all__ = ["FrozenWeights", "PackedWeights"]


@dataclass(frozen=True)
class PackedWeights:
    """4-bit weights W_i, [rows[i], columns], as `tunecompile.ops.nf4.dequantize_4bit` takes them.

    The lists have one member a weight.
    """

    packed: Sequence[Tensor]  #: uint8, rows[i] * columns / 2 elements each
    absmax: Sequence[Tensor]  #: fp32 [blocks], or uint8 [blocks] with double quantisation
    code: Sequence[Tensor]  #: fp32 [256] with double quantisation; else empty, as are scale and offset
    scale: Sequence[Tensor]  #: fp32 [ceil(blocks / 256)]
    offset: Sequence[Tensor]  #: fp32, one element
    rows: Sequence[int]  #: N_i
    blocksize: int  #: weights a block, for all of them
    quant_type: str  #: "nf4" or "fp4", for all of them
    columns: int  #: K
    dtype: torch.dtype  #: of the dequantised weights

    def part(self, members: slice, columns: int) -> PackedWeights:
        """Return some of the weights, `columns` wide."""
        lists = {name: getattr(self, name)[members] for name in ("packed", "absmax", "code", "scale", "offset", "rows")}
        return replace(self, columns=columns, **lists)

    def reference(self) -> list[Tensor]:
        """Return the W_i, dequantised by the op's reference."""
        return [dequantize_4bit.reference(*arguments) for arguments in self._arguments()]

    def dequantized(self) -> list[Tensor]:
        """Return the W_i, dequantised by the first provider that accepts them."""
        return [dequantize_4bit.choose(arguments).run(*arguments) for arguments in self._arguments()]

    def members(self) -> list:
        """Return the weights as templates take them."""
        from tunecompile.templates import nf4

        return [nf4.Weight(*arguments[:6]) for arguments in self._arguments()]

    def refuse_bitsandbytes(self) -> str | None:
        """Return why the kernel of bitsandbytes does not dequantise all weights, or None."""
        refusals = (dequantize_4bit.refusals(arguments, None).get("bitsandbytes") for arguments in self._arguments())
        return next((reason for reason in refusals if reason), None)

    def extended(self, b: Sequence[Tensor], scales: Sequence[float], below: Tensor | None = None) -> Tensor:
        """Return [W | scale B | 0], [sum(rows), padded(columns + sum of ranks)], with `below` [*, columns] under W.

        One kernel writes weights and adapters side by side, each sibling into its rows.
        """
        from tunecompile.templates import nf4

        ranks = [m.shape[1] for m in b]
        out = self._room(padded(self.columns + sum(ranks)), below)
        adapters = [nf4.Adapter(m, s, sum(ranks[:i])) for i, (m, s) in enumerate(zip(b, scales))]
        return self._write(out, adapters, below)

    def stacked(self, below: Tensor | None) -> Tensor:
        """Return [W; below], [sum(rows) + rows of `below`, columns]."""
        return self._write(self._room(self.columns, below), None, below)

    def write(self, out: Tensor, scales: Tensor, transposed: bool, by_column: bool) -> None:
        """As `FrozenWeights.write`: codes are converted directly to 8 bits."""
        from tunecompile.templates import eight_bits

        for i, n in enumerate(self.rows):
            start = sum(self.rows[:i])
            eight_bits.write_nf4(
                self.packed[i],
                self.absmax[i],
                (n, self.columns),
                scales,
                out,
                *((0, start) if transposed else (start, 0)),
                transposed=transposed,
                by_column=by_column,
                blocksize=self.blocksize,
                quant_type=self.quant_type,
                **self._nested(i),
            )

    def _nested(self, i: int) -> dict[str, Tensor]:
        if not self.code:
            return {}
        return {"absmax_code": self.code[i], "absmax_scale": self.scale[i], "absmax_offset": self.offset[i]}

    def _arguments(self) -> list[tuple]:
        """The arguments of `dequantize_4bit` for each weight."""
        blank = [None] * len(self.rows)
        tables = zip(self.packed, self.absmax, self.code or blank, self.scale or blank, self.offset or blank, self.rows)
        return [(*each, self.columns, self.blocksize, self.quant_type, self.dtype) for each in tables]

    def _room(self, width: int, below: Tensor | None) -> Tensor:
        extra = 0 if below is None else below.shape[0]
        return torch.empty((sum(self.rows) + extra, width), dtype=self.dtype, device=self.packed[0].device)

    def _write(self, out: Tensor, adapters: list | None, below: Tensor | None) -> Tensor:
        from tunecompile.templates import lora, nf4

        nf4.dequantize_siblings(
            self.members(), self.columns, out, adapters or (), blocksize=self.blocksize, quant_type=self.quant_type
        )
        if below is not None:
            lora.append_rows(below, out, sum(self.rows))
        return out

    def bound(self) -> Tensor:
        """Return an upper bound of all weights: levels are at most 1, so a weight is at most the scale of its block.

        Double-quantised scales are bounded without decoding them, which reads a 256th of the bytes.
        """
        if not self.code:
            return torch.stack([m.amax() for m in self.absmax]).amax().float()
        return (
            torch.cat(list(self.code)).abs().amax() * torch.cat(list(self.scale)).abs().amax()
            + torch.stack([o.reshape(()) for o in self.offset]).abs().amax()
        )

    def row_bounds(self) -> Tensor:
        """Return upper bounds of the weights' rows, fp32 [sum(rows)]: one for all where rows are no whole blocks."""
        if self.columns % self.blocksize:
            return self.bound().expand(sum(self.rows))
        tables = ((*arguments[1:5], arguments[5]) for arguments in self._arguments())
        return torch.cat([block_scales(*table).reshape(n, -1).abs().amax(1) for *table, n in tables])


@dataclass(frozen=True)
class FrozenWeights:
    """The frozen weights of one matrix product. Made by `dense` or `of_packed`."""

    matrices: Sequence[Tensor]  #: the W_i, or one with the adapters; empty if packed
    rows: list[int]  #: N_i
    columns: int  #: K
    packed: PackedWeights | None = None

    @staticmethod
    def dense(matrices: Sequence[Tensor], rows: Sequence[int], columns: int) -> FrozenWeights:
        """Return dense weights as frozen weights.

        Args:
            matrices: the W_i, [N_i, K] each; or one matrix with the adapters.
            rows: N_i.
            columns: K.
        """
        return FrozenWeights(matrices, list(rows), columns)

    @staticmethod
    def of_packed(packed: PackedWeights) -> FrozenWeights:
        """Return 4-bit weights as frozen weights."""
        return FrozenWeights((), list(packed.rows), packed.columns, packed)

    @property
    def height(self) -> int:
        """The sum of N_i."""
        return sum(self.rows)

    @property
    def fused(self) -> bool:
        """Whether one dense matrix holds weights and adapters."""
        return len(self.matrices) == 1 and self.matrices[0].shape[0] > self.height

    def members(self) -> Sequence[Tensor]:
        """Return the W_i, [N_i, K]: views of a fused matrix, or packed weights dequantised by the reference."""
        if self.packed is not None:
            return self.packed.reference()
        return self.matrices[0][: self.height, : self.columns].split(self.rows) if self.fused else self.matrices

    def without_copy(self, tokens: int) -> Tensor | None:
        """Return W of all siblings if a product should read it alone and add the adapters' term afterwards; else None.

        For a small batch this moves fewer bytes than a copy of W with scale B beside it. None for larger batches, if
        the matrix already holds scale B, or if W is not one dense weight.

        Args:
            tokens: rows of the product; may be symbolic.
        """
        alone = len(self.matrices) == 1 and not self.fused
        return self.matrices[0] if alone and 2 * size_hint(tokens) < self.columns else None

    def extended(self, b: Sequence[Tensor], scales: Sequence[float], dtype: torch.dtype) -> Tensor:
        """Return [W | scale B | 0], the factor of [x | xa | 0]; `dtype` is that of the adapters' arithmetic."""
        if self.packed is not None:
            return self.packed.extended(b, scales)
        return self.matrices[0][: self.height] if self.fused else extended_weight(self.matrices, b, scales, dtype)

    def written(
        self, b: Sequence[Tensor], scales: Sequence[float], dtype: torch.dtype, below: Tensor | None = None
    ) -> Tensor:
        """Return [W | scale B | 0], written by kernels into one buffer, with `below` under its first K columns."""
        if self.packed is not None:
            return self.packed.extended(b, scales, below)
        return written_weight(self.matrices, b, scales, dtype, below)

    def stacked(self, a: Sequence[Tensor], dtype: torch.dtype, with_adapters: bool = True) -> Tensor:
        """Return [W; A; 0] in `dtype`, the factor of [dY | dY B | 0]; or only W, the factor of dY."""
        if self.fused:
            return self.matrices[0][: None if with_adapters else self.height, : self.columns]
        adapters = below(a, self.height, dtype) if with_adapters else None
        if self.packed is not None:
            return self.packed.stacked(adapters)
        parts = [*self.matrices] if adapters is None else [*self.matrices, adapters]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @property
    def is_cuda(self) -> bool:
        """Whether they are on a GPU."""
        return (self.packed.packed if self.packed is not None else self.matrices)[0].is_cuda

    def bound(self) -> Tensor:
        """Return an upper bound of all weights: fp32, one element."""
        if self.packed is not None:
            return self.packed.bound()
        return torch.stack([w.abs().amax() for w in self.members()]).amax().float()

    def row_bounds(self) -> Tensor:
        """Return upper bounds of the weights' rows, fp32 [height]: on the CPU, the largest weight of each."""
        if self.packed is not None and self.is_cuda:
            return self.packed.row_bounds()
        return torch.cat([w.abs().amax(1) for w in self.members()]).float()

    def write(self, out: Tensor, scales: Tensor, transposed: bool, by_column: bool = False) -> None:
        """Write the weights below each other, divided by scales, into an operand of a product in 8 bits.

        Args:
            out: e4m3 or int8, [height, width], or transposed [columns, width]; on a GPU.
            scales: fp32, one for each row of `out`; or `by_column`, one for each column that is written.
            transposed: whether the transposed weights are written, beside each other.
            by_column: whether scales are of columns.
        """
        if self.packed is not None:
            return self.packed.write(out, scales, transposed, by_column)
        from tunecompile.templates import eight_bits

        for i, w in enumerate(self.members()):
            start = sum(self.rows[:i])
            place = (0, start) if transposed else (start, 0)
            eight_bits.write_dense(w.t() if transposed else w, scales, out, *place, by_column=by_column)
