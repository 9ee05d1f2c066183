"""The delta rule with decays of channels (arXiv:2510.26692) in chunks of 64 tokens, backward.

The forward's ``prepare`` and ``scan`` run again. Then ``scan_back`` iterates over chunks from the last to the first
with the gradient of a state in registers, and ``gradients`` computes those within all chunks at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..device import load_block, place_of, state_at
from ..operands import Operands
from .chunks import prepare, sums
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
    square = (key < K)[:, None] & (column < V)[None, :]
    at = state_at(grad_final, row, head, 0, key, column, H, K, V)
    state = tl.load(at, mask=square, other=0.0).to(tl.float32)
    for step in range(0, NT):
        chunk = NT - 1 - step
        token = chunk * C + i
        there, place = token < T, place_of(row, token, head, T, H)
        kept = state.to(k_out.dtype.element_ty)
        tl.store(state_at(states, row * NT + chunk, head, 0, key, column, H, K, V), kept, mask=square)
        narrow, broad = there[:, None] & (key < K)[None, :], there[:, None] & (column < V)[None, :]
        given = tl.load(grad + place[:, None] * V + column[None, :], mask=broad, other=0.0)
        value = tl.dot(tl.trans(load_block(scores + place[:, None] * C, 0, i, there, C)), given)
        value += tl.dot(tl.load(k_out + place[:, None] * K + key[None, :], mask=narrow, other=0.0), kept)
        value = value.to(written.dtype.element_ty)
        tl.store(written + place[:, None] * V + column[None, :], value, mask=broad)
        decay = tl.load(through + ((row * NT + chunk).to(tl.int64) * H + head) * K + key, mask=key < K, other=0.0)
        block = tl.load(q_in + place[:, None] * K + key[None, :], mask=narrow, other=0.0)
        state = decay[:, None] * state + tl.dot(tl.trans(block), given)
        state -= tl.dot(tl.trans(tl.load(w + place[:, None] * K + key[None, :], mask=narrow, other=0.0)), value)


def scan_back(call, chunks, grad_final):
    """Compute the recurrence of gradients, from the last chunk to the first.

    Args:
        call: `Operands`.
        chunks: from `prepare`.
        grad_final: [B, H, K, V], of the final state, contiguous.

    Returns:
        (gradients of new values, [B, T, H, V]; of the final state of each chunk, [B, chunks * H * K, V]).
    """
    made = call.of_tokens(call.width), call.of_chunks()
    tensors = (call.grad, grad_final, chunks.q_in, chunks.k_out, chunks.w, chunks.scores, chunks.through, *made)
    call.along_chunks(scan_back_kernel, "channel_scan_back", tensors)
    return made


def backward(grad, grad_final, q, k, v, g, beta, documents=None, *, scale):
    """The gradients of `forward`.

    Args:
        grad: of o, [B, T, H, V] in its dtype, contiguous.
        grad_final: of the final state, [B, H, K, V], any floating dtype, contiguous.
        q, k, v, g, beta, documents, scale: as given to `forward`.

    Returns:
        [dq, dk, dv, dg, dbeta], dg and dbeta in fp32.
    """
    call = Operands(q, k, v, g, beta, None, documents, scale, grad=grad)
    chunks = prepare(call, sums(call))
    states = scan(call, chunks)
    grad_written, grad_states = scan_back(call, chunks, grad_final)
    squares, missing, dv, dbeta = products(call, chunks, states.written, grad_written)
    dq, dk, dg = operands(call, chunks, states, grad_states, squares, missing, dbeta)
    return [dq, dk, dv, dg, dbeta]
