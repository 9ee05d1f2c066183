"""Selective state spaces with one decay a head (Dao & Gu, 2024, arXiv:2405.21060): Mamba-2's scan."""

from functools import partial
from typing import Any, Optional

import torch
from torch import Tensor

from tunecompile import templates
from tunecompile.ir.op import Cost, op
from tunecompile.notes import Note
from tunecompile.ops.recurrent.delta_chunks import ALL, CHUNK, Chunks, backward, forward
from tunecompile.ops.recurrent.gated_delta_rule import documents_in, refuse

_CHUNKS = partial(Chunks.of, delta=False)


def forward_flops(c, b, x, *_: Any) -> int:
    """Count the products of a chunk: two between its tokens, and two with the state."""
    keys, values = c.shape[-1], x.shape[-1]
    return 2 * x.numel() // values * (CHUNK * (keys + values) + 2 * keys * values)


def backward_flops(grad, grad_final, c, b, x, *_: Any) -> int:
    """Count the forward's products again, and two for each of them."""
    return 3 * forward_flops(c, b, x)


def _example(draw) -> list:
    """A chunk and a half, and two heads that share keys."""
    c, b, x = draw.normal(1, 96, 1, 64), draw.normal(1, 96, 1, 64, scale=0.1), draw.normal(1, 96, 2, 64)
    decay, dt = (draw.normal(1, 96, 2, dtype=torch.float32).abs() for _ in range(2))
    return [c, b, x, -decay * 0.1, dt, None, None]


@op(cost=Cost.MATMUL, flops=forward_flops, opaque=True, example=_example)
def ssd_scan(
    c: Tensor,
    b: Tensor,
    x: Tensor,
    g: Tensor,
    dt: Tensor,
    initial: Optional[Tensor],
    offsets: Optional[Tensor],
) -> tuple[Tensor, Tensor]:
    """Return y_t = c_t S_t of S_t = e^g_t S_{t-1} + b_t^T dt_t x_t (arXiv:2405.21060).

    Args:
        c: [B, T, G, N], any floating dtype. Arithmetic is in fp32, in fp64 for fp64.
        b: as c in shape.
        x: [B, T, H, P], H a multiple of G: head h reads c and b of group h // (H / G).
        g: [B, T, H], at most 0: the logarithm of the state's decay.
        dt: [B, T, H].
        initial: the state before the first token, [B, H, N, P]; None for 0.
        offsets: as for `gated_delta_rule`.

    Returns:
        (y, final): [B, T, H, P] in c's dtype, and the state after the last token, [B, H, N, P] in that of the
        arithmetic.
    """
    return tuple(forward(_CHUNKS, ALL, c, b, x, g, dt, initial, offsets, 1.0, 0.0))


def _refuse(c: Tensor, b: Tensor, x: Tensor, initial: Tensor | None) -> Note | None:
    return refuse(c, b, x, initial)


@ssd_scan.provider(
    "triton",
    refuses=_refuse,
    because="chunks in parallel, states in registers",
)
def _(c, b, x, g, dt, initial, offsets):
    documents = documents_in(c, offsets)
    return templates.recurrent.delta_rule.forward(
        c, b, x, g.contiguous(), dt.contiguous(), offsets, documents, scale=1.0, delta=False
    )


@ssd_scan.backward(gives=("c", "b", "x", "g", "dt", "initial"), outputs=2, flops=backward_flops, opaque=True)
def ssd_scan_backward(grad, grad_final, c, b, x, g, dt, initial, offsets) -> list[Tensor]:
    """Return the gradients of `ssd_scan`; states are recomputed.

    Args:
        grad: of y, in its shape and dtype.
        grad_final: of the final state. The others are inputs of `ssd_scan`.

    Returns:
        [dc, db, dx, dg, ddt, dinitial], with shape and dtype of the inputs.
    """
    return backward(_CHUNKS, ALL, grad, grad_final, c, b, x, g, dt, initial, offsets, 1.0, 0.0)


@ssd_scan_backward.provider(
    "triton",
    refuses=_refuse,
    because="chunks in parallel, states' gradients in registers",
)
def _(grad, grad_final, c, b, x, g, dt, initial, offsets, *, used):
    made = templates.recurrent.delta_rule.backward(
        *(grad, grad_final.contiguous(), c, b, x),
        *(g.contiguous(), dt.contiguous(), offsets),
        documents_in(c, offsets),
        **dict(scale=1.0, delta=False),
    )
    for i, groups in ((0, c.shape[2]), (1, b.shape[2])):
        made[i] = made[i].unflatten(2, (groups, -1)).to(torch.float32).sum(3)
    return [*(y.to(like.dtype) for like, y in zip((c, b, x, g, dt), made)), None]
