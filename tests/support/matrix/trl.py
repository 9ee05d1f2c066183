"""TRL's trainers and what they train on. (Rows of the support matrix are made of them in `trainers.py`.)"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import zoo
from tests.support.matrix.cells import Make
from tests.support.matrix.runs import SETTINGS, Outcome, logged
from tests.support.trainers import Rows, arguments, tokenizer


def words() -> Any:
    """A tokenizer of w1 to w254, with a chat template that says which tokens are the assistant's."""
    from tokenizers.pre_tokenizers import Whitespace

    made = tokenizer()
    made.backend_tokenizer.pre_tokenizer = Whitespace()
    made.chat_template = "{% for m in messages %}{% if m.role == 'user' %}w1 {{ m.content }} {% else %}w2 {% generation %}{{ m.content }} <eos> {% endgeneration %}{% endif %}{% endfor %}"
    return made


def rows_of_words() -> list[list[str]]:
    return [[f"w{i}" for i in row["input_ids"].clamp(max=254).tolist()] for row in Rows(12)]


def pairs() -> list[dict]:
    return [
        {"prompt": " ".join(row[:3]), "chosen": " " + " ".join(row[3:]), "rejected": " " + " ".join(row[:2:-1])}
        for row in rows_of_words()
    ]


def judged() -> list[dict]:
    """Every other answer is a good one."""
    return [
        {"prompt": row["prompt"], "completion": row["chosen" if good else "rejected"], "label": good}
        for row, good in zip(pairs(), itertools.cycle([True, False]))
    ]


def talks() -> list[dict]:
    def says(role: str, words: list[str]) -> dict:
        return {"role": role, "content": " ".join(words)}

    return [
        {
            "messages": [
                says("user", row[:2]),
                says("assistant", row[2:4]),
                says("user", row[4:5]),
                says("assistant", row[5:]),
            ]
        }
        for row in rows_of_words()
    ]


def prompts() -> list[dict]:
    return [{"prompt": row["prompt"]} for row in pairs()]


def texts() -> list[dict]:
    return [{"text": " ".join(row)} for row in rows_of_words()]


def completions_of() -> list[dict]:
    return [{"prompt": row["prompt"], "completion": row["chosen"]} for row in pairs()]


def reward(completions: list[str], **_: Any) -> list[float]:
    return [sum(int(word[1:]) for word in text.split() if word[0] == "w") % 11 / 10 for text in completions]


def by_trl(
    kind: str, rows: Callable[[], list[dict]], own: Callable[[], dict] = dict, **options: Any
) -> Callable[[Make, Path], Outcome]:
    """By `{kind}Trainer`, wherever this version of TRL has it; `own`: what else it is given."""

    def run(make: Make, folder: Path) -> Outcome:
        trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
        where = trl if hasattr(trl, f"{kind}Trainer") else pytest.importorskip(f"trl.experimental.{kind.lower()}")
        args = arguments(
            getattr(where, f"{kind}Config"), folder, **{**SETTINGS, "gradient_checkpointing": False, **options}
        )
        trainer = getattr(where, f"{kind}Trainer")(
            make(), args=args, train_dataset=datasets.Dataset.from_list(rows()), processing_class=words(), **own()
        )
        trainer.train()
        return logged(trainer), trainer.model

    return run


def classifier() -> nn.Module:
    """Scores a text: the model of a reward."""
    import transformers as tf

    torch.manual_seed(0)
    return tf.LlamaForSequenceClassification(
        tf.LlamaConfig(**{**zoo.SMALL, "num_hidden_layers": 2, "num_labels": 1, "pad_token_id": 0})
    )
