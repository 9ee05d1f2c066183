"""What trainers are given: rows, a collator, arguments, a tokenizer; and the curve that they log."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from tests.support import zoo


class Rows(torch.utils.data.Dataset):
    def __init__(self, count: int = 24):
        sizes = random.Random(1)
        self.rows = [zoo.batch(rows=1, length=sizes.randint(6, 20), seed=i)["input_ids"][0] for i in range(count)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i]}


def collate(rows: list[dict]) -> dict:
    pad = nn.utils.rnn.pad_sequence
    ids = pad([r["input_ids"] for r in rows], batch_first=True)
    mask = pad([torch.ones_like(r["input_ids"]) for r in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def arguments(cls, folder, **options):
    settings = dict(
        output_dir=str(folder),
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        learning_rate=1e-3,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        lr_scheduler_type="constant",
        disable_tqdm=True,
        seed=1,
    )
    return cls(**{**settings, **options})


def curve(trainer) -> list[float]:
    return [
        entry[key] for entry in trainer.state.log_history for key in ("loss", "eval_loss", "grad_norm") if key in entry
    ]


def sft(model: nn.Module, folder, resume=None, **options):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in Rows()])
    settings = dict(
        max_length=24,
        eval_strategy="no",
        dataloader_num_workers=0,
        dataset_kwargs={"skip_prepare_dataset": False},
        bf16=False,
        pad_token="<pad>",
    )
    trainer = trl.SFTTrainer(
        model,
        args=arguments(trl.SFTConfig, folder, **{**settings, **options}),
        train_dataset=rows,
        processing_class=tokenizer(),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def grpo(model: nn.Module, folder, reward, callbacks=(), dropout: float = 0.0, **options):
    """TRL's trainer, with its defaults, that has trained adapters on four completions a step."""
    from peft import LoraConfig

    from tests.support.tokenizers import byte_level

    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    torch.manual_seed(0)
    by_bytes = byte_level()
    by_bytes.pad_token = by_bytes.eos_token = "</s>"
    settings = dict(
        num_generations=4,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
        learning_rate=1e-2,
        eval_strategy="no",
        bf16=False,
    )
    trainer = trl.GRPOTrainer(
        model,
        reward_funcs=reward,
        args=arguments(trl.GRPOConfig, folder, **{**settings, **options}),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["hello abc", "say one two"] * 4}),
        processing_class=by_bytes,
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=dropout),
        callbacks=[*callbacks],
    )
    trainer.train()
    return trainer


def tokenizer():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 255, **{f"w{i}": i for i in range(1, 255)}}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>")), pad_token="<pad>", eos_token="<eos>"
    )
