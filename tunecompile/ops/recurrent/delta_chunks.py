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

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tunecompile._torch.fake_tensors import is_fake
from tunecompile.ops.norms.rms_norm import compute_dtype
from tunecompile.ops.recurrent.documents import document_of

CHUNK = 64  #: tokens; states are as many as chunks, and products inside a chunk grow by its size
ALL = (slice(None),)  #: heads at once


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

    def gradients(
        self, grad: Tensor, states: Tensor, written: Tensor, grad_states: Tensor, grad_written: Tensor
    ) -> tuple[Tensor, ...]:
        """Gradients of the operands, from those of outputs, states and new values: (dq, dk, dv, dg, dbeta)."""
        q, k, v, beta = self.q, self.k, self.v, self.beta
        entering, leaving, through, pairs = self.entering, self.leaving, self.through, self.pairs
        missing = self.solve_transposed(grad_written)  # of r, which is weighted by beta
        to_q, to_end = grad @ states.mT, written @ grad_states.mT
        by_score = grad @ written.mT * pairs
        dq = entering * to_q + by_score @ k
        dk = leaving * to_end + by_score.mT @ q
        dbeta = (missing * v).sum(-1)
        # of running sums of log decays
        d_pairs = by_score * (q @ k.mT)
        d_end = leaving * (to_end * k).sum(-1, keepdim=True)
        d_entering = to_q * q
        if self.system is not None:
            to_k, products = missing @ states.mT, k @ k.mT
            by_system = (-missing @ written.mT).tril(-1) * pairs
            dbeta = dbeta - (entering * to_k * k).sum(-1) + (by_system * products).sum(-1)
            by_system = by_system * beta
            dk = dk - beta * entering * to_k + by_system @ k + by_system.mT @ k
            d_pairs = d_pairs + by_system * products
            d_entering = d_entering - beta * to_k * k
        d_total = d_pairs.sum(-1) - d_pairs.sum(-2)
        d_total = d_total + (entering * d_entering.sum(-1, keepdim=True) - d_end).squeeze(-1)
        d_last = d_end.sum((-1, -2)) + through.flatten(-3) * (states * grad_states).sum((-1, -2))
        d_total = torch.cat([d_total[..., :-1], d_total[..., -1:] + d_last.unsqueeze(-1)], -1)
        return dq, dk, beta * missing, d_total.flip(-1).cumsum(-1).flip(-1), dbeta


def chunks_of(
    make: Callable[..., Chunks], q, k, v, g, beta, offsets, scale: float, eps: float
) -> tuple[Chunks, Unit, Unit]:
    """Return (what `make` makes of operands in chunks and documents, q and k of length 1)."""
    heads = v.shape[2]
    documents = None if offsets is None else document_of(offsets, q.shape[1])
    unit_q, unit_k = (unit(in_chunks(x, heads), eps) for x in (q, k))
    v, g, beta = (in_chunks(x, heads) for x in (v, g, beta))
    return make(unit_q.value * scale, unit_k.value, v, g, beta, documents), unit_q, unit_k


def forward(make: Callable[..., Chunks], groups: Iterable[slice], q, k, v, g, beta, initial, *rest) -> list[Tensor]:
    """Return [o, final] of a delta rule: all chunks at once, and a loop over their states (arXiv:2406.06484).

    Args:
        make: of the chunks' values, as `Chunks.of`.
        groups: heads that are computed at once.
        q, k, v, g, beta, initial, rest: inputs of the op.
    """
    final = q.new_empty((q.shape[0], v.shape[2], q.shape[3], v.shape[3]), dtype=compute_dtype(q.dtype))
    made = torch.empty_like(v, dtype=q.dtype, memory_format=torch.contiguous_format)
    for heads in () if is_fake(q) else groups:
        chunks, _, _ = chunks_of(make, *(x[:, :, heads] for x in (q, k, v, g, beta)), *rest)
        states, written, last = chunks.walk(None if initial is None else initial[:, heads])
        value = (chunks.entering * chunks.q) @ states + chunks.scores() @ written
        made[:, :, heads], final[:, heads] = out_of_chunks(value, *v[:, :, heads].shape[1:3]), last
    return [made, final]


def backward(
    make: Callable[..., Chunks], groups: Iterable[slice], grad, grad_final, q, k, v, g, beta, initial, *rest
) -> list[Tensor]:
    """Return the gradients of `forward`: [dq, dk, dv, dg, dbeta, dinitial], in shapes and dtypes of the inputs."""
    like, scale = (q, k, v, g, beta), rest[1]
    made = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in like]
    d_initial = torch.empty_like(grad_final if initial is None else initial, memory_format=torch.contiguous_format)
    for heads in () if is_fake(q) else groups:
        chunks, unit_q, unit_k = chunks_of(make, *(x[:, :, heads] for x in like), *rest)
        incoming = in_chunks(grad[:, :, heads], chunks.q.shape[1])
        states, written, _ = chunks.walk(None if initial is None else initial[:, heads])
        grad_states, grad_written, first = chunks.walk_back(incoming, grad_final[:, heads].to(incoming.dtype))
        dq, dk, dv, dg, dbeta = chunks.gradients(incoming, states, written, grad_states, grad_written)
        for x, dx in zip(made, (unit_q.gradient(dq * scale), unit_k.gradient(dk), dv, dg, dbeta)):
            part = x[:, :, heads]
            part.copy_(out_of_chunks(dx, *part.shape[1:3]))
        d_initial[:, heads] = first
    return [*made, d_initial]
