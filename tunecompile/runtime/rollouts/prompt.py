"""The prompt's forward, which fills the cache. Neighbouring rows of one prompt are computed once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tunecompile.integrations import generation

MOST = 64  #: rows up to which their number is rounded to a power of two; beyond, to a multiple of half as many


def rounded_count(count: int) -> int:
    """The number of rows that so many are computed as."""
    return 1 << (count - 1).bit_length() if count <= MOST else -(-count // (MOST // 2)) * (MOST // 2)


def rounded(prompt: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """Prompts and arguments with further rows, so that few numbers of rows are ever compiled.

    A further row repeats the last prompt, whose forward is computed once for both, and has ended when it begins.

    Args:
        prompt: int64 [rows, T].
        kwargs: of the model's first call, `generation.by_rows`.
    """
    count = len(prompt)
    rows = torch.arange(rounded_count(count), device=prompt.device).clamp(max=count - 1)
    return prompt[rows], {**kwargs, **generation.rows_of(kwargs, rows)}


def fill(model: Any, prompt: Tensor, config: Any, kwargs: dict[str, Any], cache: Any) -> Tensor:
    """Fill a cache, and return the logits of the first new token.

    GRPO has several rows of each prompt. Their forward is that of one row, whose part of the cache is repeated.

    Args:
        model: transformers' model.
        prompt: int64 [rows, T].
        config: of the generation.
        kwargs: of the model's first call. They get the cache, and are those of a step afterwards.
        cache: in fixed memory.

    Returns:
        fp32 [rows, V].
    """
    of = _first_of_each(prompt, kwargs) if generation.by_rows(kwargs) else None
    given, ids = dict(kwargs), prompt
    if of is not None:
        firsts = of.unique()
        ids = prompt[firsts]
        given |= generation.rows_of(kwargs, firsts)
    for each in (given, kwargs):
        each[generation.cache_name(kwargs)] = cache
    output = model._prefill(ids, config, given)
    kwargs |= model._update_model_kwargs_for_generation(output, kwargs)
    logits = output.logits[:, -1].to(copy=True, dtype=torch.float32)
    if of is None:
        return logits
    place = torch.searchsorted(firsts, of)  # of each row among the firsts
    generation.repeat_rows(cache, place)
    return logits[place]


def _first_of_each(prompt: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
    """The first row of the prompt of each row, int64 [rows]; None where all prompts differ."""
    same = (prompt[1:] == prompt[:-1]).all(-1)
    if (mask := kwargs.get("attention_mask")) is not None:
        same &= (mask[1:] == mask[:-1]).all(-1)
    if not bool(same.any()):
        return None
    rows = torch.arange(len(prompt), device=prompt.device)
    return torch.cat([rows[:1], rows[1:].where(~same, 0)]).cummax(0).values
