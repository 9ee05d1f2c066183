"""Trainers people use: Hugging Face's and TRL's give the curve they give without `optimize`."""

import importlib
import random

import pytest
import torch
from torch import nn

import tunecompile
from tests.runtime.test_loops import fell_back, pair, small
from tests.support import zoo

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


# -- Hugging Face's Trainer ---------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"bf16": True, "gradient_checkpointing": False}, marks=pytest.mark.slow),
        pytest.param(
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["bf16", "re-entrant", "not re-entrant"],
)
def test_trainer(options, tmp_path):
    from transformers import Trainer, TrainingArguments

    model, reference = pair(lambda: zoo.adapt(small()))
    curves = []
    for m in (model, reference):
        trainer = Trainer(
            m,
            arguments(TrainingArguments, tmp_path, **options),
            data_collator=collate,
            train_dataset=Rows(),
            eval_dataset=Rows(6),
        )
        trainer.train()
        curves.append(curve(trainer))
    assert len(curves[0]) == 10
    assert curves[0] == pytest.approx(curves[1], rel=5e-3 if "bf16" in options else 1e-4)
    found = {m.family: (m.found, m.rewritten) for m in tunecompile.report(model).matches}
    assert found["linear_cross_entropy"] == (1, 1) and found["lora"] == (7, 7)
    assert not fell_back(model)


# -- TRL ----------------------------------------------------------------------------------------------------------------


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


def tokenizer():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 255, **{f"w{i}": i for i in range(1, 255)}}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>")), pad_token="<pad>", eos_token="<eos>"
    )


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"packing": True}, marks=pytest.mark.slow),
        pytest.param(
            {"padding_free": False, "gradient_checkpointing_kwargs": {"use_reentrant": True}}, marks=pytest.mark.slow
        ),
    ],
    ids=["packed", "padded"],
)
def test_trl_sft(options, tmp_path):
    model, reference = pair(lambda: zoo.adapt(small(), target_modules=["q_proj", "down_proj"]))
    trainers = [sft(m, tmp_path, **options) for m in (model, reference)]
    assert trainers[0].args.gradient_checkpointing  # TRL's default
    assert curve(trainers[0]) == pytest.approx(curve(trainers[1]), rel=1e-4)
    report = tunecompile.report(model)
    fused = hasattr(importlib.import_module("trl.trainer.utils"), "add_fused_lm_head")  # in TRL 1.0 it is not
    assert fused == any("the head is never called: trl" in note for note in report.notes), report
    assert not fused or "packing" not in options or any("told apart without a mask" in note for note in report.notes), (
        report
    )
    assert {m.family: m.rewritten for m in report.matches}["lora"] == 2 and not fell_back(model)


@pytest.mark.slow
def test_trl_resumes_from_a_checkpoint(tmp_path):
    options = dict(packing=False, save_strategy="steps", save_steps=2, save_total_limit=4)
    build = lambda: tunecompile.optimize(
        zoo.adapt(small(), target_modules=["up_proj"], lora_dropout=0.1), executor="eager"
    )  # noqa: E731
    whole = sft(build(), tmp_path / "whole", **options)
    again = sft(build(), tmp_path / "again", resume=str(tmp_path / "whole" / "checkpoint-2"), **options)
    assert curve(again)[-4:] == pytest.approx(curve(whole)[-4:], rel=1e-5)
    for ours, theirs in zip(again.model.parameters(), whole.model.parameters()):
        assert torch.allclose(ours, theirs, atol=1e-6)
