"""Layers whose weights FSDP2 gathers for each call (`fully_shard`).

Its hooks gather a unit's weights before its forward, free them behind it, gather them again before its backward, and
send gradients behind that. All that is sent is sent by these hooks. So they are called around the compiled layer, and
between them the layer is one process's own matter.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tunecompile._torch.distributed import fsdp_forget_call, fsdp_groups, fsdp_groups_behind
from tunecompile._torch.modules import HOOKS
from tunecompile.integrations.layer_host import LayerHost, Run
from tunecompile.integrations.module_hooks import aside, call_around
from tunecompile.notes import note
from tunecompile.planner.device_memory import part_bytes

_OWN = "torch.distributed.fsdp"  #: where its hooks come from
#: where hooks come from that send nothing. Of hooks from elsewhere it is not known
_LOCAL = ("tunecompile.", "transformers.utils.output_capturing", "bitsandbytes.nn.parametrize")


@dataclass(frozen=True)
class FsdpLayer(LayerHost):
    """A layer that `fully_shard` was called for, and for no module inside it."""

    alone: bool  #: whether no module inside sends anything either
    engine = "FSDP2"
    weights_stay = False

    def around(self, run: Run, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A call with the layer's hooks, and `run` for its forward. After an error it may be called again."""
        try:
            return call_around(self.layer, run, args, kwargs)
        except BaseException:
            fsdp_forget_call(self.layer)
            raise

    def call(self, run: Run, args: tuple, kwargs: dict[str, Any]) -> Any:
        """`run`, which sees the layer without hooks."""
        with aside(self.layer):
            return run(args, kwargs)


def gathers_inside(model: nn.Module) -> bool:
    """Whether some of its modules are gathered while it runs."""
    return any(fsdp_groups(module) is not None for module in model.modules() if module is not model)


def unit(layer: nn.Module) -> FsdpLayer | None:
    """The host of a layer that `fully_shard` was called for.

    None where it was not, or was also called for modules inside, which gather weights while the layer runs.
    """
    groups = fsdp_groups(layer)
    if groups is None or gathers_inside(layer):
        return None
    held = {id(param.sharded_param): param for group in groups for param in group.fsdp_params}
    # linears that are parts of a linear (tensor parallelism) send their outputs
    ours = all(
        not held[id(p)].is_dtensor if id(p) in held else not hasattr(p, "device_mesh") for p in layer.parameters()
    )
    inside = (module for module in layer.modules() if module is not layer)
    hooks = (hook for module in inside for name in HOOKS for hook in getattr(module, name).values())
    return FsdpLayer(layer, ours and all(_home(hook).startswith(_LOCAL) for hook in hooks))


def _home(hook: Any) -> str:
    """The module that a hook was written in."""
    return getattr(hook, "__module__", None) or ""


@dataclass(frozen=True)
class FsdpHead(LayerHost):
    """A head whose weight stays gathered from its call to the backward pass. Its hooks run around the loss.

    It may be sharded by itself, or with other modules (`fully_shard([norm, head], reshard_after_forward=False)`, as
    accelerate does).
    """

    policy: Any  #: of mixed precision, for its weight; None where FSDP1 holds it
    refused: str = ""
    engine = "FSDP2"
    weights_stay = False
    gathers_for_loss = True

    def call(self, run: Run, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The output of `run` itself: the dtype in which hooks return logits is not a loss's."""
        made = []

        def kept(args: tuple, kwargs: dict) -> Any:
            made.append(run(args, kwargs))
            return made[-1]

        call_around(self.layer, kept, args, kwargs)
        return made[-1]

    def product_dtype(self, hidden: Tensor) -> torch.dtype:
        """As `fully_shard`'s mixed precision has it."""
        policy, weight = self.policy, self.layer.weight
        given = (policy.cast_forward_inputs and policy.param_dtype) or hidden.dtype
        return torch.promote_types(given, policy.param_dtype or weight.dtype)

    def has_other_hooks(self) -> bool:
        """Whether it has hooks that are not FSDP2's."""
        return any(not _home(hook).startswith(_OWN) for name in HOOKS for hook in getattr(self.layer, name).values())


def is_its_own(hook: Any) -> bool:
    """Whether FSDP registered it, of whichever version."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return _home(hook).startswith(_OWN)


def waits_for_backward(hook: Any) -> bool:
    """Whether it is a hook of FSDP2 on outputs, for modules whose weights stay gathered until the backward pass.

    FSDP2 calls such a hook before the backward pass of these modules.
    """
    groups = fsdp_groups_behind(hook)
    return groups is not None and not any(group._reshard_after_forward for group in groups)


def held(head: nn.Module) -> FsdpHead | None:
    """The host of a head that `fully_shard` was called for, alone or with others, or that has part of a flat weight.

    None of any other head.
    """
    groups = fsdp_groups(head)
    if any(map(_is_part_of_another, head.modules())):
        return FsdpHead(head, None, note("head-in-fsdp1"))
    if not groups:
        return None
    policy = _policy(head, groups[0])
    return FsdpHead(head, policy, _why_not(groups[0], policy))


def _policy(head: nn.Module, group: Any) -> Any:
    """The mixed precision of a head's weight: from torch 2.15 on, those of a group may have different ones."""
    own = {id(parameter) for parameter in head.parameters(recurse=False)}
    params = group.fsdp_params
    return next(
        (p for p in params if own & {id(p.sharded_param), id(getattr(p, "_unsharded_param", None))}), params[0]
    ).mp_policy


def _why_not(group: Any, policy: Any) -> str:
    """Why a head of this group has to run as it is; empty where its loss can be computed from hidden states."""
    if group._reshard_after_forward:
        return note("head-resharded")
    return "" if policy.output_dtype in (None, policy.param_dtype) else note("logits-in-other-dtype")


def _is_part_of_another(module: nn.Module) -> bool:
    """Whether its weight is a view of another tensor: FSDP1 joins and gathers weights, and leaves views of them."""
    weight = module._parameters.get("weight", vars(module).get("weight"))
    return isinstance(weight, Tensor) and not isinstance(weight, nn.Parameter) and weight._base is not None


class Shards:
    """Bytes of a model's parameters, of which FSDP2 holds a part in each process and gathers the whole for a while.

    Of all others, and of those that are split in other ways (tensor parallelism), the part that this process holds
    counts.
    """

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
        """A parameter as it is between steps, when nothing is gathered: optimizers see this tensor."""
        return self.known[id(parameter)][0].sharded_param if id(parameter) in self.known else parameter

    def graded(self, parameter: Tensor) -> bool:
        """Whether a parameter's gradient of this step is there already, in the form in which it stays."""
        param, group = self.known.get(id(parameter), (None, None))
        if param is None or group.reduce_grads:
            return self.at_rest(parameter).grad is not None
        gathered = getattr(param, "_unsharded_param", None)
        return param.unsharded_accumulated_grad is not None or (gathered is not None and gathered.grad is not None)

    def gradient_bytes(self, parameters: Iterable[Tensor]) -> int:
        """Bytes of gradients that remain after a layer's backward.

        Gradients are shards, or whole where they are accumulated without being sent (`set_requires_gradient_sync`).
        """
        unsent = {id(p) for p in parameters if id(p) in self.known and not self.known[id(p)][1].reduce_grads}
        return sum(self._whole_bytes(p) if id(p) in unsent else part_bytes(self.at_rest(p)) for p in parameters)

    def to_come(self, ungraded: Sequence[Tensor], beside: Iterable[Tensor]) -> int:
        """Bytes of gradients that are not there yet.

        Parameters outside the layers stay gathered through the backward pass. Their gradients are whole as long,
        whatever is there of earlier ones.

        Args:
            ungraded: parameters without a gradient.
            beside: trained parameters outside the layers.
        """
        whole = {id(p): p for p in beside if id(p) in self.known}
        return self.gradient_bytes([p for p in ungraded if id(p) not in whole]) + sum(
            map(self._whole_bytes, whole.values())
        )

    def passing(self, layers: Sequence[nn.Module]) -> int:
        """Bytes of gathered layers, beyond the memory in use where the first one begins.

        The first layer is whole then, and the buffer that it arrived in is still there: a larger layer counts twice by
        its difference. And one layer's whole gradients are being sent while another's are computed.
        """
        gathered = [self._gathered_bytes(layer.parameters()) for layer in layers]
        return 2 * (max(gathered) - gathered[0]) + max(
            self._gathered_bytes(p for p in layer.parameters() if p.requires_grad) for layer in layers
        )

    def _gathered_bytes(self, parameters: Iterable[Tensor]) -> int:
        return sum(self._whole_bytes(p) for p in parameters if id(p) in self.known)

    def _whole_bytes(self, parameter: Tensor) -> int:
        param, _ = self.known[id(parameter)]
        dtype = getattr(param, "param_dtype", None) or parameter.dtype  # known from the first forward on
        return param._orig_size.numel() * dtype.itemsize
