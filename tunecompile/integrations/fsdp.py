"""Layers whose weights FSDP2 gathers for each call (`fully_shard`).

Its hooks gather a unit's weights before its forward, free them behind it, gather them again before its backward, and send gradients behind that. All that
is sent is sent by these hooks. So they are called around the compiled layer, and between them the layer is one process's own matter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tunecompile._torch.distributed import fsdp_groups, fsdp_groups_behind
from tunecompile._torch.modules import HOOKS
from tunecompile.integrations.module_hooks import aside, call_around
from tunecompile.notes import Note, note
from tunecompile.planner.device_memory import part_bytes

_OWN = "torch.distributed.fsdp"  #: where its hooks come from
_LOCAL = (
    "tunecompile.",
    "transformers.utils.output_capturing",
)  #: where hooks come from that send nothing; of others nobody knows


@dataclass(frozen=True)
class FsdpLayer:
    """A layer that `fully_shard` was called for, and for nothing inside of it."""

    layer: nn.Module
    alone: bool  #: whether nothing inside sends anything either
    refused: Note | None = None

    def around(self, run: Callable[[tuple, dict], Any], args: tuple, kwargs: dict) -> Any:
        """What the layer's hooks make of a call, with `run` for its forward."""
        return call_around(self.layer, run, args, kwargs)

    def call(self, run: Callable[[tuple, dict], Any], args: tuple, kwargs: dict) -> Any:
        """`run`, to which the layer has no hooks."""
        with aside(self.layer):
            return run(args, kwargs)


def gathers_inside(model: nn.Module) -> bool:
    """Whether some of its modules are gathered while it runs."""
    return any(fsdp_groups(module) is not None for module in model.modules() if module is not model)


def unit(layer: nn.Module) -> FsdpLayer | None:
    """None where `fully_shard` was not called for this layer, or for modules inside as well, which gather while it runs."""
    groups = fsdp_groups(layer)
    if groups is None or gathers_inside(layer):
        return None
    held = {id(param.sharded_param): param for group in groups for param in group.fsdp_params}
    ours = all(
        not held[id(p)].is_dtensor if id(p) in held else not hasattr(p, "device_mesh") for p in layer.parameters()
    )  # linears that are parts send what they make
    hooks = [
        hook
        for module in layer.modules()
        if module is not layer
        for name in HOOKS
        for hook in getattr(module, name).values()
    ]
    return FsdpLayer(
        layer, ours and all((getattr(hook, "__module__", None) or "").startswith(_LOCAL) for hook in hooks)
    )


@dataclass(frozen=True)
class FsdpHead:
    """A head whose weight stays gathered from its call to the backward pass, alone or as one of several modules (`fully_shard([norm, head], reshard_after_forward=False)`,
    as accelerate does). Its hooks run around the loss then."""

    layer: nn.Module
    group: Any
    refused: Note | None = None
    engine = "FSDP2"

    def call(self, run: Callable[[tuple, dict], Any], args: tuple, kwargs: dict) -> Any:
        """What `run` gives, as it gives it: the dtype in which hooks return logits is not a loss's."""
        made = []

        def kept(args: tuple, kwargs: dict) -> Any:
            made.append(run(args, kwargs))
            return made[-1]

        call_around(self.layer, kept, args, kwargs)
        return made[-1]

    def dtype(self, hidden: Tensor) -> torch.dtype:
        """In which it multiplies hidden states by its weight, as `fully_shard`'s mixed precision has it."""
        policy, weight = self.group.mp_policy, self.layer.weight
        given = (policy.cast_forward_inputs and policy.param_dtype) or hidden.dtype
        return torch.promote_types(given, policy.param_dtype or weight.dtype)

    def others(self) -> bool:
        """Whether it has hooks that are not FSDP2's."""
        return any(
            not (getattr(hook, "__module__", None) or "").startswith(_OWN)
            for name in HOOKS
            for hook in getattr(self.layer, name).values()
        )

    def let_go(self) -> None:
        """Nothing was changed."""


def is_its_own(hook: Any) -> bool:
    """Whether FSDP registered it, of whichever version."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return (getattr(hook, "__module__", None) or "").startswith(_OWN)


def waits_for_backward(hook: Any) -> bool:
    """Whether it is FSDP2's own, to be called before the backward pass of modules whose weights stay gathered until then."""
    groups = fsdp_groups_behind(hook)
    return groups is not None and not any(group._reshard_after_forward for group in groups)


def held(head: nn.Module) -> FsdpHead | None:
    """None where `fully_shard` was not called for this head, by itself or among others, and its weight is no part of a flat one either."""
    groups = fsdp_groups(head)
    if any(map(_is_part_of_another, head.modules())):
        return FsdpHead(
            head,
            None,
            note("head-in-fsdp1"),
        )
    if not groups:
        return None
    policy = groups[0].mp_policy
    why = (
        note("head-resharded")
        if groups[0]._reshard_after_forward
        else note("logits-in-other-dtype")
        if policy.output_dtype not in (None, policy.param_dtype)
        else None
    )
    return FsdpHead(head, groups[0], why)


def _is_part_of_another(module: nn.Module) -> bool:
    """Whether its weight is a view, as FSDP1 makes one of the weights that it joined and gathered."""
    weight = module._parameters.get("weight", vars(module).get("weight"))
    return isinstance(weight, Tensor) and not isinstance(weight, nn.Parameter) and weight._base is not None


class Shards:
    """Bytes of a model's parameters where FSDP2 holds a part of each, and gathers them for a while. Of all others, and of those that are split in
    other ways (tensor parallelism), what this process holds of them."""

    def __init__(self, model: nn.Module | None = None):
        held = [
            (param, group)
            for module in (model.modules() if model is not None else ())
            for group in fsdp_groups(module) or ()
            for param in group.fsdp_params
        ]
        self.known = {
            id(tensor): (param, group)
            for param, group in held
            for tensor in (param.sharded_param, getattr(param, "_unsharded_param", None))
            if tensor is not None
        }

    def at_rest(self, parameter: Tensor) -> Tensor:
        """As it is from step to step, when nothing is gathered: what optimizers see."""
        return self.known[id(parameter)][0].sharded_param if id(parameter) in self.known else parameter

    def graded(self, parameter: Tensor) -> bool:
        """Whether the gradient that stays is there."""
        param, group = self.known.get(id(parameter), (None, None))
        if param is None or group.reduce_grads:
            return self.at_rest(parameter).grad is not None
        gathered = getattr(param, "_unsharded_param", None)
        return param.unsharded_accumulated_grad is not None or (gathered is not None and gathered.grad is not None)

    def gradient_bytes(self, parameters: Iterable[Tensor]) -> int:
        """That stay behind a layer's backward: shards, or all of them where they are accumulated without being sent (`set_requires_gradient_sync`)."""
        unsent = {id(p) for p in parameters if id(p) in self.known and not self.known[id(p)][1].reduce_grads}
        return sum(self._whole_bytes(p) if id(p) in unsent else part_bytes(self.at_rest(p)) for p in parameters)

    def to_come(self, ungraded: Sequence[Tensor], beside: Iterable[Tensor]) -> int:
        """Bytes of gradients that are not there yet. Parameters beside the layers stay gathered through the backward pass, and their gradients are whole as
        long, whatever is there of earlier ones."""
        whole = {id(p): p for p in beside if id(p) in self.known}
        return self.gradient_bytes([p for p in ungraded if id(p) not in whole]) + sum(
            map(self._whole_bytes, whole.values())
        )

    def passing(self, layers: Sequence[nn.Module]) -> int:
        """Bytes of gathered layers, beside what is there where the first one begins. It is whole then, and what it arrived in is there as well: a larger layer
        counts twice by what it has more. And one layer's whole gradients are on their way while another's are made."""
        gathered = [self._gathered_bytes(layer.parameters()) for layer in layers]
        return 2 * (max(gathered) - gathered[0]) + max(
            self._gathered_bytes(p for p in layer.parameters() if p.requires_grad) for layer in layers
        )

    def _gathered_bytes(self, parameters: Iterable[Tensor]) -> int:
        return sum(self._whole_bytes(p) for p in parameters if id(p) in self.known)

    def _whole_bytes(self, parameter: Tensor) -> int:
        param, _ = self.known[id(parameter)]
        return (
            param._orig_size.numel() * (getattr(param, "param_dtype", None) or parameter.dtype).itemsize
        )  # known from the first forward on
