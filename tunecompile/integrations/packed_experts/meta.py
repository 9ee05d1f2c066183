"""4-bit stacks on the meta device, with the sizes of quantised ones: plans are made before weights can be quantised.

Codes and scales have the shapes that bitsandbytes gives them, with double quantisation (arXiv:2305.14314).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tunecompile.integrations.bitsandbytes import from_4_bits
from tunecompile.integrations.packed_experts.quantize import BLOCK
from tunecompile.integrations.packed_experts.stacks import Dequantiser

OUTER = 256  #: scales that share one


class MetaStack4bit(Dequantiser):
    """In place of bitsandbytes' parametrisation: scales with shapes but no values."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype):
        super().__init__()
        blocks = math.prod(shape) // BLOCK

        def empty(name: str, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            self.register_buffer(name, torch.empty(size, dtype=dtype, device="meta"))
            return self.get_buffer(name)

        outer = SimpleNamespace(
            code=empty("code", (256,), torch.float32),
            absmax=empty("scale", (math.ceil(blocks / OUTER),), torch.float32),
            blocksize=OUTER,
        )
        self.quant_state = SimpleNamespace(  # what bitsandbytes calls so, as far as `from_4_bits` reads it
            absmax=empty("absmax", (blocks,), torch.uint8),
            offset=empty("offset", (), torch.float32),
            state2=outer,
            nested=True,
            shape=torch.Size(shape),
            dtype=dtype,
            blocksize=BLOCK,
            quant_type="nf4",
        )

    def forward(self, packed: Tensor) -> Tensor:
        """The stack, by the op."""
        return from_4_bits(packed, self.quant_state)


def pack_on_meta(module: nn.Module, key: str) -> None:
    """Put a 4-bit stack without values in the place of a stack on the meta device."""
    value = module._parameters[key]
    codes = torch.empty((value.numel() // 2, 1), dtype=torch.uint8, device="meta")
    module._parameters[key] = nn.Parameter(codes, requires_grad=False)
    parametrize.register_parametrization(module, key, MetaStack4bit(value.shape, value.dtype), unsafe=True)
