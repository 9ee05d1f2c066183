"""The delta rule with decays of channels (arXiv:2510.26692) in chunks of 64 tokens, backward.

The forward's ``prepare`` and ``scan`` run again. Then ``scan_back`` iterates over chunks from the last to the first
with the gradient of a state in registers, and ``gradients`` computes those within all chunks at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..._launch import launch, next_power_of_2
from ..delta_rule.chunks import chunks_of
from .chunks import options_of, prepare, sums
from .forward_pass import scan
from .gradients import operands, products

__all__ = ["backward", "scan_back"]


@triton.jit
def scan_back_kernel(
    grad,
    grad_final,
    q_in,
    k_out,
    w,
    scores,
    through,
    written,
    states,
    T,
    NT,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program: BLOCK columns of the gradients `states` of one head, over a row; `written` is a gradient, too."""
    row, head = tl.program_id(0), tl.program_id(1)
    column, i, key = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, C), tl.arange(0, KEYS)
    wide, high = column < V, key < K
    square = high[:, None] & wide[None, :]
    at = (row.to(tl.int64) * H + head) * K
    state = tl.load(grad_final + (at + key[:, None]) * V + column[None, :], mask=square, other=0.0).to(tl.float32)
    for step in range(0, NT):
        chunk = NT - 1 - step
        token = chunk * C + i
        there = token < T
        place = (row.to(tl.int64) * T + token) * H + head
        at = ((row * NT + chunk).to(tl.int64) * H + head) * K
        kept = state.to(k_out.dtype.element_ty)
        tl.store(states + (at + key[:, None]) * V + column[None, :], kept, mask=square)
        narrow, broad = there[:, None] & high[None, :], there[:, None] & wide[None, :]
        given = tl.load(grad + place[:, None] * V + column[None, :], mask=broad, other=0.0)
        pairs = tl.load(scores + place[:, None] * C + i[None, :], mask=there[:, None] & (i < C)[None, :], other=0.0)
        value = tl.dot(tl.trans(pairs), given)
        value += tl.dot(tl.load(k_out + place[:, None] * K + key[None, :], mask=narrow, other=0.0), kept)
        value = value.to(written.dtype.element_ty)
        tl.store(written + place[:, None] * V + column[None, :], value, mask=broad)
        decay = tl.load(through + at + key, mask=high, other=0.0)
        block = tl.load(q_in + place[:, None] * K + key[None, :], mask=narrow, other=0.0)
        state = decay[:, None] * state + tl.dot(tl.trans(block), given)
        block = tl.load(w + place[:, None] * K + key[None, :], mask=narrow, other=0.0)
        state -= tl.dot(tl.trans(block), value)


def scan_back(chunks, grad, grad_final):
    """Compute the recurrence of gradients, from the last chunk to the first.

    Args:
        chunks: from `prepare`.
        grad: of o, [B, T, H, V] in its dtype, contiguous.
        grad_final: [B, H, K, V], of the final state, contiguous.

    Returns:
        (gradients of new values, [B, T, H, V]; of the final state of each chunk, [B, chunks * H * K, V]).
    """
    (batch, tokens, heads, width), keys = chunks.u.shape, chunks.w.shape[3]
    count = chunks_of(tokens)
    written = torch.empty_like(chunks.u)
    states = torch.empty(batch, count * heads * keys, width, dtype=written.dtype, device=written.device)
    tile, options = options_of("channel_scan_back", chunks.u, keys, V=width)
    options |= dict(KEYS=max(next_power_of_2(keys), tile.step), BLOCK=tile.block)
    tensors = (grad, grad_final, chunks.q_in, chunks.k_out, chunks.w, chunks.scores, chunks.through, written, states)
    launch(scan_back_kernel, (batch, heads, triton.cdiv(width, tile.block)), *tensors, tokens, count, **options)
    return written, states


def backward(grad, grad_final, q, k, v, g, beta, documents=None, *, scale):
    """The gradients of `forward`.

    Args:
        grad: of o, [B, T, H, V] in its dtype, contiguous.
        grad_final: of the final state, [B, H, K, V], any floating dtype, contiguous.
        q, k, v, g, beta, documents, scale: as given to `forward`.

    Returns:
        [dq, dk, dv, dg, dbeta], dg and dbeta in fp32.
    """
    chunks = prepare(q, k, v, sums(g, v), beta, documents, scale)
    states = scan(chunks)
    grad_written, grad_states = scan_back(chunks, grad, grad_final)
    squares, missing, dv, dbeta = products(grad, v, beta, documents, chunks, states.written, grad_written, scale)
    dq, dk, dg = operands(grad, q, k, beta, documents, chunks, states, grad_states, squares, missing, dbeta, scale)
    return [dq, dk, dv, dg, dbeta]
