"""Gated linear units (Shazeer, 2020, arXiv:2002.05202): SwiGLU and GeGLU."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tunecompile.ir.op import Cost, op, refuse_gpu
from tunecompile.notes import Note, note
from tunecompile.ops.rms_norm import compute_dtype

__all__ = ["gated_activation", "gated_activation_backward"]

GELU_TANH = (0.7978845608028654, 0.044715)  #: sqrt(2 / pi) and the cubic term of the tanh approximation


@op(cost=Cost.POINTWISE)
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


@gated_activation.backward(saves=("gate", "up", "activation"), gives=("gate", "up"))
def gated_activation_backward(grad: Tensor, gate: Tensor, up: Tensor, activation: str) -> list[Tensor]:
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
    because="both gradients in one buffer, as the fused projection's gradient stands: "
    "0.29 ms, Inductor's concatenation 0.38 (8192x14336 bf16, H200)",
)
def _(grad, gate, up, activation):
    from tunecompile.templates import swiglu

    return list(swiglu.backward(grad, gate, up, activation))
