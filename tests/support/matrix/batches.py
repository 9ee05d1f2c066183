"""Batches people train on: padded, packed, with masks and embeddings of the caller's, of any lengths. A cell each (see `cells.py`)."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.support import zoo
from tests.support.batches import packed, padded
from tests.support.matrix.cells import Cell, Make, lora, small

SEEDS, SHAPES = range(3), 200


def whole() -> nn.Module:
    """All weights learn; without a cache, beside which transformers does not tell packed sequences apart."""
    return small(use_cache=False)


def windows(family: str) -> Make:
    return lambda: small(family, sliding_window=4, use_cache=False)


def each(make: Callable[[int], dict]) -> Callable[[], list[dict]]:
    return lambda: [make(seed) for seed in SEEDS]


def unlabelled(inputs: dict, length: int) -> dict:
    """No loss on the first tokens, as of a prompt."""
    return inputs | {"labels": inputs["labels"].where(torch.arange(inputs["labels"].shape[1]) >= length, -100)}


def flattened(**options: bool) -> Callable[[], list[dict]]:
    """By the collator of transformers, one row of several sequences."""

    def make(seed: int) -> dict:
        from transformers import DataCollatorWithFlattening

        rows = [
            {"input_ids": zoo.batch(rows=1, length=length, seed=length)["input_ids"][0].tolist()}
            for length in (4 + seed, 9, 6)
        ]
        return dict(DataCollatorWithFlattening(**options)(rows))

    return each(make)


def by_trl() -> list[dict]:
    """By TRL's collator, without padding."""
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    return [
        dict(
            collate(
                [
                    {"input_ids": zoo.batch(rows=1, length=length, seed=length)["input_ids"][0].tolist()}
                    for length in (4 + seed, 9, 6)
                ]
            )
        )
        for seed in SEEDS
    ]


def seen(which: Callable[[Tensor, Tensor], Tensor], additive: bool = False) -> Callable[[], list[dict]]:
    """Under a 4-D mask of what each token (rows) sees (columns), as a function of their places."""

    def make(seed: int) -> dict:
        inputs = zoo.batch(seed=seed, length=16 + 4 * (seed > 1))
        place = torch.arange(inputs["input_ids"].shape[1])
        mask = which(place[:, None], place[None]).expand(len(inputs["input_ids"]), 1, -1, -1)
        return inputs | {
            "attention_mask": torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
            if additive
            else mask
        }

    return each(make)


def shapes() -> list[dict]:
    draw = random.Random(0)
    return [zoo.batch(seed=seed, rows=draw.randrange(1, 7), length=draw.randrange(5, 65)) for seed in range(SHAPES)]


def padded_shapes() -> list[dict]:
    draw = random.Random(1)
    return [
        padded(draw.randrange(2, 7), draw.randrange(3, 40), side=draw.choice(["left", "right"]), seed=seed)
        for seed in range(SHAPES)
    ]


def embedded(model: nn.Module, inputs: dict) -> Tensor:
    """The caller embeds the tokens, and changes what they are."""
    given = {name: value for name, value in inputs.items() if name != "input_ids"}
    return model(inputs_embeds=1.5 * model.get_input_embeddings()(inputs["input_ids"]), **given).loss


def squares(model: nn.Module, inputs: dict) -> Tensor:
    """A loss of one token, which has no next."""
    return model(inputs["input_ids"]).logits.square().mean()


def one_of_several(model: nn.Module, inputs: dict) -> Tensor:
    """Of a micro-batch, as the Trainer divides it: by the labels of all."""
    return model(**inputs, num_items_in_batch=torch.tensor(40, device=inputs["labels"].device)).loss


def no_labels() -> list[dict]:
    """In the second of three micro-batches."""
    made = [zoo.batch(seed=seed) for seed in SEEDS]
    made[1]["labels"].fill_(-100)
    return made


def right(seed: int) -> dict:
    return padded(3 + seed, 20 + seed, "right", seed)


def left(seed: int) -> dict:
    return padded(3 + seed, 20 + seed, "left", seed)


def with_positions(seed: int) -> dict:
    inputs = left(seed)
    return inputs | {"position_ids": (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)}


def rows_of(seed: int) -> dict:
    return packed((7, 2, 3, 4), (1, 4, 6, 5), seed=seed) if seed else packed((5, 1, 9))


BATCHES: dict[str, dict] = {
    "padded right": dict(batches=each(right)),
    "padded left": dict(batches=each(left)),
    "padded left, with position_ids": dict(batches=each(with_positions)),
    "padded, LoRA": dict(build=lora(), batches=each(right)),
    "padded and whole in turn": dict(
        batches=each(lambda seed: right(seed) if seed % 2 else zoo.batch(rows=3, length=20))
    ),
    "padded, labels of completions only": dict(batches=each(lambda seed: unlabelled(right(seed), 5))),
    "padded, labels at padding too": dict(
        batches=each(lambda seed: right(seed) | {"labels": right(seed)["input_ids"]})
    ),
    "padded, a mask of 0 and 1 with holes": dict(
        batches=each(
            lambda seed: (
                unlabelled(right(seed), 5)
                | {"attention_mask": right(seed)["attention_mask"] * (torch.arange(20 + seed) != 3)}
            )
        )
    ),
    "packed (position_ids)": dict(batches=each(rows_of)),
    "packed, LoRA on NF4": dict(build=lora(base=zoo.quantize, model={"use_cache": False}), batches=each(rows_of)),
    "packed by DataCollatorWithFlattening": dict(batches=flattened()),
    "the same, with what flash attention takes": dict(
        batches=flattened(return_flash_attn_kwargs=True, return_seq_idx=True)
    ),
    "packed by TRL's collator": dict(batches=by_trl),
    "sliding windows": dict(build=windows("mistral")),
    "sliding windows in some layers": dict(build=windows("gemma3")),
    "sliding windows, padded": dict(build=windows("gemma3"), batches=each(right)),
    "sliding windows, packed": dict(build=windows("gemma3"), batches=each(rows_of)),
    "a causal 4-D mask": dict(batches=seen(lambda query, key: key <= query)),
    "a 4-D mask that is added": dict(batches=seen(lambda query, key: key <= query, additive=True)),
    "a 4-D mask of packed sequences": dict(batches=seen(lambda query, key: (key <= query) & (query // 7 == key // 7))),
    "a prefix that sees itself (4-D mask)": dict(batches=seen(lambda query, key: (key <= query) | (key < 6))),
    "inputs_embeds": dict(loss=embedded),
    "inputs_embeds, padded": dict(batches=each(right), loss=embedded),
    "one row": dict(batches=each(lambda seed: zoo.batch(rows=1, seed=seed))),
    "rows of one token": dict(batches=each(lambda seed: zoo.batch(rows=3, length=1, seed=seed)), loss=squares),
    "one row of one token": dict(batches=each(lambda seed: zoo.batch(rows=1, length=1, seed=seed)), loss=squares),
    "no labels in one micro-batch": dict(batches=no_labels, loss=one_of_several),
    "the number of labels as a number": dict(loss=lambda model, inputs: model(**inputs, num_items_in_batch=57).loss),
    f"{SHAPES} shapes": dict(batches=shapes),
    f"{SHAPES} shapes, padded": dict(batches=padded_shapes),
}
QUICK = {"rows of one token", "no labels in one micro-batch"}
CELLS = [
    Cell("batch", name, **{"build": whole, "compiles": 3, "quick": name in QUICK, **what})
    for name, what in BATCHES.items()
]
