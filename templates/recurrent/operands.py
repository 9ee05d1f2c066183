"""Operands and sizes of one call of a delta rule, from which its kernels are started, and what both rules allocate."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from .. import _tiles
from .._launch import launch, next_power_of_2

__all__ = ["CHUNK", "Operands", "States"]

CHUNK = 64  #: tokens


class States(NamedTuple):
    """The results of the recurrence over chunks."""

    written: torch.Tensor  #: [B, T, H, V]: the new values n
    entering: torch.Tensor  #: [B, chunks * H * K, V]: the state at the beginning of each chunk
    final: torch.Tensor  #: [B, H, K, V], fp32


def _rows(x):
    """A tensor whose last dimension is contiguous, and its strides.

    Args:
        x: [B, T, H, D].

    Returns:
        (x or a copy, strides of the first three dimensions).
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x, x.stride()[:3]


class Operands:
    """The operands of a call; its sizes, among them those of its chunks; and its kernels' constants.

    Args:
        q, k, v, g, beta, offsets, documents, scale, delta: as given to `forward`.
        grad: as given to `backward`.

    Raises:
        ValueError: sizes that the kernels do not support.
    """

    def __init__(self, q, k, v, g, beta, offsets, documents, scale, delta=True, grad=None):
        (self.q, self.q_strides), (self.k, self.k_strides), (self.v, self.v_strides) = map(_rows, (q, k, v))
        self.grad, self.grad_strides = (None, ()) if grad is None else _rows(grad)
        self.g, self.beta, self.offsets, self.documents, self.delta = g, beta, offsets, documents, delta
        (self.batch, self.tokens, self.heads, self.width), self.keys = v.shape, q.shape[3]
        if self.keys % 16 or self.width % 16 or self.keys > 256:
            raise ValueError(f"keys of {self.keys} and values of {self.width}")
        self.sequences = self.batch if offsets is None else offsets.shape[0]
        # the last one may be incomplete. No tensor has a dimension of as many: torch asks of each whether it is 1, and
        # the answer becomes a guard on tokens, where they are a symbol. It is multiplied by other sizes
        self.chunks = (self.tokens + CHUNK - 1) // CHUNK
        sizes = dict(H=self.heads, GROUP=self.heads // q.shape[2], K=self.keys, V=self.width, C=CHUNK)
        self._constants = dict(sizes, SCALE=float(scale), HAS_DOCUMENTS=documents is not None, DELTA=delta)

    def empty(self, *shape, dtype=None):
        """An empty tensor [B, ...], in v's dtype if none is given."""
        return torch.empty(self.batch, *shape, dtype=dtype or self.v.dtype, device=self.v.device)

    def of_tokens(self, *width, dtype=None):
        """An empty tensor [B, T, H, ...]."""
        return self.empty(self.tokens, self.heads, *width, dtype=dtype)

    def of_chunks(self):
        """An empty tensor for a state of each chunk, [B, chunks * H * K, V]."""
        return self.empty(self.chunks * self.heads * self.keys, self.width)

    def states(self, written):
        """`States` of new values, and of states that are empty so far."""
        return States(written, self.of_chunks(), self.empty(self.heads, self.keys, self.width, dtype=torch.float32))

    def each_chunk(self, kernel, name, tensors, *strides, columns=None):
        """Start a program for each chunk and head.

        Args:
            kernel: takes the tensors, T, NT, and the strides.
            name: in the table of tiles.
            tensors: of the kernel.
            strides: of some of them.
            columns: how many there are, if each program has a block of them.
        """
        self._start(kernel, name, self.batch * self.chunks, (*tensors, self.tokens, self.chunks, *strides), columns)

    def along_chunks(self, kernel, name, tensors, *integers):
        """Start a program for each document, head and block of columns, which holds all keys of a state.

        Args:
            kernel: takes the tensors, T, NT, and the integers.
            name: in the table of tiles.
            tensors: of the kernel.
            integers: further ones.
        """
        args = (*tensors, self.tokens, self.chunks, *integers)
        self._start(kernel, name, self.sequences, args, self.width, all_keys=True)

    def _start(self, kernel, name, programs, args, columns, all_keys=False):
        tile = _tiles.pick(name, self.v, self.width)
        keys = max(next_power_of_2(self.keys), tile.block) if all_keys else tile.step
        known = dict(self._constants, KEYS=keys, BLOCK=tile.block)
        constants = {constant: known[constant] for constant in kernel.arg_names if constant in known}
        blocks = () if columns is None else (triton.cdiv(columns, tile.block),)
        grid = (programs, self.heads, *blocks)
        launch(kernel, grid, *args, **constants, num_warps=tile.num_warps, num_stages=tile.num_stages)
