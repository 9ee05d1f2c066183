"""The largest batch that a trainer may bring, by the settings of the Trainer (transformers, TRL) that is under way."""

from __future__ import annotations

from typing import Any

from tunecompile._torch.dynamo import under_way

_ROWS = "per_device_train_batch_size"
_LENGTHS = (("max_length",), ("max_seq_length",), ("max_prompt_length", "max_completion_length"))


def largest_batch(rows: int) -> int:
    """Tokens of the largest batch that the trainer under way may bring; 0 where no trainer is, or has no such limit.

    Args:
        rows: of the batch that it brings now. (A preference trainer's batch has two for each of its examples.)
    """
    for frame in under_way():
        settings = getattr(frame.f_locals.get("self"), "args", None)
        if _count(settings, _ROWS):
            return max(rows, _count(settings, _ROWS)) * _longest(settings)
    return 0


def _longest(settings: Any) -> int:
    """Tokens of a row at most; 0 where the settings do not say."""
    lengths = (sum(_count(settings, name) for name in names) for names in _LENGTHS)
    return next(filter(None, lengths), 0)


def _count(settings: Any, name: str) -> int:
    value = getattr(settings, name, None)
    return value if isinstance(value, int) else 0
