"""4-bit linears on the meta device, with the sizes of quantised ones: plans are made before weights can be quantised.

Codes and scales have the shapes that bitsandbytes gives them (double quantisation: QLoRA, Dettmers et al., 2023,
arXiv:2305.14314), and the forward is the one that the pass `nf4` makes of bitsandbytes' forward.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from tunecompile._torch.modules import linear
from tunecompile.ops.nf4 import dequantize_4bit

BLOCK, OUTER = 64, 256  #: number of weights that share a scale, and of scales that share one


class MetaLinear4bit(nn.Module):
    """A frozen 4-bit linear with shapes but no values. It is called on fake tensors."""

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
        self.in_features, self.out_features, self.dtype = in_features, out_features, dtype
        self.quant_type, self.blocksize = quant_type, blocksize
        blocks = math.ceil(in_features * out_features / blocksize)

        def empty(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

        self.weight = empty((in_features * out_features // 2, 1), torch.uint8)
        self.absmax = empty((blocks,), torch.uint8 if nested else torch.float32)
        self.code = empty((256,), torch.float32) if nested else None
        self.scale = empty((math.ceil(blocks / OUTER),), torch.float32) if nested else None
        self.offset = empty((), torch.float32) if nested else None
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """x @ weight.T + bias in the compute dtype, returned in the dtype of x."""
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


def meta_linear(linear: nn.Linear) -> MetaLinear4bit:
    """A 4-bit linear in place of a plain one, quantised as in QLoRA, or of an unquantised one of bitsandbytes."""
    weight = linear.weight
    options = (
        {"quant_type": weight.quant_type, "blocksize": weight.blocksize, "nested": weight.compress_statistics}
        if hasattr(weight, "quant_type")
        else {}
    )
    own = weight.dtype if weight.dtype.is_floating_point else torch.bfloat16
    dtype = getattr(linear, "compute_dtype", None) or own
    return MetaLinear4bit(linear.in_features, linear.out_features, linear.bias, dtype, **options)


def meta_linears(model: nn.Module) -> dict[int, MetaLinear4bit]:
    """Replacements of bitsandbytes' linears that are not quantised yet, by `id` of the linear."""
    return {
        id(module): meta_linear(module)
        for module in model.modules()
        if type(weight := module._parameters.get("weight")).__name__ == "Params4bit" and weight.is_meta
    }


def counted_tensors(model: nn.Module, replacements: dict[int, MetaLinear4bit]) -> list[Tensor]:
    """Parameters and buffers of a model, of replacements where there are any."""
    replaced = {id(module.weight) for module in model.modules() if id(module) in replacements}
    return [
        t
        for holder in (model, *replacements.values())
        for t in (*holder.parameters(), *holder.buffers())
        if id(t) not in replaced
    ]
