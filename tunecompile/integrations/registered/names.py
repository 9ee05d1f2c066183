"""The name, and how a copy of a model does without it."""

from __future__ import annotations

from typing import Any

from torch import nn

NAME = "tunecompile"


def unregistered(model: nn.Module) -> None:
    """Give a copy of a model transformers' own attention and experts, to compare ours with.

    Args:
        model: whose configs are its own.
    """
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "_attn_implementation_internal", None) == NAME:
            by_torch = getattr(module, "_supports_sdpa", False) and not getattr(config, "attn_logit_softcapping", None)
            config._attn_implementation_internal = "sdpa" if by_torch else "eager"
        if getattr(config, "_experts_implementation_internal", None) == NAME:
            config._experts_implementation_internal = "grouped_mm"
