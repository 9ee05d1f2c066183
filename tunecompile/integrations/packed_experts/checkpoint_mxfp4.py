"""The quantizer by which transformers loads a checkpoint's experts and leaves them in MXFP4."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from tunecompile.errors import CannotQuantize
from tunecompile.integrations.packed_experts.formats import Mxfp4Stack, check_checkpoint, loaded, only, place, put
from tunecompile.integrations.packed_experts.quantize import stacks
from tunecompile.integrations.packed_experts.stacks import packed_stacks
from tunecompile.ops.packed.mxfp4 import BLOCK

ENDS = ("_blocks", "_scales")  #: what checkpoints put behind a stack's name


def quantizer() -> type:
    """Return the class of the quantizer."""
    from transformers.core_model_loading import WeightConverter
    from transformers.quantizers.base import HfQuantizer

    operation = _operation_class()

    class Quantizer(HfQuantizer):
        """Leaves stacks in MXFP4; all else is in the model's dtype."""

        is_trainable = True
        keys: Iterable[str] = ()

        def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
            self.keys = check_checkpoint(model, self, "MXFP4")

        def get_weight_conversions(self) -> list:
            return [WeightConverter([key + end for end in ENDS], _whole(key), [operation(self)]) for key in self.keys]

        def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
            packed = param.dim() == 3 and param_name.rpartition(".")[2] in self.keys
            return 0.5 + 1 / BLOCK if packed else param.element_size()

        def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> nn.Module:
            self.quantization_config.quant_method = "mxfp4"
            return model

        def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict]:
            return _as_checkpoint(model), {}

        def is_serializable(self) -> bool:
            return True

    return Quantizer


@functools.cache
def _operation_class() -> type:
    from transformers.core_model_loading import ConversionOps

    class Keep(ConversionOps):
        """Puts blocks and scales of a stack in its place."""

        def __init__(self, hf_quantizer: Any):
            self.hf_quantizer = hf_quantizer  # transformers casts no input of an operation that has this

        def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
            name, model = kwargs["full_layer_name"], kwargs["model"]
            blocks, scales = (
                next(only(value) for at, value in input_dict.items() if at.rstrip("$").endswith(end)) for end in ENDS
            )
            module, key = place(model, name)
            put(module, key, *_stack(module, key, blocks.flatten(2), scales, name))
            return loaded(name, kwargs.get("missing_keys"))

        @property
        def reverse_op(self) -> Any:
            return self  # never called: a state dict has the checkpoint's names

    return Keep


def _whole(key: str) -> str:
    """The pattern of a name's end. transformers 5.23 ends patterns there itself, and takes `$` for a part of it."""
    from transformers.core_model_loading import WeightConverter

    made = WeightConverter("a", "b$", [_operation_class()(None)])
    return key if made.target_patterns[0].endswith("$") else f"{key}$"


def _stack(module: nn.Module, key: str, codes: Tensor, scales: Tensor, name: str) -> tuple[Tensor, Mxfp4Stack]:
    """Codes [E, N, K / 2] and their parametrisation, in the place of an empty parameter [E, N, K] or [E, K, N].

    Raises:
        CannotQuantize: sizes do not fit.
    """
    empty = module._parameters[key]
    turned = bool(getattr(module, "is_transposed", False))  # gpt-oss has square stacks: their shapes do not tell
    experts, rows, half = codes.shape
    shape = (experts, 2 * half, rows) if turned else (experts, rows, 2 * half)
    if tuple(empty.shape) != shape or scales.numel() * BLOCK != 2 * codes.numel():
        raise CannotQuantize(reason=f"{name} is {tuple(empty.shape)}, and its codes are {tuple(codes.shape)}")
    return codes.contiguous(), Mxfp4Stack(scales.contiguous(), shape, empty.dtype, turned)


def _as_checkpoint(model: nn.Module) -> dict[str, Tensor]:
    """The model's state dict with stacks as the checkpoint has them."""
    values = model.state_dict()
    for name, module, key in stacks(model):
        if key in packed_stacks(module) and isinstance(module.parametrizations[key][0], Mxfp4Stack):
            path = f"{name.rpartition('.')[0]}.parametrizations.{key}"
            codes, scales = values.pop(f"{path}.original"), values.pop(f"{path}.0.scales")
            values |= {f"{name}_blocks": codes.view(*scales.shape, -1), f"{name}_scales": scales}
    return values
