"""diffusers' models: who checkpoints their blocks."""

from __future__ import annotations

from typing import Any


def is_checkpoint_of_owner(function: Any) -> bool:
    """Whether it is the function that `enable_gradient_checkpointing` gives a model: torch's checkpoint of a block.

    The model calls it with each block and the block's arguments by position.
    """
    name, module = getattr(function, "__name__", ""), getattr(function, "__module__", "")
    return (name, module) == ("_gradient_checkpointing_func", "diffusers.models.modeling_utils")
