"""`quantize_experts`: the experts of a model in 4 bits, by bitsandbytes' own parametrisation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tunecompile.errors import CannotQuantize, need
from tunecompile.integrations.packed_experts.stacks import packed_stacks
from tunecompile.ops.nf4 import CODES

BLOCK = 64  #: weights that share a scale, as bitsandbytes' linears have it
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST = 2**31 - 1  #: elements that bitsandbytes' kernels count


def quantize_experts(model: nn.Module, kind: str = "nf4", *, blocksize: int = BLOCK) -> list[str]:
    """Quantise the stacks of a model's experts to 4 bits, in place, and return their names.

    transformers keeps the experts of a layer in parameters [experts, rows, columns], which loading with
    `BitsAndBytesConfig(load_in_4bit=True)` leaves in 16 bits. Here they get the parametrisation of
    `bitsandbytes.nn.parametrize`, with double quantisation (arXiv:2305.14314). They are frozen from now on; adapters
    over them are trained as usual. Call it before or after `get_peft_model`, before or after `optimize`, with the
    model on its device: bitsandbytes does not move the scales with the model. A second call quantises nothing again.

    Stacks are quantised one after the other: beside its codes each is there in 16 bits until it is done. Where all of
    them in 16 bits are too many, load the model with `tunecompile.nf4_config()`.

    Before `get_peft_model`, give PEFT the names as `LoraConfig(target_parameters=...)`: it looks for parametrised
    parameters by their whole names.

    Args:
        model: any module. An expert stack is a parameter [E, rows, columns] of float32, bfloat16 or float16, of a
            module that has E as its number of experts. E is 2 or more.
        kind: "nf4" or "fp4".
        blocksize: weights that share a scale; it divides the columns of every stack.

    Returns:
        The names of all 4-bit stacks, as `named_parameters` had them before, without the wrappers of PEFT.

    Raises:
        CannotQuantize: there are no stacks, or one that cannot be quantised; nothing was changed.
        MissingExtra: bitsandbytes is not installed.
    """
    if kind not in CODES:
        raise CannotQuantize(reason=f"kind is {kind!r}; give one of {', '.join(map(repr, CODES))}")
    found = list(stacks(model))
    for name, module, key in found:
        if key not in packed_stacks(module) and (reason := refusal(module, key, blocksize)) is not None:
            raise CannotQuantize(reason=f"{name} {reason}")
    if not found:
        raise CannotQuantize(
            reason="it has no parameters [experts, rows, columns]; linears, in lists of experts, too, are quantised "
            "when the model is loaded (BitsAndBytesConfig)"
        )
    for _, module, key in found:
        if key not in packed_stacks(module):
            pack(module, key, kind, blocksize)
    return [name for name, _, _ in found]


def pack(module: nn.Module, key: str, kind: str, blocksize: int = BLOCK) -> None:
    """Quantise one stack in place.

    Raises:
        MissingExtra: bitsandbytes is not installed.
    """
    _replace()(module, key, compress_statistics=True, quant_type=kind, blocksize=blocksize)


def is_stack(module: nn.Module, key: str) -> bool:
    """Whether a module's parameter is a stack of experts, in 4 bits or not.

    (Convolutions have parameters of three dims, too.)
    """
    if key in packed_stacks(module):
        return True
    value = module._parameters.get(key)
    if value is None or value.dim() != 3 or not value.is_floating_point() or value.shape[0] < 2:
        return False
    counts = [number for name, number in vars(module).items() if "expert" in name and type(number) is int]
    return value.shape[0] in counts


def stacks(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """(Name without PEFT's wrappers, module, key) of each stack."""
    for path, module in model.named_modules():
        parts = [part for part in path.split(".") if part not in ("", "base_layer", "base_model")]
        if path.startswith("base_model.model."):
            parts = parts[1:]  # PEFT's tuner holds the model as its `model`
        chains = module.parametrizations if parametrize.is_parametrized(module) else ()
        for key in sorted((*module._parameters, *chains)):
            if is_stack(module, key):
                yield ".".join((*parts, key)), module, key


def refusal(module: nn.Module, key: str, blocksize: int, loaded: bool = True) -> str | None:
    """Why a stack cannot be quantised, or None.

    Args:
        loaded: whether it should have values by now.
    """
    value: Tensor = module._parameters[key]
    if type(value) is not nn.Parameter:
        return f"is a {type(value).__name__}: quantise the model before it is sharded or wrapped"
    if loaded and value.is_meta:
        return "is on the meta device: load the weights first"
    if value.dtype not in _DTYPES:
        return f"is {str(value.dtype).removeprefix('torch.')}; bitsandbytes quantises float32, bfloat16 and float16"
    if value.shape[2] % blocksize:
        return f"has {value.shape[2]} columns, which blocks of {blocksize} do not divide; give a smaller blocksize"
    if value.numel() > _MOST:
        return f"has {value.numel()} elements, more than bitsandbytes counts"
    return None


@functools.cache
def _replace() -> Callable:
    need("quantize_experts", "qlora", "bitsandbytes")
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    return replace_parameter_4bit
