"""Selective state spaces with a decay for each channel and state (Gu & Dao, 2023, arXiv:2312.00752): Mamba-1's scan."""

from collections.abc import Iterator
from typing import Any, Optional

import torch
from torch import Tensor

from tunecompile import templates
from tunecompile._torch.card import has_bfloat16
from tunecompile._torch.fake_tensors import is_fake
from tunecompile.ir.op import Cost, has_triton, op
from tunecompile.ir.pretend_gpu import on_gpu
from tunecompile.notes import Note, note
from tunecompile.ops.norms.rms_norm import compute_dtype
from tunecompile.ops.recurrent.gated_delta_rule import documents_in
from tunecompile.ops.recurrent.scan_chunks import CHUNK, ScanChunks, in_chunks, kept_at

MOST_STATES = 64  #: of a channel, which the template holds in registers
AT_ONCE = 1 << 26  #: states of tokens that are held at once: channels are computed in groups


def forward_flops(x, dt, a, *_: Any) -> int:
    """Count a decay, an addition and a product with c for each state of each token, twice."""
    return 2 * 6 * x.numel() * a.shape[1]


def backward_flops(grad, grad_final, x, dt, a, *_: Any) -> int:
    """Count the forward's, and the same backward, with the gradients' products."""
    return 3 * forward_flops(x, dt, a)


def _groups(x: Tensor, states: int) -> Iterator[slice]:
    """Channels that are computed at once."""
    rows, tokens, channels = x.shape
    size = max(AT_ONCE // max(rows * (tokens + CHUNK) * states, 1), 1)
    return (slice(begin, min(begin + size, channels)) for begin in range(0, channels, size))


def _of_tokens(x: Tensor, tokens: int) -> Tensor:
    """[B, M, CHUNK, ...] -> [B, T, ...]."""
    return x.flatten(1, 2)[:, :tokens]


def _example(draw) -> list:
    """Two chunks and a half; more channels than one block of a program."""
    x, b, c = draw.normal(1, 80, 12), draw.normal(1, 80, 4), draw.normal(1, 80, 4)
    dt, a = draw.normal(1, 80, 12).abs(), draw.normal(12, 4, dtype=torch.float32)
    return [x, dt, -a.abs(), b, c, None, None]


@op(cost=Cost.MATMUL, flops=forward_flops, opaque=True, example=_example)
def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    initial: Optional[Tensor],
    offsets: Optional[Tensor],
) -> tuple[Tensor, Tensor]:
    """Return y_td = sum_n c_tn S_tdn of S_tdn = e^(dt_td a_dn) S_(t-1)dn + dt_td x_td b_tn (arXiv:2312.00752).

    Args:
        x: [B, T, D], any floating dtype. Arithmetic is in fp32, in fp64 for fp64.
        dt: [B, T, D], at least 0.
        a: [D, N], at most 0.
        b: [B, T, N].
        c: [B, T, N].
        initial: the state before the first token, [B, D, N]; None for 0.
        offsets: as for `gated_delta_rule`.

    Returns:
        (y, final): [B, T, D] in x's dtype, and the state after the last token, [B, D, N] in that of the arithmetic.
    """
    wide, tokens = compute_dtype(x.dtype), x.shape[1]
    made = torch.empty_like(x, memory_format=torch.contiguous_format)
    final = x.new_empty((x.shape[0], *a.shape), dtype=wide)
    if is_fake(x):
        return made, final
    kept = kept_at(offsets, tokens, wide)
    for d in _groups(x, a.shape[1]):
        chunks = ScanChunks.of(x[..., d], dt[..., d], a[d], b, c, kept, wide)
        states, final[:, d] = chunks.entering(None if initial is None else initial[:, d])
        made[..., d] = _of_tokens(chunks.outputs(states), tokens)
    return made, final


def _refuse(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, initial: Tensor | None) -> Note | None:
    if not all(map(on_gpu, (x, dt, a, b, c))):
        return note("not-on-gpu")
    if not has_triton():
        return note("no-triton")
    if x.dtype == torch.float64:  # as the references of tests are
        return note("not-half-precision", detail="float64")
    if x.dtype == torch.bfloat16 and not has_bfloat16(x.device):
        return note("gpu-without-bfloat16")
    if initial is not None:
        return note("state-to-begin-with")
    return None if a.shape[1] <= MOST_STATES else note("states-of-a-channel", states=a.shape[1], limit=MOST_STATES)


@selective_scan.provider(
    "triton",
    refuses=_refuse,
    because="chunks in parallel, states in registers: none of a token lies in memory",
)
def _(x, dt, a, b, c, initial, offsets):
    return templates.recurrent.selective_scan.forward(
        *(t.contiguous() for t in (x, dt, a, b, c)), documents_in(x, offsets)
    )


@selective_scan.backward(gives=("x", "dt", "a", "b", "c", "initial"), outputs=2, flops=backward_flops, opaque=True)
def selective_scan_backward(grad, grad_final, x, dt, a, b, c, initial, offsets) -> list[Tensor]:
    """Return the gradients of `selective_scan`. States are recomputed: those of all tokens are N times an input.

    Args:
        grad: of y, in its shape and dtype.
        grad_final: of the final state. The others are inputs of `selective_scan`.

    Returns:
        [dx, ddt, da, db, dc, dinitial], with shape and dtype of the inputs.
    """
    wide, tokens = compute_dtype(x.dtype), x.shape[1]
    dx, ddt, da = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, dt, a))
    d_initial = torch.empty_like(grad_final if initial is None else initial, memory_format=torch.contiguous_format)
    db, dc = (torch.zeros_like(t, dtype=wide, memory_format=torch.contiguous_format) for t in (b, c))
    if is_fake(x):
        return [dx, ddt, da, db.to(b.dtype), dc.to(c.dtype), d_initial]
    kept = kept_at(offsets, tokens, wide)
    for d in _groups(x, a.shape[1]):
        chunks = ScanChunks.of(x[..., d], dt[..., d], a[d], b, c, kept, wide)
        given = in_chunks(grad[..., d].to(wide))
        entering, _ = chunks.entering(None if initial is None else initial[:, d])
        leaving, first = chunks.leaving(given, grad_final[:, d].to(wide))
        of_x, of_dt, of_a, of_b, of_c = chunks.gradients(given, entering, leaving)
        dx[..., d], ddt[..., d], da[d] = _of_tokens(of_x, tokens), _of_tokens(of_dt, tokens), of_a
        db, dc, d_initial[:, d] = db + _of_tokens(of_b, tokens), dc + _of_tokens(of_c, tokens), first
    return [dx, ddt, da, db.to(b.dtype), dc.to(c.dtype), d_initial]


@selective_scan_backward.provider(
    "triton",
    refuses=_refuse,
    because="chunks in parallel, states and their gradients in registers",
)
def _(grad, grad_final, x, dt, a, b, c, initial, offsets, *, used):
    given = (t.contiguous() for t in (grad, grad_final, x, dt, a, b, c))
    made = templates.recurrent.selective_scan.backward(*given, documents_in(x, offsets), with_a=used[2])
    return [*(y if y is None else y.to(t.dtype) for t, y in zip((x, dt, a, b, c), made)), None]
