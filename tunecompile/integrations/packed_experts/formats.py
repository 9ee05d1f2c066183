"""Stacks of experts in the formats of checkpoints: MXFP4 (gpt-oss), and FP8 in blocks of rows and columns (DeepSeek).

Each is a parametrisation, as bitsandbytes' is: the codes are the parameter, and scales are buffers that move with the
module. Casts of a model to another dtype leave both as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tunecompile.errors import CannotQuantize
from tunecompile.integrations.packed_experts.quantize import stacks
from tunecompile.integrations.packed_experts.stacks import Dequantiser
from tunecompile.ir.op import Op
from tunecompile.ops import dequantize_fp8_blocks, dequantize_mxfp4
from tunecompile.ops.packed.mxfp4 import BLOCK


class _Stack(Dequantiser):
    """Scales, and shape and dtype of the values."""

    scales: Tensor

    def __init__(self, scales: Tensor, shape: Sequence[int], dtype: torch.dtype):
        super().__init__()
        self.register_buffer("scales", scales.contiguous())
        self.quant_state = SimpleNamespace(shape=torch.Size(shape), dtype=dtype)

    def _by(self, op: Op, *args: Any) -> Tensor:
        """What an op gives: as a call of a graph, or of its provider."""
        args = *args, self.quant_state.dtype
        return (op if torch.compiler.is_compiling() else op.choose(args).run)(*args)


class Mxfp4Stack(_Stack):
    """Codes [E, N, K / 2] of two a byte; values [E, N, K], or [E, K, N] where `turned`."""

    def __init__(self, scales: Tensor, shape: Sequence[int], dtype: torch.dtype, turned: bool):
        super().__init__(scales, shape, dtype)
        self.turned = turned

    def is_readable(self, codes: Tensor) -> bool:
        """Whether the codes are those of the shape."""
        weights = math.prod(self.quant_state.shape)
        return codes.dtype == torch.uint8 and weights % BLOCK == 0 and 2 * codes.numel() == weights

    def forward(self, codes: Tensor) -> Tensor:
        """The stack, by the op."""
        experts, rows, columns = self.quant_state.shape
        if self.turned:
            rows, columns = columns, rows
        values = self._by(dequantize_mxfp4, codes.data, self.scales, experts * rows, columns)
        values = values.view(experts, rows, columns)
        return values.transpose(1, 2) if self.turned else values


class Fp8Stack(_Stack):
    """Codes [E, N, K], one a byte; scales of blocks in fp32."""

    def __init__(self, scales: Tensor, block: Sequence[int], shape: Sequence[int], dtype: torch.dtype):
        super().__init__(scales, shape, dtype)
        self.block = tuple(block)

    def is_readable(self, codes: Tensor) -> bool:
        """Whether the codes are those of the shape."""
        return codes.dtype == torch.uint8 and codes.numel() == math.prod(self.quant_state.shape)

    def forward(self, codes: Tensor) -> Tensor:
        """The stack, by the op."""
        return self._by(dequantize_fp8_blocks, codes.data, self.scales, *self.block)

    def _apply(self, fn: Any, recurse: bool = True) -> Fp8Stack:
        """What moves the model moves the scales; what casts it leaves them in fp32."""
        exact = self.scales
        super()._apply(fn, recurse)
        if self.scales.dtype != exact.dtype:
            self.scales = exact.to(self.scales.device)
        return self


def put(module: nn.Module, key: str, codes: Tensor, made: Dequantiser) -> None:
    """Put codes and their parametrisation in the place of a stack."""
    module._parameters[key] = nn.Parameter(codes, requires_grad=False)
    parametrize.register_parametrization(module, key, made, unsafe=True)
    is_loaded(module, key)


def is_loaded(module: nn.Module, key: str) -> None:
    """Mark a stack that was put in place: transformers gives values to what was not loaded."""
    module.parametrizations[key].original._is_hf_initialized = module._is_hf_initialized = True


def check_checkpoint(model: nn.Module, quantizer: Any, kind: str) -> list[str]:
    """The names of the stacks' parameters. Raises CannotQuantize where there are none, or they are not packed."""
    keys = sorted({key for _, _, key in stacks(model)})
    if not keys:
        raise CannotQuantize(reason="it has no parameters [experts, rows, columns]")
    if not quantizer.pre_quantized:
        raise CannotQuantize(
            reason=f"the checkpoint is not quantised to {kind}; tunecompile.nf4_config() quantises experts as they are "
            "read"
        )
    return keys


def place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that has a parameter, and the parameter's key there."""
    path, _, key = name.rpartition(".")
    return model.get_submodule(path), key


def only(value: Any) -> Tensor:
    """A tensor that may be alone in a list."""
    return value[0] if isinstance(value, list) else value


def loaded(name: str, missing: Any) -> dict:
    """What transformers has to do with a stack that was put in place: nothing."""
    if missing is not None:
        missing.discard(name)
    return {}
