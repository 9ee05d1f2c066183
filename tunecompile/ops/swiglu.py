"""Gated linear units (Shazeer, 2020, arXiv:2002.05202): SwiGLU, GeGLU, and the clamped gate of gpt-oss."""

import struct

import torch
import torch.nn.functional as F
from torch import Tensor

from tunecompile import templates
from tunecompile._torch.autograd import CLAMP_CUTS_AT_LIMIT
from tunecompile.ir.op import Cost, op, refuse_gpu
from tunecompile.ir.shape_rule_cache import are_contiguous, contiguous_like
from tunecompile.notes import Note, note
from tunecompile.ops.norms.rms_norm import compute_dtype

__all__ = [
    "clamped_gate",
    "clamped_gate_backward",
    "gated_activation",
    "gated_activation_backward",
    "weighted_gate",
    "weighted_gate_backward",
]

GELU_TANH = (0.7978845608028654, 0.044715)  #: sqrt(2 / pi) and the cubic term of the tanh approximation


def _shapes(gate: Tensor, up: Tensor, activation: str) -> Tensor | None:
    dtype = torch.promote_types(gate.dtype, up.dtype)
    return gate.new_empty(gate.shape, dtype=dtype) if are_contiguous(gate, up) else None


@op(cost=Cost.POINTWISE, shapes=_shapes, example=lambda draw: [draw.hidden(), draw.hidden(), "silu"])
def gated_activation(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Return activation(gate) * up, elementwise; the activation is not rounded before the product (arXiv:2002.05202).

    Args:
        gate: [..., F], any floating dtype. Arithmetic is in fp32, in fp64 for fp64.
        up: as gate in shape.
        activation: "silu" (SwiGLU), "gelu" (by erf) or "gelu_tanh" (its approximation; both Hendrycks & Gimpel, 2016,
            arXiv:1606.08415).

    Returns:
        [..., F], in the dtype that gate and up promote to.
    """
    wide = gate.to(compute_dtype(gate.dtype))
    if activation == "silu":
        value = F.silu(wide)
    else:
        value = F.gelu(wide, approximate="tanh" if activation == "gelu_tanh" else "none")
    return (value * up).to(torch.promote_types(gate.dtype, up.dtype))


@gated_activation.backward(
    gives=("gate", "up"),
    shapes=lambda grad, gate, up, _: contiguous_like(gate, up) if are_contiguous(grad, gate, up) else None,
)
def gated_activation_backward(grad, gate, up, activation) -> list[Tensor]:
    """The gradients of `gated_activation`; the activation is recomputed.

    Args:
        grad: of the result, [..., F] in its dtype. The others are those of `gated_activation`.

    Returns:
        [dgate, dup], in shape and dtype of gate and up.
    """
    x = gate.to(compute_dtype(gate.dtype))
    if activation == "silu":
        sigmoid = torch.sigmoid(x)
        value, slope = x * sigmoid, sigmoid * (1 + x * (1 - sigmoid))
    elif activation == "gelu":
        cdf = 0.5 * (1 + torch.erf(x * 0.7071067811865476))
        value, slope = x * cdf, cdf + x * torch.exp(-0.5 * x * x) * 0.3989422804014327
    else:
        root, cubic = GELU_TANH
        t = torch.tanh(root * (x + cubic * x * x * x))
        value = 0.5 * x * (1 + t)
        slope = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * root * (1 + 3 * cubic * x * x)
    wide = grad.to(x.dtype)
    return [(wide * up * slope).to(gate.dtype), (wide * value).to(up.dtype)]


def _refuse(grad: Tensor, gate: Tensor, up: Tensor, activation: str) -> Note | None:
    if reason := refuse_gpu(grad, gate, up):
        return reason
    if not gate.dtype == up.dtype == grad.dtype:
        return note("dtypes-differ", "gate, up and the gradient")
    if activation == "gelu":
        return note("activation-not-supported", detail=activation)
    contiguous = grad.stride(-1) == gate.stride(-1) == up.stride(-1) == 1
    return None if contiguous else note("row-not-contiguous")


@gated_activation_backward.provider(
    "triton",
    refuses=_refuse,
    because="both gradients in one buffer, which is the fused projection's gradient: "
    "0.29 ms, Inductor's concatenation 0.38 (8192x14336 bf16, H200)",
)
def _(grad, gate, up, activation):
    return list(templates.swiglu.backward(grad, gate, up, activation))


@op(cost=Cost.POINTWISE, example=lambda draw: [draw.hidden(), draw.hidden(), draw.normal(draw.rows, 1), "silu"])
def weighted_gate(gate: Tensor, up: Tensor, weights: Tensor, activation: str) -> Tensor:
    """Return activation(gate) * up * weights, of rows that have a weight each, rounded once (arXiv:2101.03961).

    Args:
        gate: [S, F], any floating dtype. Arithmetic is in fp32, in fp64 for fp64.
        up: as gate in shape and dtype.
        weights: [S, 1], any floating dtype.
        activation: as for `gated_activation`.

    Returns:
        [S, F] in gate's dtype.
    """
    wide = gate.to(compute_dtype(gate.dtype))
    return (gated_activation.reference(wide, up, activation) * weights).to(gate.dtype)


@weighted_gate.backward(gives=("gate", "up", "weights"))
def weighted_gate_backward(grad, gate, up, weights, activation) -> list[Tensor]:
    """The gradients of `weighted_gate`; the activation is recomputed.

    Args:
        grad: of the result, [S, F] in its dtype. The others are those of `weighted_gate`.

    Returns:
        [dgate, dup, dweights], in shape and dtype of gate, up and weights.
    """
    wide = grad.to(compute_dtype(gate.dtype))
    d_gate, d_up = gated_activation_backward.reference(wide * weights, gate, up, activation)
    product = gated_activation.reference(gate.to(wide.dtype), up, activation)
    return [d_gate, d_up, (wide * product).sum(-1, keepdim=True).to(weights.dtype)]


@weighted_gate_backward.provider(
    "triton",
    refuses=_refuse,
    because="the three gradients in one pass, those of gate and up in one buffer",
)
def _(grad, gate, up, weights, activation):
    return list(templates.swiglu.weighted_backward(grad, gate, up, weights, activation))


@op(cost=Cost.POINTWISE, example=lambda draw: [draw.normal(draw.rows, 2 * draw.width), 1.702, 7.0])
def clamped_gate(both: Tensor, alpha: float, limit: float) -> Tensor:
    """Return g sigmoid(alpha g) (u + 1) with g and u clamped, gate and up interleaved (arXiv:2508.10925).

    Args:
        both: [..., 2F], any floating dtype: g at even columns, u at odd ones. Arithmetic is in fp32, in fp64 for fp64.
        alpha: factor inside the sigmoid.
        limit: g is at most this, u lies between -limit and limit.

    Returns:
        [..., F] in both's dtype, rounded once.
    """
    gate, up = both.to(compute_dtype(both.dtype)).unflatten(-1, (-1, 2)).unbind(-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * torch.sigmoid(alpha * gate) * (up + 1)).to(both.dtype)


@clamped_gate.backward(gives=("both",))
def clamped_gate_backward(grad, both, alpha, limit) -> list[Tensor]:
    """The gradient of `clamped_gate`; clamped values get none, and those that equal a limit what torch's `clamp` gives.

    Args:
        grad: of the result, [..., F] in its dtype. The others are those of `clamped_gate`.

    Returns:
        [dboth], in shape and dtype of both.
    """
    gate, up = both.to(compute_dtype(both.dtype)).unflatten(-1, (-1, 2)).unbind(-1)
    inside = torch.lt if CLAMP_CUTS_AT_LIMIT else torch.le
    gate_inside, up_inside = inside(gate, limit), inside(up.abs(), limit)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    sigmoid, wide = torch.sigmoid(alpha * gate), grad.to(gate.dtype)
    d_gate = wide * (up + 1) * sigmoid * (1 + alpha * gate * (1 - sigmoid))
    d_up = wide * gate * sigmoid
    pairs = torch.stack([torch.where(gate_inside, d_gate, 0), torch.where(up_inside, d_up, 0)], -1)
    return [pairs.flatten(-2).to(both.dtype)]


def _refuse_clamped(both: Tensor) -> Note | None:
    if reason := refuse_gpu(both):
        return reason
    return None if both.is_contiguous() else note("row-not-contiguous")


@clamped_gate.provider(
    "triton", refuses=_refuse_clamped, because="interleaved columns are read as pairs and separated in registers"
)
def _(both, alpha, limit):
    return templates.swiglu.clamped(both, alpha, limit)


@clamped_gate_backward.provider(
    "triton", refuses=_refuse_clamped, because="interleaved pairs are written, as in the projection's gradient"
)
def _(grad, both, alpha, limit):
    return [templates.swiglu.clamped_backward(grad, both, alpha, largest_inside(limit))]


def largest_inside(limit: float) -> float:
    """The largest value in fp32 that torch's `clamp` to this limit gives a gradient. limit: above 0."""
    if not CLAMP_CUTS_AT_LIMIT:
        return limit
    (bits,) = struct.unpack("i", struct.pack("f", limit))
    return struct.unpack("f", struct.pack("i", bits - 1))[0]
