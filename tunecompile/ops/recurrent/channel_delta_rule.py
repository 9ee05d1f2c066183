"""The delta rule with a decay for each channel of the key (Kimi Team, 2025, arXiv:2510.26692)."""

from collections.abc import Iterator
from typing import Optional

import torch
from torch import Tensor

from tunecompile import templates
from tunecompile.ir.op import Cost, op
from tunecompile.notes import Note, note
from tunecompile.ops.recurrent.channel_chunks import BLOCK, ChannelChunks
from tunecompile.ops.recurrent.delta_chunks import CHUNK, backward, backward_flops, forward, forward_flops, unit
from tunecompile.ops.recurrent.gated_delta_rule import documents_in, example, refuse

AT_ONCE = 1 << 26  #: elements of the largest intermediate value: heads are computed in groups


def _groups(q: Tensor) -> Iterator[slice]:
    """Heads that are computed at once."""
    rows, tokens, heads, keys = q.shape
    size = max(AT_ONCE // max(rows * (tokens + CHUNK) * BLOCK * keys, 1), 1)
    return (slice(begin, min(begin + size, heads)) for begin in range(0, heads, size))


def _example(draw) -> list:
    q, k, v, _, *rest = example(draw)
    return [q, k, v, -draw.normal(*q.shape, dtype=torch.float32).abs() * 0.1, *rest]


@op(cost=Cost.MATMUL, flops=forward_flops, opaque=True, example=_example)
def channel_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial: Optional[Tensor],
    offsets: Optional[Tensor],
    scale: float,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return o_t = scale q_t S_t of S_t = D_t S_{t-1} + k_t^T beta_t (v_t - k_t D_t S_{t-1}), D_t = diag(e^g_t).

    Args:
        q: [B, T, H, K], any floating dtype. Arithmetic is in fp32, in fp64 for fp64.
        k: as q in shape.
        v: [B, T, H, V].
        g: [B, T, H, K], at most 0: the logarithms of the decays of the state's rows.
        beta: [B, T, H].
        initial, offsets, scale, eps: as for `gated_delta_rule`.

    Returns:
        (o, final): [B, T, H, V] in q's dtype, and the state after the last token, [B, H, K, V] in that of the
        arithmetic.
    """
    return tuple(forward(ChannelChunks.of, _groups(q), q, k, v, g, beta, initial, offsets, scale, eps))


def _refuse(q: Tensor, k: Tensor, v: Tensor, initial: Tensor | None) -> Note | None:
    if reason := refuse(q, k, v, initial):
        return reason
    return note("registers-spill") if torch.version.hip else None  # all of AMD's, as compiled for gfx942


@channel_delta_rule.provider(
    "triton",
    refuses=_refuse,
    because="chunks in parallel, states in registers; decays of pairs are never stored",
)
def _(q, k, v, g, beta, initial, offsets, scale, eps):
    q, k = (unit(x.float(), eps).value.to(x.dtype) for x in (q, k))
    given = (x.contiguous() for x in (q, k, v, g, beta))
    return templates.recurrent.channel_rule.forward(*given, documents_in(q, offsets), scale=scale)


@channel_delta_rule.backward(
    gives=("q", "k", "v", "g", "beta", "initial"), outputs=2, flops=backward_flops, opaque=True
)
def channel_delta_rule_backward(grad, grad_final, q, k, v, g, beta, initial, offsets, scale, eps) -> list[Tensor]:
    """Return the gradients of `channel_delta_rule`. States are recomputed: they are larger than all inputs.

    Args:
        grad: of o, in its shape and dtype.
        grad_final: of the final state. The others are inputs of `channel_delta_rule`.

    Returns:
        [dq, dk, dv, dg, dbeta, dinitial], with shape and dtype of the inputs.
    """
    return backward(ChannelChunks.of, _groups(q), grad, grad_final, q, k, v, g, beta, initial, offsets, scale, eps)


@channel_delta_rule_backward.provider(
    "triton",
    refuses=_refuse,
    because="chunks in parallel, states' gradients in registers",
)
def _(grad, grad_final, q, k, v, g, beta, initial, offsets, scale, eps, *, used):
    units = [unit(x.float(), eps) for x in (q, k)]
    queries, keys = (each.value.to(q.dtype) for each in units)
    given = (x.contiguous() for x in (grad, grad_final, queries, keys, v, g, beta))
    made = templates.recurrent.channel_rule.backward(*given, documents_in(q, offsets), scale=scale)
    made[:2] = [each.gradient(dx.float()) for each, dx in zip(units, made)]
    return [*(y.to(x.dtype) for x, y in zip((q, k, v, g, beta), made)), None]
