"""The quantizer by which transformers loads a checkpoint's experts and leaves them in FP8; linears are dequantised.

A checkpoint has a matrix and its scales for each expert. The operations by which transformers puts matrices together
put the scales together, too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tunecompile.errors import CannotQuantize
from tunecompile.integrations.packed_experts.formats import (
    Fp8Stack,
    Mxfp4Stack,
    check_checkpoint,
    loaded,
    only,
    place,
    put,
)
from tunecompile.integrations.packed_experts.stacks import Dequantiser
from tunecompile.ops.packed.mxfp4 import BLOCK

WEIGHT, SCALES = ".weight", "_scale_inv"  #: how checkpoints end the names of matrices, and of their scales


def quantizer() -> type:
    """Return the class of the quantizer."""
    from transformers.core_model_loading import WeightConverter
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    operation = _operation_class()

    class Quantizer(FineGrainedFP8HfQuantizer):
        """Dequantises all but the experts' stacks."""

        is_trainable = True
        keys: Iterable[str] = ()

        def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
            self.keys = check_checkpoint(model, self, "FP8")
            super()._process_model_before_weight_loading(model, **kwargs)

        def update_weight_conversions(self, weight_conversions: list, *args: Any) -> list:
            ours = [each for each in weight_conversions if self._is_of_experts(each)]
            rest = [each for each in weight_conversions if each not in ours]
            made = [*map(self._kept, ours), *super().update_weight_conversions(rest, *args)]
            self.quantization_config.dequantize = False  # or transformers takes the model for one in 16 bits
            return made

        def _is_of_experts(self, converter: Any) -> bool:
            targets = converter.target_patterns
            return (
                isinstance(converter, WeightConverter)
                and len(targets) == 1
                and targets[0].rstrip("$").rpartition(".")[2] in self.keys
                and all(source.rstrip("$").endswith(WEIGHT) for source in converter.source_patterns)
            )

        def _kept(self, converter: Any) -> Any:
            names = [source.rstrip("$") for source in converter.source_patterns]
            sources = [*(f"{name}$" for name in names), *(f"{name}{SCALES}$" for name in names)]
            made = WeightConverter(sources, list(converter.target_patterns), [operation(self, converter.operations)])
            for name in ("scope_prefix", "base_model_prefix"):
                if hasattr(converter, name):
                    setattr(made, name, getattr(converter, name))
            return made

        def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
            return 1 if param.dim() == 3 and param_name.rpartition(".")[2] in self.keys else param.element_size()

        def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> nn.Module:
            self.quantization_config.quant_method = "fp8"
            return model

        def is_serializable(self) -> bool:
            return False  # linears are dequantised

    return Quantizer


@functools.cache
def _operation_class() -> type:
    from transformers.core_model_loading import ConversionOps

    class Keep(ConversionOps):
        """Puts a stack of codes and their scales in its place."""

        def __init__(self, hf_quantizer: Any, operations: Sequence[Any]):
            self.hf_quantizer = hf_quantizer  # transformers casts no input of an operation that has this
            self.operations = operations  #: which make a stack of the experts' matrices

        def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
            name, model, targets = (kwargs[key] for key in ("full_layer_name", "model", "target_patterns"))
            sides = []
            for ends in (False, True):  # codes, then scales
                part = {at: value for at, value in input_dict.items() if at.rstrip("$").endswith(SCALES) == ends}
                order = [at for at in kwargs["source_patterns"] if at in part]
                for each in self.operations:
                    part = each.convert(part, source_patterns=order, target_patterns=targets, config=model.config)
                sides.append(only(next(iter(part.values()))))
            module, key = place(model, name)
            put(module, key, *_stack(module._parameters[key], *sides, self._block(), name))
            return loaded(name, kwargs.get("missing_keys"))

        def _block(self) -> Sequence[int]:
            return self.hf_quantizer.quantization_config.weight_block_size

    return Keep


def _stack(empty: Any, codes: Tensor, scales: Tensor, block: Sequence[int], name: str) -> tuple[Tensor, Dequantiser]:
    """Codes as bytes, and their parametrisation, in the place of an empty parameter.

    Raises:
        CannotQuantize: sizes do not fit.
    """
    shape = tuple(empty.shape)
    halved = codes.element_size() == scales.element_size() == 1 and 2 * codes.numel() == BLOCK * scales.numel()
    if halved and tuple(codes.shape) == (*shape[:2], shape[2] // 2):  # DeepSeek-V4's are MXFP4
        made = Mxfp4Stack(scales.contiguous().view(torch.uint8), shape, empty.dtype, turned=False)
        return codes.contiguous().view(torch.uint8), made
    blocks = tuple(-(-size // by) for size, by in zip(shape[1:], block))
    if codes.dtype != torch.float8_e4m3fn or tuple(codes.shape) != shape or tuple(scales.shape[1:]) != blocks:
        raise CannotQuantize(
            reason=f"{name} is {shape}, and its codes are {tuple(codes.shape)} of {codes.dtype} with scales "
            f"{tuple(scales.shape)} of blocks {tuple(block)}"
        )
    if scales.dtype == torch.uint8:  # exponents of powers of two, which torch has a dtype for
        scales = scales.view(torch.float8_e8m0fnu)
    return codes.contiguous().view(torch.uint8), Fp8Stack(scales.float(), block, shape, empty.dtype)
