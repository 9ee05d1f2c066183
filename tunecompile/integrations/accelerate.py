"""Layers that accelerate placed on devices (`device_map`): its hooks stay, and cut no graph.

accelerate wraps the `forward` of a placed layer and of every module inside, so that each moves what it is given to its device. Dynamo is kept out of
what moves it, so a graph would end at each of them, and every wrapper is an object of its own, for which a layer would be compiled anew. So
the layer's own hook runs around the compiled layer; those inside have nothing left to move then, and stand aside for the length of the call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from tunecompile.notes import Note, note

HOOK, FORWARD = "_hf_hook", "_old_forward"  #: where accelerate keeps a module's hook, and the forward that it wrapped


@dataclass(frozen=True)
class DeviceMapLayer:
    """A layer on one device, the modules whose forward is wrapped, and why the layer has to run as it is, if it does."""

    layer: nn.Module
    wrapped: tuple[nn.Module, ...]
    refused: Note | None = None

    def call(self, run: Callable[[tuple, dict], Any], args: tuple, kwargs: dict) -> Any:
        """What `run` gives for what a call is given, on the layer's device. Meanwhile each forward is the module's own."""
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
            ):  # a function that somebody set on this module alone
                module.__dict__["forward"] = own
        try:
            output = run(args, kwargs)
        finally:
            for module, forward in aside:
                module.__dict__["forward"] = forward
        return output if hook is None else hook.post_forward(self.layer, output)


def place(layer: nn.Module) -> DeviceMapLayer | None:
    """Where accelerate placed a layer; None where it did not."""
    hooks = {
        module: hook for module in layer.modules() if (hook := vars(module).get(HOOK)) is not None
    }  # a wrapper may answer for what it wraps
    if not hooks:
        return None
    kinds = [kind for hook in hooks.values() for kind in getattr(hook, "hooks", [hook])]  # several may stand in a row
    refused = (
        note("unknown-hooks")
        if not all(hasattr(hook, "execution_device") for hook in kinds)
        else note("weights-loaded-per-call")
        if any(hook.offload for hook in kinds)
        else note("modules-on-several-devices")
        if len({hook.execution_device for hook in kinds}) > 1
        else note("hook-without-gradients")
        if any(hook.no_grad for hook in kinds)
        else None
    )
    return DeviceMapLayer(layer, tuple(hooks), refused)
