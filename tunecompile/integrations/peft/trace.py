"""What of other packages Dynamo cannot trace, or guards too closely, and what it traces in its place.

By `torch.compiler.substitute_in_graph`: outside a trace the originals run.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tunecompile._torch.dynamo import is_compiling
from tunecompile._torch.modules import linear
from tunecompile.integrations.bitsandbytes import STATE, from_4_bits, is_packed, is_readable


def substitute() -> None:
    """Register the substitutes, for the packages that are imported by now."""
    if is_compiling():  # by the user, around us
        return
    for module, name, make in (
        ("peft.utils.integrations", "dequantize_module_weight", _weight_of),
        ("peft.utils.other", "transpose", _transposed),
        ("bitsandbytes.autograd._functions", "matmul_4bit", _product_of),
    ):
        if (original := getattr(sys.modules.get(module), name, None)) is not None:
            _register(original, make)


def separate_names(layer: nn.Module) -> None:
    """Give each adapted module in a layer a list of its own with the names of its active adapters.

    PEFT hands out one list to all modules, or each its own, depending on how adapters were switched last. Of a list
    that several modules share, Dynamo guards that they do, and so compiled each kind of call once more after a switch.
    """
    seen: set[int] = set()
    for module in layer.modules():
        names = vars(module).get("_active_adapter")
        if type(names) is not list:
            continue
        if id(names) in seen:
            module._active_adapter = list(names)
        seen.add(id(names))


@functools.cache
def _register(original: Callable, make: Callable[[Callable], Callable]) -> None:
    """`make` gets a copy of the original, which Dynamo traces as it would have traced the original."""
    itself = types.FunctionType(
        original.__code__, original.__globals__, original.__name__, original.__defaults__, original.__closure__
    )
    # TypeError: it has other parameters by now. ValueError: it has a substitute already, by another package
    with contextlib.suppress(TypeError, ValueError):
        torch.compiler.substitute_in_graph(original)(make(itself))


def _weight_of(itself: Callable) -> Callable:
    """A linear's weight, of which DoRA takes the norm.

    PEFT reads the name of the module that its class comes from, and the class of a tensor of bitsandbytes: a graph
    would end at each of these, eighteen times a layer.
    """

    def weight_of(module: nn.Module) -> Any:
        weight = module.weight
        if type(weight) is nn.Parameter and not hasattr(module, "W_q"):
            return weight
        if len(getattr(getattr(weight, STATE, None), "shape", ())) == 2 and is_readable(weight, getattr(weight, STATE)):
            return from_4_bits(weight, getattr(weight, STATE))
        state = getattr(module, "state", None)
        # bitsandbytes' 8 bits, once its linear has run
        if weight.dtype == torch.int8 and getattr(state, "SCB", None) is not None:
            return torch.ops.bitsandbytes.int8_vectorwise_dequant.default(weight.data, state.SCB)
        return itself(module)

    return weight_of


def _product_of(itself: Callable) -> Callable:
    """A product with a packed weight, as the pass `nf4` writes it.

    Dynamo would trace forward and backward of bitsandbytes' autograd function as a graph each, at every linear.
    """

    def product(A: Tensor, B: Tensor, quant_state: Any, out: Any = None, bias: Any = None) -> Tensor:
        whole = len(quant_state.shape) == 2 and A.shape[-1] == quant_state.shape[1]
        if not whole or out is not None or is_packed(quant_state) or not is_readable(B, quant_state):
            return itself(A, B, quant_state, out, bias)
        return linear(A, from_4_bits(B, quant_state, A.dtype), bias)

    return product


def _transposed(itself: Callable) -> Callable:
    """PEFT makes a parameter of a transposed weight: a new one at every call, whose gradient is never read.

    Dynamo makes no parameter in a graph.
    """

    def transposed(weight: Any, fan_in_fan_out: bool) -> Tensor:
        return (
            weight.T.detach() if fan_in_fan_out and isinstance(weight, nn.Parameter) else itself(weight, fan_in_fan_out)
        )

    return transposed
