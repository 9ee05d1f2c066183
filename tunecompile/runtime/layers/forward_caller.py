"""The slot of a module that calls the owner of layers by its `forward`, past the owner's own slot."""

from __future__ import annotations

from typing import Any

from torch import nn

from tunecompile._torch.dynamo import is_compiling
from tunecompile._torch.modules import call_original


class ForwardCaller:
    """While the module runs, the owner's `forward` is a call of the owner.

    Args:
        module: whose slot this is.
        owner: of layers.
        hooks: how many forward hooks the owner has from us; a `forward` would run none of the user's.
    """

    def __init__(self, module: nn.Module, owner: nn.Module, hooks: int):
        self.module, self.owner, self.hooks = module, owner, hooks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = vars(self.owner)
        hooked = len(self.owner._forward_hooks) + len(self.owner._forward_pre_hooks) > self.hooks
        if is_compiling() or hooked or "forward" in own:
            return call_original(self.module, *args, **kwargs)
        own["forward"] = self._call_owner
        try:
            return call_original(self.module, *args, **kwargs)
        finally:
            own.pop("forward", None)

    def _call_owner(self, *args: Any, **kwargs: Any) -> Any:
        vars(self.owner).pop("forward", None)
        return self.owner(*args, **kwargs)
