"""The prompt's forward, which fills the cache.

Neighbouring rows of one prompt are computed once. Others are computed in groups of rows of similar lengths, so that few
tokens of padding are, and no more memory is needed than for a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tunecompile.integrations import generation, transformers

TOKENS = 4096  #: of a group of rows: more are hardly faster
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
    alone = generation.by_rows(kwargs)
    of = _first_of_each(prompt, kwargs) if alone else None
    given, ids = dict(kwargs), prompt
    if of is not None:
        firsts = of.unique()
        ids = prompt[firsts]
        given |= generation.rows_of(kwargs, firsts)
    # A caller who gets the cache sees padding as transformers leaves it
    if alone and not config.return_dict_in_generate and transformers.takes_parts(cache):
        logits, output = _in_groups(model, ids, config, given, cache)
    else:
        given[generation.cache_name(kwargs)] = cache
        output = model._prefill(ids, config, given)
        logits = output.logits[:, -1].to(copy=True, dtype=torch.float32)
    kwargs |= model._update_model_kwargs_for_generation(output, kwargs)
    kwargs[generation.cache_name(kwargs)] = cache
    if of is None:
        return logits
    place = torch.searchsorted(firsts, of)  # of each row among the firsts
    transformers.repeat_rows(cache, place)
    return logits[place]


def _in_groups(model: Any, ids: Tensor, config: Any, kwargs: dict[str, Any], cache: Any) -> tuple[Tensor, Any]:
    """Rows of similar lengths at a time, without the padding in front of all of them.

    Returns:
        The logits, as `fill`; and what the model returned of the last group.
    """
    mask, logits, output = kwargs.get("attention_mask"), None, None
    begins = [0] * len(ids) if mask is None else mask.int().argmax(1).tolist()
    for rows, begin in groups(begins, ids.shape[1]):
        numbers = torch.tensor(rows, device=ids.device)
        part = transformers.static_cache(model, ids.shape[1] - begin)
        given = {**kwargs, **generation.rows_of(kwargs, numbers, begin), generation.cache_name(kwargs): part}
        output = model._prefill(ids[numbers, begin:], config, given)
        made = output.logits[:, -1]
        transformers.put_rows(cache, part, numbers, len(ids), ids.shape[1])
        logits = made.new_empty(len(ids), made.shape[1], dtype=torch.float32) if logits is None else logits
        logits[numbers] = made.float()
    assert logits is not None  # there are rows
    return logits, output


def groups(begins: Sequence[int], length: int) -> list[tuple[list[int], int]]:
    """The rows that are computed together, and the column in which they begin.

    Args:
        begins: the first column of each row that is no padding.
        length: columns.
    """
    made: list[tuple[list[int], int]] = []
    for row in sorted(range(len(begins)), key=begins.__getitem__):
        rows, begin = made[-1] if made else ([], 0)
        longest = length - begin
        if rows and (len(rows) + 1) * longest <= TOKENS and 2 * (length - begins[row]) >= longest:
            rows.append(row)
        else:
            made.append(([row], begins[row]))
    return made


def _first_of_each(prompt: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
    """The first row of the prompt of each row, int64 [rows]; None where all prompts differ."""
    same = (prompt[1:] == prompt[:-1]).all(-1)
    if (mask := kwargs.get("attention_mask")) is not None:
        same &= (mask[1:] == mask[:-1]).all(-1)
    if not bool(same.any()):
        return None
    rows = torch.arange(len(prompt), device=prompt.device)
    return torch.cat([rows[:1], rows[1:].where(~same, 0)]).cummax(0).values
