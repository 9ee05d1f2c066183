"""Short depthwise causal convolutions over tokens, as in front of state spaces and delta rules (arXiv:2312.00752)."""

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from tunecompile.ir.op import Cost, op
from tunecompile.ir.shape_rule_cache import contiguous_like
from tunecompile.ops.norms.rms_norm import compute_dtype
from tunecompile.ops.recurrent.documents import document_of


def _back(x: Tensor, steps: int, documents: Tensor | None) -> Tensor:
    """The value `steps` tokens before each token: 0 outside of its document."""
    if not steps:
        return x
    moved = F.pad(x, (0, 0, steps, 0))[:, : x.shape[1]]
    if documents is None:
        return moved
    alike = documents == F.pad(documents, (steps, 0), value=-1)[: x.shape[1]]
    return torch.where(alike[:, None], moved, 0)


def _ahead(x: Tensor, steps: int, documents: Tensor | None) -> Tensor:
    """The value `steps` tokens after each token: 0 outside of its document."""
    if not steps:
        return x
    # padded in front, too: behind alone, Inductor would join tensor and zeros in memory (torch 2.13), for each of the
    # steps. Those are 16 GiB for 131072 tokens of 8192 channels
    moved = F.pad(x, (0, 0, 1, steps))[:, 1 + steps :]
    if documents is None:
        return moved
    alike = documents == F.pad(documents, (0, steps), value=-1)[steps:]
    return torch.where(alike[:, None], moved, 0)


def _stored(x: Tensor) -> Tensor:
    """The same values, in memory: Inductor computes what `as_strided` reads where it stands. It would compute them anew
    for each shift, or store each shift where they are made of several tensors: 4 GiB for 131,072 tokens of 8,192.
    """
    x = x.contiguous()
    return x.as_strided(x.shape, x.stride())


def _sum(x: Tensor, weight: Tensor, bias: Tensor | None, documents: Tensor | None) -> Tensor:
    """The convolution itself, in the dtype of the arithmetic."""
    width = weight.shape[1]
    made = x * weight[:, width - 1]
    for steps in range(1, width):
        made = made + _back(x, steps, documents) * weight[:, width - 1 - steps]
    return made if bias is None else made + bias


@op(cost=Cost.POINTWISE, shapes=lambda x, *_: x.new_empty(x.shape))
def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    offsets: Optional[Tensor],
    silu: bool,
) -> Tensor:
    """Return sum_j weight_cj x_{t-W+1+j,c} + bias_c for each token t and channel c, or silu of it (arXiv:2312.00752).

    Args:
        x: [B, T, C], any floating dtype. Arithmetic is in fp32, in fp64 for fp64, and rounded once.
        weight: [C, W], any floating dtype; W is a constant of the graph.
        bias: [C], or None.
        offsets: int [S + 1], where documents begin and the last one ends; a token sees none of another document. None
            where each row is a document.
        silu: whether silu is applied.

    Returns:
        [B, T, C] in x's dtype.
    """
    wide = compute_dtype(x.dtype)
    documents = None if offsets is None else document_of(offsets, x.shape[1])
    made = _sum(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide), documents)
    return (F.silu(made) if silu else made).to(x.dtype).contiguous()


def _backward_shapes(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Optional[Tensor], offsets: Optional[Tensor], silu: bool
) -> list[Tensor]:
    return contiguous_like(x, weight, weight[:, 0] if bias is None else bias)


@short_convolution.backward(gives=("x", "weight", "bias"), shapes=_backward_shapes)
def short_convolution_backward(grad, x, weight, bias, offsets, silu) -> list[Tensor]:
    """Return the gradients of `short_convolution`; the sum in front of silu is recomputed.

    Args:
        grad: of the result, [B, T, C] in its dtype. The others are inputs of `short_convolution`.

    Returns:
        [dx, dweight, dbias], with shape and dtype of the inputs; without a bias the last one has shape [C].
    """
    wide = compute_dtype(x.dtype)
    documents = None if offsets is None else document_of(offsets, x.shape[1])
    inputs, matrix, given = x.to(wide), weight.to(wide), grad.to(wide)
    if silu:
        z = _sum(inputs, matrix, None if bias is None else bias.to(wide), documents)
        gate = torch.sigmoid(z)
        given = given * gate * (1 + z * (1 - gate))
    given = _stored(given)
    width = weight.shape[1]
    taps = [(given * _back(inputs, width - 1 - j, documents)).sum((0, 1)) for j in range(width)]
    dx = given * matrix[:, width - 1]
    for steps in range(1, width):
        dx = dx + _ahead(given, steps, documents) * matrix[:, width - 1 - steps]
    dbias = given.sum((0, 1)).to(weight.dtype if bias is None else bias.dtype)
    return [dx.to(x.dtype).contiguous(), torch.stack(taps, 1).to(weight.dtype), dbias]
