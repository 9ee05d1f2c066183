"""Calls of `generate`, and pairs of models to compare them by."""

import copy
import functools

import torch

import tunecompile
from tests.runtime.rollouts.recorder import loop_of
from tests.support import zoo
from tests.support.models.pairs import without_mlps

ENDS = (7, 9, 30, 31, 200)
#: of each kind of cache and of positions one; the others are slow
QUICK = ("gemma3", "qwen3_5", "gpt_oss", "bloom")
#: that keep no cache of a fixed size
LEFT = ("mpt", "gpt_neo")


def prompts(rows: int = 3, length: int = 11) -> dict[str, torch.Tensor]:
    """Padded on the left."""
    ids = torch.randint(3, 200, (rows, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1:2, :4] = mask[2:3, :7] = 0
    return {"input_ids": ids.where(mask.bool(), 0), "attention_mask": mask}


def made(family: str = "llama", **changes):
    """Of Llama two layers that do nothing but attend: what is asked of `generate` says nothing of more."""
    if family != "llama":
        return zoo.make(family, **changes).float().eval()
    return (
        without_mlps(zoo.make(family, **{"num_hidden_layers": 2, "initializer_range": 0.2, **changes})).float().eval()
    )


@functools.cache
def llama():
    """The pair that tests share which leave it as it is, once a process."""
    return pair()


def pair(family: str = "llama", **changes):
    model = made(family, **changes)
    ours = tunecompile.optimize(copy.deepcopy(model), executor="eager")
    return model, ours, loop_of(ours)


def greedy(**others) -> dict:
    return {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": list(ENDS), **others}
