"""The gated delta rule in chunks of tokens: the computation within chunks, and the recurrence of states between them.

Within a chunk (arXiv:2412.06464, 2406.06484), with G the running sum of log decays and S the state that enters it:

    D_ij = e^(G_i - G_j) for j <= i        A = strict lower part of (beta_i k_i . k_j D_ij)       T = (I + A)^-1
    r = beta (v - e^G k S)                 n = T r                                                new values
    o = e^G q S + ((q_i . k_j) D_ij) n     S' = e^(G_last) S + (e^(G_last - G) k)^T n

Without the delta, as in state spaces (arXiv:2405.21060), T is I and n = beta v.

At the first token of a document the state is 0, and no earlier token is seen: D, and the three decays to and from the
edges of a chunk, are 0 across documents. So chunks do not depend on documents, and no size depends on values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tunecompile.ops.norms.rms_norm import compute_dtype
from tunecompile.ops.recurrent.documents import document_of

CHUNK = 64  #: tokens; states are as many as chunks, and products inside a chunk grow by its size
_Made = TypeVar("_Made")


def forward_flops(q, k, v, *_: Any) -> int:
    """Count the products of a chunk of a delta rule: three between its tokens, and three with the state."""
    keys, values = q.shape[-1], v.shape[-1]
    return 2 * v.numel() // values * (CHUNK * (2 * keys + 2 * values) + 3 * keys * values)


def backward_flops(grad, grad_final, q, k, v, *_: Any) -> int:
    """Count the forward's products again, and two for each of them."""
    return 3 * forward_flops(q, k, v)


@dataclass(frozen=True)
class Unit:
    """Rows normalised to length 1, and the values that their gradient needs."""

    value: Tensor
    inverse: Tensor | None  #: 1 / length; None if rows are not normalised

    def gradient(self, grad: Tensor) -> Tensor:
        """Return the gradient of the original rows from that of the normalised rows."""
        if self.inverse is None:
            return grad
        return self.inverse * (grad - self.value * (grad * self.value).sum(-1, keepdim=True))


def unit(x: Tensor, eps: float) -> Unit:
    """x / sqrt(sum(x^2) + eps) over the last dimension; x itself if eps is 0."""
    if not eps:
        return Unit(x, None)
    inverse = torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
    return Unit(x * inverse, inverse)


def in_chunks(x: Tensor, heads: int) -> Tensor:
    """[B, T, H', ...] -> [B, heads, M, CHUNK, ...] in the dtype of the arithmetic, 0 after T; shared heads repeated."""
    x = x.to(compute_dtype(x.dtype)).transpose(1, 2)
    if x.shape[1] != heads:
        x = x.repeat_interleave(heads // x.shape[1], 1)
    missing = -x.shape[2] % CHUNK
    x = F.pad(x, (0, 0) * (x.dim() - 3) + (0, missing))
    return x.unflatten(2, (-1, CHUNK))


def out_of_chunks(x: Tensor, tokens: int, heads: int) -> Tensor:
    """[B, H, M, CHUNK, ...] -> [B, tokens, heads, ...]: gradients of a shared head are summed."""
    x = x.flatten(2, 3)[:, :, :tokens]
    if x.shape[1] != heads:
        x = x.unflatten(1, (heads, -1)).sum(2)
    return x.transpose(1, 2)


def seen(documents: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What is in one document with what, by chunk.

    Args:
        documents: the number of each token's document, [T]; None if each row is one.

    Returns:
        Whether token i sees token j, [M, C, C] or [C, C]; and whether a token sees the state that enters its chunk, the
        chunk's end sees the token, and the chunk's end sees the state that enters: [M, C], [M, C], [M, 1], or [].
    """
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=device).tril()
    if documents is None:
        all_of_them = torch.ones((), dtype=torch.bool, device=device)
        return lower, all_of_them, all_of_them, all_of_them
    behind = documents[-1:].repeat(-len(documents) % CHUNK)  # padding tokens do not change the last state
    number = torch.cat([documents, behind]).unflatten(0, (-1, CHUNK))
    lower = lower & (number[:, :, None] == number[:, None, :])
    before = F.pad(number[:-1, -1], (1, 0), value=-1)
    enters, leaves = number == before[:, None], number == number[:, -1:]
    return lower, enters, leaves, enters[:, -1:]


@dataclass(frozen=True)
class Chunks:
    """The values of all chunks: [B, H, M, C, ...]."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor  #: [B, H, M, C, 1], as the decays below (of which there is one for each channel in `ChannelChunks`)
    pairs: Tensor  #: D, [B, H, M, C, C]
    entering: Tensor  #: decay from the chunk's beginning to each token
    leaving: Tensor  #: decay from each token to the chunk's end
    through: Tensor  #: decay over the whole chunk: [B, H, M, 1, 1]
    system: Tensor | None  #: I + A; None without the delta

    @staticmethod
    def of(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, documents: Tensor | None, delta: bool = True
    ) -> Chunks:
        """Compute them from operands in chunks.

        Args:
            delta: whether the value that the state holds for a key is subtracted from the new value.
            documents: the number of each token's document, [T]; None if each row is one.
        """
        total = g.cumsum(-1)
        lower, enters, leaves, passes = seen(documents, q.device)
        pairs = torch.where(lower, total.unsqueeze(-1) - total.unsqueeze(-2), -torch.inf).exp()
        last = total[..., -1:]
        entering, leaving, through = (
            torch.where(seen, decay.exp(), 0).unsqueeze(-1)
            for seen, decay in ((enters, total), (leaves, last - total), (passes, last))
        )
        beta = beta.unsqueeze(-1)
        system = None
        if delta:
            system = (beta * (k @ k.mT) * pairs).tril(-1) + torch.eye(CHUNK, dtype=q.dtype, device=q.device)
        return Chunks(q, k, v, beta, pairs, entering, leaving, through, system)

    def solve(self, x: Tensor) -> Tensor:
        """T x."""
        if self.system is None:
            return x
        return torch.linalg.solve_triangular(self.system, x, upper=False, unitriangular=True)

    def solve_transposed(self, x: Tensor) -> Tensor:
        """T^T x."""
        if self.system is None:
            return x
        return torch.linalg.solve_triangular(self.system.mT, x, upper=True, unitriangular=True)

    def scores(self) -> Tensor:
        """(q_i . k_j) D_ij."""
        return (self.q @ self.k.mT) * self.pairs

    def walk(self, initial: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """The initial state of each chunk, [B, H, M, K, V]; the new values n; and the state after the last chunk.

        Args:
            initial: [B, H, K, V], or None for 0.
        """
        u, w = self.solve(self.beta * self.v), self.solve(self.beta * self.entering * self.k)
        keys = (self.leaving * self.k).mT
        state = u.new_zeros(*u.shape[:2], w.shape[-1], u.shape[-1]) if initial is None else initial.to(u.dtype)
        states, written = [], []
        for m in range(u.shape[2]):
            states.append(state)
            written.append(u[:, :, m] if self.system is None else u[:, :, m] - w[:, :, m] @ state)
            state = self.through[:, :, m] * state + keys[:, :, m] @ written[-1]
        if not states:
            return u.new_zeros(*u.shape[:3], w.shape[-1], u.shape[-1]), u, state
        return torch.stack(states, 2), torch.stack(written, 2), state

    def walk_back(self, grad: Tensor, grad_final: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the final state of each chunk, [B, H, M, K, V]; of the new values n; and of the initial state.

        Args:
            grad: of the outputs, in chunks.
            grad_final: of the state after the last chunk.
        """
        inside = self.scores().mT @ grad
        w, keys = self.solve(self.beta * self.entering * self.k).mT, self.leaving * self.k
        queries, state = (self.entering * self.q).mT, grad_final
        states, written = [], []
        for m in reversed(range(grad.shape[2])):
            states.append(state)
            written.append(inside[:, :, m] + keys[:, :, m] @ state)
            state = self.through[:, :, m] * state + queries[:, :, m] @ grad[:, :, m]
            if self.system is not None:
                state = state - w[:, :, m] @ written[-1]
        if not states:
            return grad_final.new_zeros(*grad.shape[:3], *grad_final.shape[2:]), inside, state
        return torch.stack(states[::-1], 2), torch.stack(written[::-1], 2), state


def chunks_of(
    make: Callable[..., _Made], q, k, v, g, beta, offsets, scale: float, eps: float
) -> tuple[_Made, Unit, Unit]:
    """Return (what `make` makes of operands in chunks and documents, q and k of length 1)."""
    heads = v.shape[2]
    documents = None if offsets is None else document_of(offsets, q.shape[1])
    unit_q, unit_k = (unit(in_chunks(x, heads), eps) for x in (q, k))
    v, g, beta = (in_chunks(x, heads) for x in (v, g, beta))
    return make(unit_q.value * scale, unit_k.value, v, g, beta, documents), unit_q, unit_k
