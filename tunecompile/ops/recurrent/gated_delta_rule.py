"""The gated delta rule (Yang et al., 2024, arXiv:2412.06464): a decaying state whose value for a key is corrected."""

from typing import Optional

import torch
from torch import Tensor

from tunecompile import templates
from tunecompile._torch import known_bugs
from tunecompile._torch.card import AMPERE, compiled_for, older_than
from tunecompile.ir.op import Cost, op, refuse_gpu, refuse_spills
from tunecompile.notes import Note, note
from tunecompile.ops.recurrent.delta_chunks import ALL, Chunks, backward, backward_flops, forward, forward_flops, unit
from tunecompile.ops.recurrent.documents import document_of

LONGEST_KEY = 256  #: of the template, which holds columns of the state in registers


def example(draw) -> list:
    """Return arguments of a call on a chunk and a half."""
    q, k, v = (draw.normal(1, 96, 2, 64) for _ in range(3))
    decay, beta = (draw.normal(1, 96, 2, dtype=torch.float32) for _ in range(2))
    return [q, k, v, -decay.abs() * 0.1, beta.sigmoid().to(draw.dtype), None, None, 0.125, 1e-6]


@op(cost=Cost.MATMUL, flops=forward_flops, opaque=True, example=example)
def gated_delta_rule(
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
    """Return o_t = scale q_t S_t of S_t = e^g_t S_{t-1} + k_t^T beta_t (v_t - e^g_t k_t S_{t-1}) (arXiv:2412.06464).

    Args:
        q: [B, T, Hk, K], any floating dtype. Arithmetic is in fp32, in fp64 for fp64.
        k: as q in shape.
        v: [B, T, H, V], H a multiple of Hk: head h reads q and k of head h // (H / Hk).
        g: [B, T, H], at most 0: the logarithm of the state's decay.
        beta: [B, T, H].
        initial: the state before the first token, [B, H, K, V]; None for 0.
        offsets: int [S + 1], where documents begin and the last one ends, for B = 1 and without `initial`: each begins
            with a state of 0. None if each row is a document.
        scale: multiplies q.
        eps: where it is not 0, q and k are divided by sqrt(sum(q^2) + eps) first.

    Returns:
        (o, final): [B, T, H, V] in q's dtype, and the state after the last token, [B, H, K, V] in that of the
        arithmetic.
    """
    return tuple(forward(Chunks.of, ALL, q, k, v, g, beta, initial, offsets, scale, eps))


def refuse(q: Tensor, k: Tensor, v: Tensor, initial: Tensor | None) -> Note | None:
    """Return why the template cannot take operands like these, or None."""
    if reason := refuse_gpu(q, k, v):
        return reason
    if any(x.dtype != torch.bfloat16 for x in (q, k, v)):  # states would overflow fp16
        return note("not-bfloat16", detail=str(q.dtype).removeprefix("torch."))
    if older_than(q.device, AMPERE):
        return note("gpu-before-ampere")
    if (compiled_for(q.device) or (0, 0))[0] == 10 and (fault := known_bugs.DELTA_RULE_ON_SM_100).present:
        return note("compiler-fails", detail=str(fault))
    if reason := refuse_spills(q):
        return reason
    if initial is not None:
        return note("state-to-begin-with")
    fits = q.shape[3] % 16 == v.shape[3] % 16 == 0 and q.shape[3] <= LONGEST_KEY
    return None if fits else note("key-and-value-widths", keys=q.shape[3], values=v.shape[3], limit=LONGEST_KEY)


def documents_in(q: Tensor, offsets: Tensor | None) -> Tensor | None:
    """Return the number of each token's document, as the template reads it, for q [1, T, ...]."""
    return None if offsets is None else document_of(offsets, q.shape[1]).to(torch.int32)


@gated_delta_rule.provider(
    "triton",
    refuses=refuse,
    because="chunks in parallel, states in registers; the loop over chunks is inside a kernel",
)
def _(q, k, v, g, beta, initial, offsets, scale, eps):
    q, k = (unit(x.float(), eps).value.to(x.dtype) for x in (q, k))
    return templates.recurrent.delta_rule.forward(
        q, k, v, g.contiguous(), beta.contiguous(), offsets, documents_in(q, offsets), scale=scale
    )


@gated_delta_rule.backward(gives=("q", "k", "v", "g", "beta", "initial"), outputs=2, flops=backward_flops, opaque=True)
def gated_delta_rule_backward(grad, grad_final, q, k, v, g, beta, initial, offsets, scale, eps) -> list[Tensor]:
    """Return the gradients of `gated_delta_rule`. States are recomputed: they are larger than all inputs.

    Args:
        grad: of o, in its shape and dtype.
        grad_final: of the final state. The others are inputs of `gated_delta_rule`.

    Returns:
        [dq, dk, dv, dg, dbeta, dinitial], with shape and dtype of the inputs.
    """
    return backward(Chunks.of, ALL, grad, grad_final, q, k, v, g, beta, initial, offsets, scale, eps)


@gated_delta_rule_backward.provider(
    "triton",
    refuses=refuse,
    because="chunks in parallel, states' gradients in registers",
)
def _(grad, grad_final, q, k, v, g, beta, initial, offsets, scale, eps, *, used):
    documents, units = documents_in(q, offsets), [unit(x.float(), eps) for x in (q, k)]
    queries, keys = (each.value.to(q.dtype) for each in units)
    made = templates.recurrent.delta_rule.backward(
        *(grad, grad_final.contiguous(), queries, keys, v),
        *(g.contiguous(), beta.contiguous(), offsets, documents),
        scale=scale,
    )
    for i, (x, each) in enumerate(zip((q, k), units)):
        made[i] = each.gradient(made[i].unflatten(2, (x.shape[2], -1)).float().sum(3))
    return [*(y.to(x.dtype) for x, y in zip((q, k, v, g, beta), made)), None]
