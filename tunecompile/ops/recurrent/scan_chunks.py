"""Selective state spaces in chunks of tokens: each chunk by itself, then states from chunk to chunk (arXiv:2312.00752).

Decays are those of each channel and each of its states, so that nothing becomes a matrix product. A chunk's tokens are
taken one after the other, all chunks at once: first from states of 0, which gives what a chunk adds to the state that
enters it; then from the states that do enter.

A document begins with a state of 0: the decay into its first token is 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tunecompile.ops.recurrent.documents import document_of

CHUNK = 64  #: tokens


def in_chunks(x: Tensor) -> Tensor:
    """[B, T, ...] -> [B, M, CHUNK, ...], 0 after T: tokens that add nothing and do not decay."""
    missing = -x.shape[1] % CHUNK
    return F.pad(x, (0, 0, 0, missing)).unflatten(1, (-1, CHUNK))


def kept_at(offsets: Tensor | None, tokens: int, dtype: torch.dtype) -> Tensor | None:
    """Return 0 for each token where a document begins, else 1: [M, CHUNK]; None if each row is a document."""
    if offsets is None:
        return None
    documents = document_of(offsets, tokens)
    inside = documents == F.pad(documents[:-1], (1, 0), value=-1)
    return F.pad(inside.to(dtype), (0, -tokens % CHUNK), value=1).unflatten(0, (-1, CHUNK))


@dataclass(frozen=True)
class ScanChunks:
    """Operands of some channels in chunks, [B, M, CHUNK, ...], in the dtype of the arithmetic."""

    x: Tensor  #: [..., D]
    dt: Tensor  #: [..., D]
    a: Tensor  #: [D, N]
    b: Tensor  #: [..., N]
    c: Tensor  #: [..., N]
    kept: Tensor | None  #: of `kept_at`

    @staticmethod
    def of(
        x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, kept: Tensor | None, wide: torch.dtype
    ) -> ScanChunks:
        """Return operands [B, T, ...] in chunks."""
        return ScanChunks(
            *(in_chunks(t.to(wide)) for t in (x, dt)), a.to(wide), *(in_chunks(t.to(wide)) for t in (b, c)), kept
        )

    def decay(self, i: int) -> Tensor:
        """The decay into token i of each chunk, [B, M, D, N]."""
        made = (self.dt[:, :, i, :, None] * self.a).exp()
        return made if self.kept is None else made * self.kept[:, i, None, None]

    def whole(self) -> Tensor:
        """The decay over each chunk, [B, M, D, N]."""
        made = (self.dt.sum(2).unsqueeze(-1) * self.a).exp()
        return made if self.kept is None else made * self.kept.prod(1)[:, None, None]

    def step(self, state: Tensor, i: int) -> Tensor:
        """The state after token i of each chunk."""
        return state * self.decay(i) + (self.dt * self.x)[:, :, i, :, None] * self.b[:, :, i, None, :]

    def entering(self, initial: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the states that enter chunks, [B, M, D, N], and the state after the last one.

        Args:
            initial: [B, D, N], or None for 0.
        """
        rows, count = self.x.shape[:2]
        added = self.x.new_zeros(rows, count, *self.a.shape)
        for i in range(CHUNK):
            added = self.step(added, i)
        state = self.x.new_zeros(rows, *self.a.shape) if initial is None else initial.to(self.x.dtype)
        states, whole = [], self.whole()
        for m in range(count):
            states.append(state)
            state = state * whole[:, m] + added[:, m]
        return torch.stack(states, 1) if states else added, state

    def outputs(self, state: Tensor) -> Tensor:
        """Return the result of each token, [B, M, CHUNK, D], from the states that enter chunks."""
        made = []
        for i in range(CHUNK):
            state = self.step(state, i)
            made.append((state @ self.c[:, :, i, :, None]).squeeze(-1))
        return torch.stack(made, 2)

    def leaving(self, grad: Tensor, grad_final: Tensor) -> tuple[Tensor, Tensor]:
        """Return gradients of the states that leave chunks, [B, M, D, N], and of the initial state.

        Args:
            grad: of the results, in chunks.
            grad_final: of the final state, [B, D, N].
        """
        count = self.x.shape[1]
        added = self.x.new_zeros(*self.x.shape[:2], *self.a.shape)
        for i in reversed(range(CHUNK)):
            added = (added + grad[:, :, i, :, None] * self.c[:, :, i, None, :]) * self.decay(i)
        state, states, whole = grad_final, [], self.whole()
        for m in reversed(range(count)):
            states.append(state)
            state = state * whole[:, m] + added[:, m]
        return torch.stack(states[::-1], 1) if states else added, state

    def gradients(self, grad: Tensor, entering: Tensor, leaving: Tensor) -> tuple[Tensor, ...]:
        """Return (dx, ddt, da, db, dc) in chunks; db and dc are those by these channels.

        Args:
            grad: of the results, in chunks.
            entering: states that enter chunks.
            leaving: gradients of the states that leave chunks.
        """
        states = [entering]
        for i in range(CHUNK):
            states.append(self.step(states[-1], i))
        ahead, da, found = leaving, torch.zeros_like(self.a), []
        for i in reversed(range(CHUNK)):
            given, decay = grad[:, :, i, :, None], self.decay(i)
            ahead = ahead + given * self.c[:, :, i, None, :]
            d_c, d_b = (given * states[i + 1]).sum(2), (ahead * (self.dt * self.x)[:, :, i, :, None]).sum(2)
            d_added = (ahead @ self.b[:, :, i, :, None]).squeeze(-1)  # of dt x
            ahead = ahead * decay
            by_decay = ahead * states[i]
            da = da + (by_decay * self.dt[:, :, i, :, None]).sum((0, 1))
            d_dt = d_added * self.x[:, :, i] + (by_decay * self.a).sum(-1)
            found.append((d_added * self.dt[:, :, i], d_dt, d_b, d_c))
        dx, ddt, db, dc = (torch.stack(each[::-1], 2) for each in zip(*found))
        return dx, ddt, da, db, dc
