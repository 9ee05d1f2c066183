"""Loading a checkpoint whose experts are in 4 or 8 bits, with the experts left so: gpt-oss's MXFP4, DeepSeek's FP8.

transformers keeps such experts packed for inference alone, by kernels from its hub; for training it dequantises all of
them. Here each stack gets a parametrisation as soon as it is read, and no stack is dequantised.
"""

from __future__ import annotations

import functools
from typing import Any

from tunecompile.errors import CannotQuantize, need

METHODS = {"mxfp4": "tunecompile_mxfp4", "fp8": "tunecompile_fp8"}  #: of transformers' table of quantizers


def packed_config(kind: str = "mxfp4") -> Any:
    """Return a quantization config for `from_pretrained` that leaves a checkpoint's experts in 4 or 8 bits.

    `AutoModelForCausalLM.from_pretrained(path, quantization_config=tunecompile.packed_config(), dtype=torch.bfloat16)`
    loads gpt-oss with its experts in MXFP4, as they are on the disk. They are frozen, and trained through: adapters
    over them (`LoraConfig(target_parameters=tunecompile.quantize_experts(model))`, which returns their names) are
    trained as over any others. `tunecompile.save_merged` merges those.

    Args:
        kind: "mxfp4", or "fp8" for weights with one scale for each block of rows and columns (DeepSeek-V3). Their
            linears are dequantised as they are read; experts take almost all bytes of such models.

    Returns:
        A config of the class that transformers has for such checkpoints.

    Raises:
        CannotQuantize: there is no such kind. `from_pretrained` raises it for checkpoints that have no such experts.
        MissingExtra: transformers is not installed.
    """
    if kind not in METHODS:
        raise CannotQuantize(reason=f"kind is {kind!r}; give one of {', '.join(map(repr, METHODS))}")
    need("packed_config", "hf", "transformers")
    return _config_class(kind)()


@functools.cache
def _config_class(kind: str) -> type:
    """The class of the config, registered with its quantizer.

    transformers takes the checkpoint's own config, and from the caller's what it calls loading attributes; the name of
    the class has to be the same.
    """
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.utils import quantization_config

    if kind == "mxfp4":
        from tunecompile.integrations.packed_experts.checkpoint_mxfp4 import quantizer

        base = quantization_config.Mxfp4Config
    else:
        from tunecompile.integrations.packed_experts.checkpoint_fp8 import quantizer

        base = quantization_config.FineGrainedFP8Config

    class Config(base):  # type: ignore[misc, valid-type]
        """The checkpoint's, under a name of its own while the model is loaded."""

        def __init__(self, **options: Any):
            super().__init__(**options)
            self.quant_method = METHODS[kind]

        def get_loading_attributes(self) -> dict[str, Any]:
            return {"quant_method": METHODS[kind], "dequantize": kind == "fp8"}

    Config.__name__ = base.__name__
    register_quantization_config(METHODS[kind])(Config)
    register_quantizer(METHODS[kind])(quantizer())
    return Config
