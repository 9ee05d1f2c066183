"""Rotary position embedding of q and k in one launch, and its backward, on any [B, H, T, D] strides.

RoPE (https://arxiv.org/abs/2104.09864) in the rotate-half form: ``y = x * cos + cat(-x2, x1) * sin`` over the first
``rot`` of D dimensions, the others copied. q and k may be views of the fused projection [B, T, (Hq + Hk + Hv) * D]; the
backward pass can write the gradient of that buffer, v's part copied in, which saves a concatenation.

The backward rotation is the forward one with sin negated when both halves of sin are equal. They are in every model known
to us, but the kernel uses the transposed rotation, which needs no such promise.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import _tiles
from ._launch import launch, next_power_of_2


@triton.jit
def _rotate_heads(x, out, head, heads, x_stride, cos1, cos2, sin1, sin2,
                  D: tl.constexpr, ROT: tl.constexpr, HALF_POW2: tl.constexpr, REST_POW2: tl.constexpr,
                  BACKWARD: tl.constexpr, ROTATE: tl.constexpr):
    """Rotate (or copy) heads ``head`` of one token; x and out point at the token's head 0."""
    HALF: tl.constexpr = ROT // 2
    valid = (head < heads)[:, None]
    source = head.to(tl.int64)[:, None] * x_stride
    target = (head * D)[:, None]
    column = tl.arange(0, HALF_POW2)[None, :]
    mask = valid & (column < HALF)
    x1 = tl.load(x + source + column, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(x + source + HALF + column, mask=mask, other=0.0).to(tl.float32)
    y1, y2 = x1, x2
    if ROTATE:
        if BACKWARD:
            y1 = x1 * cos1 + x2 * sin2
            y2 = x2 * cos2 - x1 * sin1
        else:
            y1 = x1 * cos1 - x2 * sin1
            y2 = x2 * cos2 + x1 * sin2
    tl.store(out + target + column, y1.to(out.dtype.element_ty), mask=mask)
    tl.store(out + target + HALF + column, y2.to(out.dtype.element_ty), mask=mask)
    if ROT < D:
        rest = ROT + tl.arange(0, REST_POW2)[None, :]
        inside = valid & (rest < D)
        tl.store(out + target + rest, tl.load(x + source + rest, mask=inside), mask=inside)


@triton.jit
def rope_kernel(
    q, k, v, q_out, k_out, cos, sin,
    length, q_heads, k_heads, v_heads,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t,
    cos_b, cos_t, sin_b, sin_t,
    D: tl.constexpr, ROT: tl.constexpr, HALF_POW2: tl.constexpr, REST_POW2: tl.constexpr,
    BACKWARD: tl.constexpr,
    JOINED: tl.constexpr,  # one output [token, q | k | v, D] in q_out; else q_out and k_out, [token, head, D], and no v
    HEADS: tl.constexpr,
):
    """Program (token, group of HEADS heads): q's groups, then k's, then v's."""
    token = tl.program_id(0).to(tl.int64)
    batch = (tl.program_id(0) // length).to(tl.int64)
    time = (tl.program_id(0) % length).to(tl.int64)
    group = tl.program_id(1)
    q_groups = tl.cdiv(q_heads, HEADS)
    k_groups = tl.cdiv(k_heads, HEADS)
    column = tl.arange(0, HALF_POW2)[None, :]
    mask = column < ROT // 2
    cos += batch * cos_b + time * cos_t
    sin += batch * sin_b + time * sin_t
    cos1 = tl.load(cos + column, mask=mask, other=0.0).to(tl.float32)
    cos2 = tl.load(cos + ROT // 2 + column, mask=mask, other=0.0).to(tl.float32)
    sin1 = tl.load(sin + column, mask=mask, other=0.0).to(tl.float32)
    sin2 = tl.load(sin + ROT // 2 + column, mask=mask, other=0.0).to(tl.float32)
    if JOINED:  # one pointer argument: a functionalised launch clones every tensor that it writes
        q_out += token * (q_heads + k_heads + v_heads) * D
        k_out = q_out + q_heads * D
        v_out = k_out + k_heads * D
    else:
        q_out += token * q_heads * D
        k_out += token * k_heads * D
    head = tl.arange(0, HEADS)
    if group < q_groups:
        _rotate_heads(q + batch * q_b + time * q_t, q_out, group * HEADS + head, q_heads, q_h,
                      cos1, cos2, sin1, sin2, D, ROT, HALF_POW2, REST_POW2, BACKWARD, True)
    elif group < q_groups + k_groups:
        _rotate_heads(k + batch * k_b + time * k_t, k_out, (group - q_groups) * HEADS + head, k_heads, k_h,
                      cos1, cos2, sin1, sin2, D, ROT, HALF_POW2, REST_POW2, BACKWARD, True)
    elif JOINED:
        _rotate_heads(v + batch * v_b + time * v_t, v_out, (group - q_groups - k_groups) * HEADS + head, v_heads, v_h,
                      cos1, cos2, sin1, sin2, D, ROT, HALF_POW2, REST_POW2, BACKWARD, False)


def _start(q, k, v, q_out, k_out, cos, sin, backward, tile):
    batch, q_heads, length, d = q.shape
    cos, sin = (t.unsqueeze(0) if t.dim() == 2 else t for t in (cos, sin))
    rot = cos.shape[-1]
    if rot > d or rot % 2 or sin.shape != cos.shape or cos.shape[1] != length or cos.stride(-1) != 1 or sin.stride(-1) != 1:
        raise ValueError(f"cos {tuple(cos.shape)}, sin {tuple(sin.shape)} for q {tuple(q.shape)}")
    tile = tile or _tiles.pick("rope", q, d)
    k_heads, v_heads = k.shape[1], 0 if v is None else v.shape[1]
    groups = sum(triton.cdiv(h, tile.rows) for h in (q_heads, k_heads, v_heads))
    launch(
        rope_kernel, (batch * length, groups),
        q, k, v, q_out, k_out, cos, sin, length, q_heads, k_heads, v_heads,
        *q.stride()[:3], *k.stride()[:3], *((0, 0, 0) if v is None else v.stride()[:3]),
        0 if cos.shape[0] == 1 else cos.stride(0), cos.stride(1), 0 if sin.shape[0] == 1 else sin.stride(0), sin.stride(1),
        D=d, ROT=rot, HALF_POW2=next_power_of_2(rot // 2), REST_POW2=next_power_of_2(d - rot), BACKWARD=backward,
        JOINED=v is not None, HEADS=tile.rows, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )


def _unit_stride(t):
    return t if t.stride(-1) == 1 else t.contiguous()


def _separate(q, k, cos, sin, backward, tile):
    """Outputs laid out as [B, T, H, D], the layout of the projections and of attention's fast path, seen as [B, H, T, D]."""
    out = [torch.empty((t.shape[0], t.shape[2], t.shape[1], t.shape[3]), dtype=t.dtype, device=t.device) for t in (q, k)]
    _start(q, k, None, *out, cos, sin, backward, tile)
    return out[0].transpose(1, 2), out[1].transpose(1, 2)


def forward(q, k, cos, sin, *, tile=None):
    """(q, k) rotated, new [B, H, T, D] tensors laid out as [B, T, H, D].

    q: [B, Hq, T, D], k: [B, Hk, T, D]: any strides but a unit last one. cos, sin: [T, rot] or [1 or B, T, rot] of any float
    dtype, rot <= D even. All arithmetic in fp32, one rounding.
    """
    return _separate(_unit_stride(q), _unit_stride(k), cos, sin, False, tile)


def backward(dq, dk, cos, sin, *, dv=None, tile=None):
    """Gradients of q and k as ``forward`` lays them out; with ``dv`` [B, Hv, T, D] instead the gradient of the fused
    projection, [B, T, (Hq + Hk + Hv) * D], dv copied behind the other two.
    """
    dq, dk = _unit_stride(dq), _unit_stride(dk)
    if dv is None:
        return _separate(dq, dk, cos, sin, True, tile)
    batch, q_heads, length, d = dq.shape
    fused = torch.empty((batch, length, (q_heads + dk.shape[1] + dv.shape[1]) * d), dtype=dq.dtype, device=dq.device)
    _start(dq, dk, _unit_stride(dv), fused, None, cos, sin, True, tile)
    return fused
