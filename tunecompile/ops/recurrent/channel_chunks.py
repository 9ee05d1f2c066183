"""The delta rule with a decay for each channel of the key, in chunks (Kimi Team, 2025, arXiv:2510.26692).

In the words of `delta_chunks`, decays are vectors over the key's channels c, so that they go into the products:

    (a, b)_ij = sum_c a_ic b_jc e^(G_ic - G_jc) for j <= i          in place of (a_i . b_j) D_ij

e^-G alone would overflow. A chunk has blocks of tokens: between two of them each factor decays from or to the token
before the later block, which is at most 1; inside a block all three are multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tunecompile.ops.recurrent.delta_chunks import CHUNK, Chunks, seen

BLOCK = 16  #: tokens: products inside a block take memory for each pair and channel


@dataclass(frozen=True)
class Decays:
    """Running sums of a chunk's log decays, and pair products with them."""

    total: Tensor  #: G, [..., C, K]

    @property
    def _before(self) -> Tensor:
        """G at the token before each block, [..., C / BLOCK, 1, K]."""
        ends = self.total[..., BLOCK - 1 :: BLOCK, :]
        return F.pad(ends, (0, 0, 1, -1)).unsqueeze(-2)

    def _later(self) -> Tensor:
        """Decay from the token before a block to each token in it, [..., C / BLOCK, BLOCK, K]."""
        return (self.total.unflatten(-2, (-1, BLOCK)) - self._before).exp()

    def _earlier(self) -> Tensor:
        """Decay from each token before a block to the block's beginning, else 0: [..., C / BLOCK, C, K]."""
        tokens = torch.arange(CHUNK, device=self.total.device)
        earlier = (tokens < torch.arange(0, CHUNK, BLOCK, device=self.total.device)[:, None]).unsqueeze(-1)
        return torch.where(earlier, self._before - self.total.unsqueeze(-3), -torch.inf).exp()

    def _inside(self) -> Tensor:
        """Decay between tokens of a block, [..., C / BLOCK, BLOCK, BLOCK, K]."""
        blocks = self.total.unflatten(-2, (-1, BLOCK))
        lower = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=self.total.device).tril().unsqueeze(-1)
        return torch.where(lower, blocks.unsqueeze(-2) - blocks.unsqueeze(-3), -torch.inf).exp()

    def products(self, a: Tensor, b: Tensor) -> Tensor:
        """(a, b), [..., C, C]."""
        blocks = a.unflatten(-2, (-1, BLOCK))
        made = (blocks * self._later()) @ (b.unsqueeze(-3) * self._earlier()).mT  # [..., C / BLOCK, BLOCK, C]
        inside = torch.einsum("...ik,...jk,...ijk->...ij", blocks, b.unflatten(-2, (-1, BLOCK)), self._inside())
        return made.flatten(-3, -2) + _on_diagonal(inside)

    def gradients(self, grad: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of a and b from that of (a, b)."""
        blocks, rows = a.unflatten(-2, (-1, BLOCK)), grad.unflatten(-2, (-1, BLOCK))
        later, earlier, inside = self._later(), self._earlier(), self._inside()
        da = (rows @ (b.unsqueeze(-3) * earlier)) * later
        db = ((rows.mT @ (blocks * later)) * earlier).sum(-3)
        square = _diagonal(grad)
        da = da + torch.einsum("...ij,...jk,...ijk->...ik", square, b.unflatten(-2, (-1, BLOCK)), inside)
        return da.flatten(-3, -2), db + torch.einsum("...ij,...ik,...ijk->...jk", square, blocks, inside).flatten(
            -3, -2
        )


def _diagonal(x: Tensor) -> Tensor:
    """The blocks on the diagonal: [..., C, C] -> [..., C / BLOCK, BLOCK, BLOCK]."""
    count = CHUNK // BLOCK
    return x.unflatten(-1, (count, BLOCK)).unflatten(-3, (count, BLOCK)).diagonal(0, -4, -2).movedim(-1, -3)


def _on_diagonal(x: Tensor) -> Tensor:
    """The reverse, with 0 elsewhere."""
    made = torch.diag_embed(x.movedim(-3, -1), 0, -4, -2)  # [..., C / BLOCK, BLOCK, C / BLOCK, BLOCK]
    return made.flatten(-2).flatten(-3, -2)


@dataclass(frozen=True)
class ChannelChunks(Chunks):
    """The values of all chunks, as `Chunks`: `pairs` tells which tokens see each other, and decays have K channels."""

    decays: Decays

    @staticmethod
    def of(  # pyright: ignore[reportIncompatibleMethodOverride]
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, documents: Tensor | None
    ) -> ChannelChunks:
        """Compute them from operands in chunks; documents as for `Chunks.of`."""
        decays, beta = Decays(g.cumsum(-2)), beta.unsqueeze(-1)
        lower, *edges = seen(documents, q.device)
        last = decays.total[..., -1:, :]
        entering, leaving, through = (
            torch.where(edge.unsqueeze(-1) if edge.dim() else edge, decay.exp(), 0)
            for edge, decay in zip(edges, (decays.total, last - decays.total, last))
        )
        system = torch.where(lower, beta * decays.products(k, k), 0).tril(-1)
        system = system + torch.eye(CHUNK, dtype=q.dtype, device=q.device)
        return ChannelChunks(q, k, v, beta, lower, entering, leaving, through.mT, system, decays)

    def scores(self) -> Tensor:
        """(q, k) within documents."""
        return torch.where(self.pairs, self.decays.products(self.q, self.k), 0)

    def gradients(
        self, grad: Tensor, states: Tensor, written: Tensor, grad_states: Tensor, grad_written: Tensor
    ) -> tuple[Tensor, ...]:
        """Gradients of the operands, from those of outputs, states and new values: (dq, dk, dv, dg, dbeta).

        A decay from j to i is e^(G_i - G_j). So a factor at i times its gradient is added to the gradient of G_i, and a
        factor at j times its own is taken from that of G_j.
        """
        missing = self.solve_transposed(grad_written)
        by_score = torch.where(self.pairs, grad @ written.mT, 0)
        by_system = torch.where(self.pairs, -missing @ written.mT, 0).tril(-1)
        dq, dk_score = self.decays.gradients(by_score, self.q, self.k)
        dk_later, dk_earlier = self.decays.gradients(self.beta * by_system, self.k, self.k)
        dq = dq + self.entering * (grad @ states.mT)
        read = self.entering * (missing @ states.mT)  # of the value that the state holds for a key
        dk_later, dk_out = dk_later - self.beta * read, self.leaving * (written @ grad_states.mT)
        dk_earlier = dk_earlier + dk_score + dk_out
        dbeta = (missing * self.v).sum(-1) - (read * self.k).sum(-1)
        dbeta = dbeta + (by_system * self.decays.products(self.k, self.k)).sum(-1)
        d_total = self.q * dq + self.k * (dk_later - dk_earlier)
        d_last = (self.k * dk_out).sum(-2) + (self.through * states * grad_states).sum(-1)
        d_total = torch.cat([d_total[..., :-1, :], d_total[..., -1:, :] + d_last.unsqueeze(-2)], -2)
        return dq, dk_later + dk_earlier, self.beta * missing, d_total.flip(-2).cumsum(-2).flip(-2), dbeta
