"""4-bit linears on the meta device, counted as if they were quantised: a plan is made before there are weights to quantise.

Their codes and scales have the shapes that bitsandbytes gives them (double quantisation: QLoRA, Dettmers et al., 2023, arXiv:2305.14314), and their
forward is what the pass `nf4` makes of bitsandbytes' own.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from tunecompile._torch.modules import linear
from tunecompile.ops.nf4 import dequantize_4bit

BLOCK, OUTER = 64, 256  #: weights a scale, scales a scale of their own


class MetaLinear4bit(nn.Module):
    """A frozen 4-bit linear that holds shapes only. It is called on fake tensors, and computes nothing real."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: Tensor | None,
        dtype: torch.dtype,
        quant_type: str = "nf4",
        blocksize: int = BLOCK,
        nested: bool = True,
        device: torch.device | str = "meta",
    ):
        super().__init__()
        self.in_features, self.out_features, self.dtype, self.quant_type, self.blocksize = (
            in_features,
            out_features,
            dtype,
            quant_type,
            blocksize,
        )
        blocks = math.ceil(in_features * out_features / blocksize)

        def held(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

        self.weight = held((in_features * out_features // 2, 1), torch.uint8)
        self.absmax = held((blocks,), torch.uint8 if nested else torch.float32)
        self.code = held((256,), torch.float32) if nested else None
        self.scale = held((math.ceil(blocks / OUTER),), torch.float32) if nested else None
        self.offset = held((), torch.float32) if nested else None
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        weight = _dequantize(
            self.weight,
            self.absmax,
            self.code,
            self.scale,
            self.offset,
            self.out_features,
            self.in_features,
            self.blocksize,
            self.quant_type,
            self.dtype,
        )
        bias = None if self.bias is None else self.bias.to(self.dtype)
        return linear(x.to(self.dtype), weight, bias).to(x.dtype)


_dequantize = dequantize_4bit.overload


def hollow(linear: nn.Linear, dtype: torch.dtype | None = None) -> MetaLinear4bit:
    """What stands for a linear on the meta device: a plain one that will be quantised as QLoRA's are, or bitsandbytes' own, not quantised yet."""
    weight = linear.weight
    told = (
        {"quant_type": weight.quant_type, "blocksize": weight.blocksize, "nested": weight.compress_statistics}
        if hasattr(weight, "quant_type")
        else {}
    )
    dtype = (
        dtype
        or getattr(linear, "compute_dtype", None)
        or (weight.dtype if weight.dtype.is_floating_point else torch.bfloat16)
    )
    return MetaLinear4bit(linear.in_features, linear.out_features, linear.bias, dtype, **told)


def stand_ins(model: nn.Module) -> dict[int, MetaLinear4bit]:
    """Of bitsandbytes' linears that are not quantised yet, what to count in their place, by their identity."""
    return {
        id(module): hollow(module)
        for module in model.modules()
        if type(weight := module._parameters.get("weight")).__name__ == "Params4bit" and weight.is_meta
    }


def held(model: nn.Module, stands: dict[int, MetaLinear4bit]) -> list[Tensor]:
    """Parameters and buffers: of what has a stand-in, the stand-in's."""
    replaced = {id(module.weight) for module in model.modules() if id(module) in stands}
    return [
        t
        for holder in (model, *stands.values())
        for t in (*holder.parameters(), *holder.buffers())
        if id(t) not in replaced
    ]
