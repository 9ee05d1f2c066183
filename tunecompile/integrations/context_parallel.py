"""Context parallelism: every process has a part of each sequence, and only attention sees the others' parts.

torch's `context_parallel` puts a function of its own in the place of `F.scaled_dot_product_attention`, which sends keys and values around, and a new one
in every step: a graph that holds it would be compiled in every step, until Dynamo gives up. So the layers are compiled up to attention and behind it,
by a name of our own among the attention functions of transformers, which is called outside of graphs. Layers that do not ask there run as they are.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
import torch.nn.functional as F

INTERFACE = "tunecompile_outside"
OUTSIDE = "attention runs outside of what is compiled: context_parallel sends keys and values around"
REFUSED = "context_parallel sends keys and values around in attention, which is not called through the attention interface of transformers"


def is_shared() -> bool:
    """Whether attention is torch's that sends them around."""
    return (getattr(F.scaled_dot_product_attention, "__module__", None) or "").startswith(
        "torch.distributed.tensor.experimental"
    )


@torch.compiler.disable(reason="context_parallel sends keys and values around")
def attention(*args: Any, **kwargs: Any) -> Any:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(*args, **kwargs)


def can_run_outside(owner: Any) -> bool:
    """Whether the layers of this module ask transformers for attention; from now on they may ask for this."""
    interface = getattr(sys.modules.get("transformers"), "AttentionInterface", None)
    if (
        interface is None
        or not hasattr(getattr(owner, "config", None), "_attn_implementation_internal")
        or not getattr(owner, "_supports_attention_backend", False)
    ):
        return False
    interface.register(INTERFACE, attention)
    return True


def outside(padding: Any) -> contextlib.AbstractContextManager:
    """Around a layer of an owner that has a `Padding`: where `context_parallel` has taken attention's place, it is called outside of what is compiled."""
    if padding is None or not is_shared() or padding.owner.config._attn_implementation_internal != "sdpa":
        return contextlib.nullcontext()
    padding.shared = True
    return padding.attention(INTERFACE)
