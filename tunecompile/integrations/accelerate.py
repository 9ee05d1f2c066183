"""Layers that accelerate placed on devices (`device_map`): its hooks stay, and cut no graph.

accelerate wraps the `forward` of a placed layer and of every module inside, so that each moves its arguments to its
device. Dynamo skips the code that moves them, so a graph would end at each of them, and every wrapper is an object of
its own, for which a layer would be compiled anew. So the layer's own hook runs around the compiled layer. Those inside
have nothing left to move then, and are taken off for the length of the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from tunecompile.integrations.layer_host import LayerHost, Run
from tunecompile.notes import note

HOOK, FORWARD = "_hf_hook", "_old_forward"  #: where accelerate keeps a module's hook, and the forward that it wrapped


@dataclass(frozen=True)
class DeviceMapLayer(LayerHost):
    """A layer on one device."""

    wrapped: tuple[nn.Module, ...]  #: modules whose forward accelerate wrapped
    refused: str = ""
    engine = "accelerate"

    def call(self, run: Run, args: tuple, kwargs: dict[str, Any]) -> Any:
        """`run`, with arguments moved to the layer's device. Meanwhile each module inside has its own forward."""
        hook = getattr(self.layer, HOOK, None)
        if hook is not None:
            args, kwargs = hook.pre_forward(self.layer, *args, **kwargs)
        aside = [
            (module, forward)
            for module in self.wrapped
            if hasattr(module, FORWARD) and (forward := module.__dict__.pop("forward", None)) is not None
        ]
        for module, _ in aside:
            own = getattr(module, FORWARD)
            if (
                getattr(own, "__func__", None) is not type(module).forward
            ):  # a function that was set on this module alone
                module.__dict__["forward"] = own
        try:
            output = run(args, kwargs)
        finally:
            for module, forward in aside:
                module.__dict__["forward"] = forward
        return output if hook is None else hook.post_forward(self.layer, output)


def place(layer: nn.Module) -> DeviceMapLayer | None:
    """The host of a layer that accelerate placed; None where it did not."""
    # by `vars`: a wrapper may answer for the module that it wraps
    hooks = {module: hook for module in layer.modules() if (hook := vars(module).get(HOOK)) is not None}
    if not hooks:
        return None
    kinds = [
        kind for hook in hooks.values() for kind in getattr(hook, "hooks", [hook])
    ]  # there may be a sequence of them
    return DeviceMapLayer(layer, tuple(hooks), _why_not(kinds))


def _why_not(hooks: Sequence[Any]) -> str:
    """Why a layer with these hooks has to run as it is; empty where it can be compiled."""
    if not all(hasattr(hook, "execution_device") for hook in hooks):
        return note("unknown-hooks")
    if any(hook.offload for hook in hooks):
        return note("weights-loaded-per-call")
    if len({hook.execution_device for hook in hooks}) > 1:
        return note("modules-on-several-devices")
    return note("hook-without-gradients") if any(hook.no_grad for hook in hooks) else ""
