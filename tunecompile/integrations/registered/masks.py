"""Masks for attention by the name `tunecompile`: as for torch's function, or to be added to scores.

transformers makes masks by the function of this name for every model, also for one whose code has attention of its own
and adds the mask to its scores. A mask of bools would be added as ones and zeros there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import eager_mask, sdpa_mask

_by_name: dict[type, bool] = {}  #: whether models of a class of configs call attention by name


def mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """The mask of one call, with transformers' arguments; None where all rows are plainly causal, or see everything.

    Where there are more keys than queries there always is one, so that queries left out later have the right keys.
    """
    kind = type(kwargs.get("config"))
    if kind not in _by_name:
        models = [each for each in _below(PreTrainedModel) if each.config_class is kind]
        _by_name[kind] = bool(models) and all(each._supports_attention_backend for each in models)
    if not _by_name[kind]:
        return eager_mask(*args, **kwargs)
    queries = kwargs["q_length"] if "q_length" in kwargs else len(kwargs["cache_position"])  # transformers 5.0
    if queries != kwargs["kv_length"]:
        kwargs["allow_is_causal_skip"] = False
    return sdpa_mask(*args, **kwargs)


def _below(kind: type) -> Iterator[type]:
    for each in kind.__subclasses__():
        yield each
        yield from _below(each)
