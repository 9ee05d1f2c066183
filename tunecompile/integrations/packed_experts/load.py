"""Loading a mixture of experts with all its weights in 4 bits: linears as bitsandbytes has them, experts' stacks, too.

By a quantizer that transformers knows by name: `from_pretrained` puts a stack together, hands it over, and goes on to
the next. What it has loaded looks like any other model with 4-bit weights of bitsandbytes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from tunecompile.errors import CannotQuantize, need
from tunecompile.integrations.packed_experts.formats import is_loaded, loaded, only, place
from tunecompile.integrations.packed_experts.quantize import BLOCK, is_stack, pack, refusal, stacks

METHOD = "tunecompile_4bit"  #: of transformers' table of quantizers


def nf4_config(compute_dtype: torch.dtype = torch.bfloat16, kind: str = "nf4") -> Any:
    """Return a quantization config for `from_pretrained` that has linears and experts loaded in 4 bits.

    `AutoModelForCausalLM.from_pretrained(path, quantization_config=tunecompile.nf4_config(), dtype=torch.bfloat16)`
    loads as `BitsAndBytesConfig(load_in_4bit=True)` does, with double quantisation, and each stack of experts is
    quantised as soon as it is read (`tunecompile.quantize_experts`). So one stack at most is there in 16 bits, beside
    the pieces that it is put together from, and all those of a 30B model take 15 GiB.

    Args:
        compute_dtype: of the products of linears. Those of experts are in the dtype that the model is loaded in.
        kind: "nf4" or "fp4".

    Returns:
        A `transformers.BitsAndBytesConfig`.

    Raises:
        MissingExtra: transformers is not installed.
    """
    need("nf4_config", "qlora", "transformers")
    return _config_class()(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute_dtype,
    )


@functools.cache
def _config_class() -> type:
    """The class of the config, registered with its quantizer."""
    from transformers import BitsAndBytesConfig
    from transformers.quantizers.auto import register_quantization_config, register_quantizer

    class ExpertsConfig(BitsAndBytesConfig):
        """One of bitsandbytes', under a name of its own while the model is loaded."""

        def __init__(self, **options: Any):
            super().__init__(**options)
            self.quant_method = METHOD

    register_quantization_config(METHOD)(ExpertsConfig)
    register_quantizer(METHOD)(_quantizer_class())
    return ExpertsConfig


def _quantizer_class() -> type:
    from transformers import BitsAndBytesConfig
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

    operation = _operation_class()

    class ExpertsQuantizer(Bnb4BitHfQuantizer):
        """Quantises linears and stacks."""

        def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
            return is_stack(*place(model, param_name)) or super().param_needs_quantization(model, param_name, **kwargs)

        def get_quantize_ops(self) -> Any:
            return operation(self)

        def _process_model_before_weight_loading(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
            for name, module, key in stacks(model):
                if (reason := refusal(module, key, BLOCK, loaded=False)) is not None:
                    raise CannotQuantize(reason=f"{name} {reason}")
            super()._process_model_before_weight_loading(model, *args, **kwargs)

        def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> nn.Module:
            model = super()._process_model_after_weight_loading(model, **kwargs)
            given = {key: value for key, value in vars(self.quantization_config).items() if key.startswith("bnb_")}
            plain = BitsAndBytesConfig(load_in_4bit=True, **given)
            model.config.quantization_config, model.quantization_method = plain, plain.quant_method
            model.hf_quantizer = Bnb4BitHfQuantizer(plain, pre_quantized=False)
            return model

    return ExpertsQuantizer


def _operation_class() -> type:
    from transformers.integrations.bitsandbytes import Bnb4bitQuantize

    class Quantize(Bnb4bitQuantize):
        """Stacks are parametrised in place; all else is for transformers to put in place."""

        def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
            model, rest = kwargs["model"], {}
            for name, value in input_dict.items():
                module, key = place(model, name)
                if is_stack(module, key):
                    module._parameters[key] = nn.Parameter(only(value), requires_grad=False)
                    pack(module, key, self.hf_quantizer.quantization_config.bnb_4bit_quant_type)
                    is_loaded(module, key)
                    loaded(name, kwargs.get("missing_keys"))
                else:
                    rest[name] = value
            return super().convert(rest, *args, **kwargs) if rest else {}

    return Quantize
