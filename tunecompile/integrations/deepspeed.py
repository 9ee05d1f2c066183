"""Layers whose weights DeepSpeed's ZeRO-3 gathers for each call: a layer at once, outside of what is compiled.

ZeRO-3 hooks every module inside a layer, to gather and free its weights alone. A graph would end at each of those
hooks, and every module would be compiled by itself. DeepSpeed also knows modules whose weights it takes all at once
(`set_z3_leaf_modules`): a layer becomes one of them, its own hooks run around the compiled layer, and those inside,
which have nothing left to gather then, are taken off for the length of the call.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tunecompile._torch.modules import HOOKS, linear
from tunecompile.integrations.layer_host import LayerHost, Run
from tunecompile.integrations.module_hooks import aside, call_around

LEAF = "_z3_leaf"  #: where DeepSpeed keeps that a module's weights are gathered at once
OWN = "deepspeed."  #: where its hooks come from
OUTPUTS = "deepspeed.runtime.utils"  #: and those on outputs


@dataclass(frozen=True)
class Zero3Layer(LayerHost):
    """A layer or head whose weights ZeRO-3 gathers at once."""

    inside: tuple[nn.Module, ...]  #: modules inside that DeepSpeed hooked
    marked: bool  #: whether DeepSpeed learned from us to gather its weights at once
    engine = "ZeRO-3"
    weights_stay = False
    gathers_for_loss = True

    def call(self, run: Run, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A call with the layer's hooks, and `run` for its forward. `run` sees the layer without them."""

        def alone(args: tuple, kwargs: dict) -> Any:
            with aside(self.layer, self.inside, lambda hook: not _is_deepspeeds(hook)):
                return run(args, kwargs)

        return call_around(self.layer, alone, args, kwargs)

    def has_other_hooks(self) -> bool:
        """Whether it has hooks that are not DeepSpeed's."""
        return any(not _is_deepspeeds(hook) for name in HOOKS for hook in getattr(self.layer, name).values())

    def release(self) -> None:
        """DeepSpeed gathers its weights as it did before."""
        if self.marked:
            vars(self.layer).pop(LEAF, None)


def in_parts(model: nn.Module) -> bool:
    """Whether weights of a model are distributed over several processes now."""
    return any(hasattr(p, "ds_id") and p.numel() != p.ds_numel for p in model.parameters())


def whole(weight: Tensor) -> Tensor:
    """A tensor of the shape that the weight has when it is gathered; on the meta device where it is not."""
    shape = getattr(weight, "ds_shape", None)
    return (
        weight
        if shape is None
        else torch.empty(shape, dtype=weight.dtype, device="meta", requires_grad=weight.requires_grad)
    )


def gathered(layer: nn.Module) -> Zero3Layer | None:
    """Have ZeRO-3 gather a layer's weights at once from now on.

    None where ZeRO-3 does not gather them, or gathers them for a module around the layer.
    """
    if not any(hasattr(parameter, "ds_id") for parameter in layer.parameters()):
        return None
    see_linears()
    if not _is_hooked(layer):
        return None
    marked = not getattr(layer, LEAF, False)
    if marked:
        setattr(layer, LEAF, True)
    return Zero3Layer(
        layer, tuple(module for module in layer.modules() if module is not layer and _is_hooked(module)), marked
    )


def _is_hooked(module: nn.Module) -> bool:
    return any(_is_deepspeeds(hook) for name in HOOKS for hook in getattr(module, name).values())


def is_its_own(hook: Any) -> bool:
    """Whether it is a hook of an engine on the outputs of its model, which sees the backward pass begin."""
    return getattr(hook, "__module__", None) == OUTPUTS


def _is_deepspeeds(hook: Callable) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith(OWN)


@functools.cache
def see_linears() -> None:
    """Have Dynamo read DeepSpeed's linear as the linear that it replaces.

    ZeRO-3 puts an autograd function in the place of `torch.nn.functional.linear`, for good (`memory_efficient_linear`
    in its configuration), which keeps no gathered weight for the backward pass. Neither does compiled code.
    """
    replaced = getattr(sys.modules.get("deepspeed.runtime.zero.linear"), "zero3_linear_wrap", None)
    if replaced is None:
        return

    @torch.compiler.substitute_in_graph(replaced)
    def plain(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(input, weight, bias)
