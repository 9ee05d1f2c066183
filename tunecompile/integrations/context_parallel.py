"""Context parallelism: every process has a part of each sequence, and only attention exchanges the parts.

torch's `context_parallel` replaces `F.scaled_dot_product_attention` by a function that sends keys and values around, a
new one in every step: a graph that contains it would be recompiled in every step, until Dynamo's limit. So layers are
compiled up to attention and behind it: attention is called outside of graphs, under a name of our own among the
attention functions of transformers. Layers that do not use transformers' attention interface run as they are.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from tunecompile.integrations.registered.names import NAME

#: by the name of an implementation, that of the same outside of graphs
OUTSIDE = {"sdpa": "tunecompile_outside", NAME: "tunecompile_registered_outside"}


def is_shared() -> bool:
    """Whether `context_parallel` has replaced attention."""
    return (getattr(F.scaled_dot_product_attention, "__module__", None) or "").startswith(
        "torch.distributed.tensor.experimental"
    )


@torch.compiler.disable(reason="context_parallel sends keys and values around")
def attention(*args: Any, **kwargs: Any) -> Any:
    """transformers' attention for "sdpa", outside of graphs."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(*args, **kwargs)


@torch.compiler.disable(reason="context_parallel sends keys and values around")
def registered(*args: Any, **kwargs: Any) -> Any:
    """The attention of our name, outside of graphs."""
    from transformers import AttentionInterface

    return AttentionInterface()[NAME](*args, **kwargs)


def can_run_outside(owner: Any) -> bool:
    """Whether the layers of this module use transformers' attention interface. Ours is registered there from now on."""
    interface = getattr(sys.modules.get("transformers"), "AttentionInterface", None)
    if (
        interface is None
        or not hasattr(getattr(owner, "config", None), "_attn_implementation_internal")
        or not getattr(owner, "_supports_attention_backend", False)
    ):
        return False
    interface.register(OUTSIDE["sdpa"], attention)
    interface.register(OUTSIDE[NAME], registered)
    return True


@contextlib.contextmanager
def _attention_outside(owner: Any) -> Iterator[None]:
    """Inside, layers call `attention`. Each config is put back to what it was."""
    found = [vars(module).get("config") for module in owner.modules()]
    configs = list({id(c): c for c in found if hasattr(c, "_attn_implementation_internal")}.values())
    before = [(config, config._attn_implementation_internal) for config in configs]
    for config, name in before:
        config._attn_implementation_internal = OUTSIDE.get(name, OUTSIDE["sdpa"])
    try:
        yield
    finally:
        for config, name in before:
            config._attn_implementation_internal = name


def outside(padding: Any) -> contextlib.AbstractContextManager:
    """Around a layer whose owner has an `Unpadding`: where `context_parallel` has replaced attention, it runs outside
    of compiled code.
    """
    if padding is None or not is_shared() or padding.owner.config._attn_implementation_internal not in OUTSIDE:
        return contextlib.nullcontext()
    padding.shared = True
    return _attention_outside(padding.owner)
