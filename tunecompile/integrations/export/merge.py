"""The weights of a model in fp32 on the CPU, one module at a time, dequantised and with adapters merged.

PEFT merges an adapter into the stored weight. A 4-bit weight is dequantised, changed, and rounded to 4 bit again, in
steps larger than most changes by training. Here a layer is copied in fp32 first, and PEFT's own merge runs on the copy.
The caller rounds the result once, mostly to 16 bit. The model itself is only read.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tunecompile.errors import CannotMerge, summary
from tunecompile.integrations.bitsandbytes import is_packed, values_of
from tunecompile.integrations.packed_experts.stacks import is_partly_packed, packed_stacks, plain_copy

ELSEWHERE = "save the adapter (model.save_pretrained), and merge it in a new process: tunecompile merge"


def floats(module: nn.Module, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the merged value of every parameter and persistent buffer, tied ones under each of their names.

    Args:
        module: the model, or a part of it.
        name: prefix of the names.

    Yields:
        (name, value), with the names that the model has without adapters.

    Raises:
        CannotMerge: no weights can represent the model.
    """
    from peft.tuners.trainable_tokens import TrainableTokensLayer
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

    if isinstance(module, ModulesToSaveWrapper):
        active = [
            key for key in module.active_adapters if key in module.modules_to_save and not module.disable_adapters
        ]
        module = module.modules_to_save[active[-1]] if active else module.original_module
    elif isinstance(module, (TrainableTokensWrapper, TrainableTokensLayer)):
        layer = getattr(module, "token_adapter", module)
        with torch.no_grad():
            yield (
                f"{name}.weight",
                layer.get_merged_weights([] if layer.disable_adapters else layer.active_adapters).float().cpu(),
            )
        return
    if isinstance(module, BaseTunerLayer):
        module = merged(module, name)
    elif is_quantized(module):
        module = dequantized(module, name)
    elif packed_stacks(module) or is_partly_packed(module):
        module = in_floats(module, name)
    buffers = (
        (key, value)
        for key, value in module.named_buffers(recurse=False)
        if key not in module._non_persistent_buffers_set
    )
    for key, value in (*module.named_parameters(recurse=False), *buffers):
        yield join(name, key), as_float(value, join(name, key)).detach()
    for key, child in module.named_children():
        yield from floats(child, join(name, key))


def join(name: str, key: str) -> str:
    """The dotted name of a part of a module; `name` is empty for the model itself."""
    return f"{name}.{key}" if name else key


def merged(layer: nn.Module, name: str) -> nn.Module:
    """The base layer with its active adapters merged into it; merged ones stay merged. Raises CannotMerge."""
    from peft.tuners.lora import Linear, LoraLayer

    twin = link = in_floats(layer, name)
    packed = packed_stacks(layer.get_base_layer())
    while hasattr(link, "base_layer"):  # adapters of several parameters of a module are wrapped around each other
        if getattr(link, "parameter_name", None) in packed:
            link.merged_adapters = []  # PEFT has added them to a dequantised copy, which is gone
        active = [] if link.merged or link.disable_adapters else list(link.active_adapters)
        if active and not isinstance(link, LoraLayer):
            raise CannotMerge(
                reason=f"{name} has an adapter of type {type(link).__name__}, and only LoRA can be merged here; "
                "PEFT's merge_and_unload may support it"
            )
        if len(set(active) & set(getattr(link, "lora_magnitude_vector", None) or ())) and len(active) > 1:
            raise CannotMerge(
                reason=f"{name} has several active adapters, and DoRA among them, which no single weight can "
                "represent; activate one (set_adapter)"
            )
        merge = Linear.merge if is_quantized(layer.get_base_layer()) else type(link).merge
        try:
            merge(link, adapter_names=active)
        except Exception as error:  # for variants that no weight can represent, such as aLoRA
            raise CannotMerge(
                reason=f"PEFT does not merge {name} ({summary(error)}); serve the adapter beside its base instead"
            ) from error
        link = link.base_layer
    return twin.get_base_layer()


def in_floats(layer: nn.Module, name: str) -> nn.Module:
    """A copy on the CPU, in fp32, without hooks; quantised modules become plain ones."""
    memo: dict[int, Any] = {}
    for key, module in layer.named_modules(prefix=name):
        memo |= {
            id(value): type(value)()
            for at, value in vars(module).items()
            if at.endswith("hooks") and isinstance(value, dict)
        }
        if is_quantized(module):
            memo[id(module)] = dequantized(module, key)
        elif is_partly_packed(module):
            raise CannotMerge(reason=f"{key} has 4-bit parameters that are adapted, or in a form that is not known")
        elif packed_stacks(module):
            memo[id(module)] = _in_floats(plain_copy(module), key)
        else:
            tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
            memo |= {id(value): as_float(value, join(key, at)) for at, value in tensors}
    return copy.deepcopy(layer, memo)


def _in_floats(plain: nn.Module, name: str) -> nn.Module:
    """A plain copy's other parameters as floats, and copies of its submodules."""
    for held in (plain._parameters, plain._buffers):
        held.update({key: as_float(value, join(name, key)) for key, value in held.items() if value is not None})
    children = {key: in_floats(child, join(name, key)) for key, child in plain._modules.items() if child is not None}
    plain._modules.update(children)
    return plain


def as_float(value: Tensor, name: str) -> Tensor:
    """A copy on the CPU, in fp32 if it is of floating point. Raises CannotMerge."""
    if type(value) not in (Tensor, nn.Parameter) or value.is_meta:
        kind = "is on no device here (offloaded)" if value.is_meta else f"is a {type(value).__name__}"
        raise CannotMerge(reason=f"{name} {kind}: {ELSEWHERE}")
    copied = value.detach().to("cpu", torch.float32 if value.is_floating_point() else value.dtype, copy=True)
    return nn.Parameter(copied, requires_grad=False) if isinstance(value, nn.Parameter) else copied


def is_quantized(module: nn.Module) -> bool:
    """Whether bitsandbytes has quantised the module to 4 or 8 bit."""
    return {"Params4bit", "Int8Params"} & {type(value).__name__ for value in module._parameters.values()} != set()


def dequantized(linear: nn.Module, name: str) -> nn.Linear:
    """A plain layer with the values that a forward pass multiplies by.

    These are the values in the dtype that bitsandbytes dequantises to, which is the model's. Raises CannotMerge.
    """
    import bitsandbytes as bnb

    weight = linear.weight
    if type(weight).__name__ == "Int8Params":
        scale = linear.state.SCB if weight.SCB is None else weight.SCB
        if scale is None or weight.dtype != torch.int8:
            raise CannotMerge(reason=f"{name} is not quantised yet: move the model to its device first")
        value = bnb.functional.int8_vectorwise_dequant(weight.data, scale.to(weight.device))
    else:
        value = _from_4bit(weight, name)
    plain = nn.Linear(*reversed(value.shape), bias=linear.bias is not None, device="meta")
    plain.weight = nn.Parameter(value.cpu().float(), requires_grad=False)
    if linear.bias is not None:
        plain.bias = as_float(linear.bias, f"{name}.bias")
    return plain


def _from_4bit(weight: Any, name: str) -> Tensor:
    state = weight.quant_state
    if state is None or is_packed(state):
        reason = (
            "is not quantised yet: move the model to its device first"
            if state is None
            else f"was repacked by bitsandbytes for evaluation on this CPU, which loses precision: {ELSEWHERE}"
        )
        raise CannotMerge(reason=f"{name} {reason}")
    return values_of(weight, state)
