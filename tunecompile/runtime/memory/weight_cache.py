"""Frozen 4-bit weights that stay dequantised, in one matrix with their adapters, where a budget leaves room for that.

Each matrix product of adapted linears gets one matrix, [[W, scale B], [A, 0]]. The forward pass multiplies by its upper
part, the backward pass by its left part. W is written once. A and B change at every optimizer step, so those of a list
of layers are written before its first layer, all in one launch. The compiled graphs take the matrix in the place of the
first weight that it holds.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tunecompile import templates
from tunecompile._torch.autograd import in_backward, plain_tensors
from tunecompile.compiler.weight_layout import FusedWeightSlots
from tunecompile.ir.op import has_triton
from tunecompile.ops.nf4 import dequantize_4bit

Run = Callable[[list], Sequence[Any]]


class FusedWeight:
    """The weights in one product's matrix.

    It lives as long as the matrix, also where only a pending backward holds that.
    """

    def __init__(self, weights: Sequence[Tensor], columns: int):
        self.columns = columns
        self.weights, self.versions = (
            [weakref.ref(weight) for weight in weights],
            [weight._version for weight in weights],
        )
        self.a: list[Tensor] = []
        self.b: list[Tensor] = []
        self.scales: tuple[float, ...] = ()
        self.stack: int | None = None  #: whose layers read it; None where those of several do

    def holds(self, weights: Sequence[Tensor]) -> bool:
        return all(
            ref() is weight and version == weight._version
            for ref, weight, version in zip(self.weights, weights, self.versions)
        )

    def adapted(self, a: Sequence[Tensor], b: Sequence[Tensor], scales: tuple[float, ...]) -> bool:
        mine, given = (*self.a, *self.b), (*a, *b)
        return (
            self.scales == scales
            and len(mine) == len(given)
            and all(x.data_ptr() == y.data_ptr() for x, y in zip(mine, given))
        )

    def adapt(self, values: Tensor, a: list[Tensor], b: list[Tensor], scales: tuple[float, ...]) -> None:
        self.a, self.b, self.scales = a, b, scales
        values = values.data  # unseen by autograd: a pending backward reads the same values as they are written again
        values[:, self.columns :] = 0
        values[sum(m.shape[0] for m in b) :] = 0
        writer(self.pieces(values))()

    def pieces(self, values: Tensor) -> list[tuple[Tensor, Tensor, float]]:
        """(adapter, its place in the matrix, factor)."""
        found, row, column = [], 0, self.columns
        height, target = sum(m.shape[0] for m in self.b), values.data
        for a, b, scale in zip(self.a, self.b, self.scales):
            rank = a.shape[0]
            below = height + column - self.columns
            found.append((b.detach(), target[row : row + b.shape[0], column : column + rank], scale))
            found.append((a.detach(), target[below : below + rank, : self.columns], 1.0))
            row, column = row + b.shape[0], column + rank
        return found


@dataclass(frozen=True)
class Writer:
    """Writes the adapters of a stack's layers."""

    write: Callable[[], None]
    addresses: list[int]  #: of the adapters


class WeightCache:
    """All matrices of one model."""

    def __init__(self) -> None:
        #: place of the layer of each stack that ran last; above all places before a step. Layers of one stack may be
        #: called between those of another (mergers in a tower)
        self.last: dict[int, int] = {}
        self.stack = 0  #: the stack whose layer runs
        self.matrices: dict[
            tuple, Tensor
        ] = {}  #: by their weights' addresses, shape and dtype (adapters differ in targets and rank)
        self.writers: dict[int, Writer] = {}  #: by stack

    @property
    def bytes(self) -> int:
        """Bytes of matrices beside the weights."""
        return sum(values.nbytes for values in self.matrices.values())

    def release(self) -> None:
        """Drop all matrices. A pending backward keeps those that it needs."""
        self.matrices.clear()
        self.writers.clear()

    def expect(self) -> None:
        """A step begins."""
        self.last.clear()

    def enter(self, place: int, stack: int = 0) -> None:
        """Before a layer's call. Its place tells whether it is the first: layers may be called by themselves."""
        if place <= self.last.get(stack, sys.maxsize) and not in_backward():  # checkpoints call layers in the backward
            self.begin(stack)
        self.last[stack], self.stack = place, stack

    def begin(self, stack: int) -> None:
        """Before a stack's first layer: write adapters. Optimizers step, some without autograd's version counters."""
        if not self.matrices:
            return
        with plain_tensors():  # 4-bit parameters would answer each question in Python
            held = self._standing_of(stack, self.last)
            addresses = [address for _, adapters in held for address in adapters]
            known = self.writers.get(stack)
            if known is None or addresses != known.addresses:
                pieces = [piece for values, _ in held for piece in values._matrix.pieces(values)]
                known = self.writers[stack] = Writer(writer(pieces), addresses)
            known.write()

    def _standing_of(self, stack: int, ran: Collection[int]) -> list[tuple[Tensor, list[int]]]:
        """A stack's matrices, with their adapters' addresses.

        Those whose weights were replaced or moved, or whose adapters lost their memory, are dropped; those of other
        stacks, too, before the first one of a step.

        Args:
            ran: stacks of the step.
        """
        held = []
        for key, values in list(self.matrices.items()):
            matrix = values._matrix
            of_stack = matrix.stack in (stack, None)
            if not of_stack and ran:
                continue
            adapters = [adapter.data_ptr() for adapter in (*matrix.a, *matrix.b)]
            if not all(adapters) or not _at(key, matrix):
                del self.matrices[key]
                self.writers.clear()
            elif of_stack:
                held.append((values, adapters))
        return held

    def forward(self, run: Run, positions: Sequence[FusedWeightSlots]) -> Run:
        kept = weakref.ref(self)  # Dynamo's cache holds the code that it runs, out of reach of Python's collector

        def call(inputs: list) -> Sequence[Any]:
            with plain_tensors():
                for position, values in [(position, kept()._values(position, inputs)) for position in positions]:
                    inputs[position.place] = values
            return run(inputs)

        return call

    def backward(self, run: Run, positions: Sequence[FusedWeightSlots]) -> Run:
        """Matrices come as saved tensors of the forward. Another adapter may have run in between."""
        kept = weakref.ref(self)

        def call(inputs: list) -> Sequence[Any]:
            with plain_tensors():
                for position in positions:
                    if _adapt(inputs[position.place], position, inputs) and kept() is not None:
                        kept().writers.clear()
            return run(inputs)

        return call

    def _values(self, position: FusedWeightSlots, inputs: list) -> Tensor:
        weights = [inputs[weight[0]] for weight in position.weights]
        values = self._dequantized(position, inputs, weights)
        if _adapt(values, position, inputs):
            self.writers.clear()
        if values._matrix.stack not in (self.stack, None):  # shared weights
            values._matrix.stack = None
            self.writers.clear()
        return values

    def _dequantized(self, position: FusedWeightSlots, inputs: list, weights: list[Tensor]) -> Tensor:
        key = _key(position, weights)
        values = self.matrices.get(key)
        if values is None or not values._matrix.holds(weights):
            values = self.matrices[key] = self._made(position, inputs, weights)
        return values

    def _made(self, position: FusedWeightSlots, inputs: list, weights: list[Tensor]) -> Tensor:
        values = torch.zeros(position.shape, dtype=position.dtype, device=weights[0].device)
        row = 0
        for weight in position.weights:
            row += _write_weight(
                values, row, position.columns, [inputs[m] if isinstance(m, int) else m[0] for m in weight]
            )
        values._matrix = FusedWeight(weights, position.columns)
        values._matrix.stack = self.stack
        return values


def _at(key: tuple, matrix: FusedWeight) -> bool:
    """Whether no weight moved."""
    return all(
        (weight := ref()) is not None and weight.data_ptr() == address for ref, address in zip(matrix.weights, key[0])
    )


def _key(position: FusedWeightSlots, weights: Sequence[Tensor]) -> tuple:
    return tuple(weight.data_ptr() for weight in weights), position.shape, position.columns, position.dtype


def _adapt(values: Tensor, position: FusedWeightSlots, inputs: list) -> bool:
    """Write these adapters into the matrix. Returns whether it held others."""
    a, b = ([inputs[i] for i in places] for places in (position.a, position.b))
    matrix = getattr(values, "_matrix", None)
    if matrix is None or matrix.adapted(a, b, position.scales):
        return False
    matrix.adapt(values, a, b, position.scales)
    return True


def _write_weight(out: Tensor, row: int, columns: int, weight: list) -> int:
    """Dequantise into the first columns, from row `row` on. Returns the number of rows."""
    packed, absmax, code, scale, offset, rows, _, blocksize, quant_type, _ = weight
    if out.is_cuda and has_triton():
        templates.nf4.dequantize_siblings(
            [templates.nf4.Weight(packed.detach(), absmax, code, scale, offset, rows)],
            columns,
            out,
            blocksize=blocksize,
            quant_type=quant_type,
            row=row,
        )
    else:
        out[row : row + rows, :columns] = dequantize_4bit.choose(weight).run(*weight)
    return rows


def writer(pieces: Sequence[tuple[Tensor, Tensor, float]]) -> Callable[[], None]:
    """A function that writes all adapters into their places, times their factors."""
    on_gpu = pieces and pieces[0][0].is_cuda and has_triton()
    if on_gpu and all(
        source.stride(1) == 1 and {source.dtype, target.dtype} <= set(templates.lora.DTYPES)
        for source, target, _ in pieces
    ):
        return templates.lora.write_pieces(pieces)

    def write() -> None:
        for source, target, factor in pieces:
            target.copy_(source.to(torch.promote_types(source.dtype, torch.float32)) * factor)

    return write
