"""Trainers' evaluations: metrics as without `optimize`, and logits for those who read them."""

import copy

import pytest
import torch
from torch import nn

import tunecompile
from tests.support.models.pairs import adapted_layers, pair
from tests.support.notes import find, has
from tests.support.trainers import Rows, arguments, collate, curve, tokenizer

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


def both(dropout: float = 0.5) -> tuple[nn.Module, nn.Module]:
    return pair(lambda: adapted_layers(lora_dropout=dropout))


def hits(outcome) -> dict[str, float]:
    found, labels = outcome.predictions[:, :-1], outcome.label_ids[:, 1:]
    found = found if found.ndim == 2 else found.argmax(-1)
    return {"hits": float((found == labels)[labels != -100].mean()), "sum": float(outcome.predictions.sum())}


def evaluated(model: nn.Module, folder, metrics) -> dict[str, float]:
    from transformers import Trainer, TrainingArguments

    settings = arguments(TrainingArguments, folder, per_device_eval_batch_size=4)
    rows = {"train_dataset": Rows(), "eval_dataset": Rows(6), "data_collator": collate}
    found = Trainer(model, settings, **rows, compute_metrics=metrics).evaluate()
    return {name: value for name, value in found.items() if not name.endswith(("_second", "runtime", "time"))}


@pytest.mark.parametrize("metrics, logits", [(None, 0), (hits, 2)], ids=["loss", "metrics"])
def test_trainer(metrics, logits, made, tmp_path):
    """logits: how often they are made for two batches."""
    model, reference = both()
    ours = evaluated(model, tmp_path, metrics)
    assert len(made) == logits
    theirs = evaluated(reference, tmp_path, metrics)
    assert ours.keys() == theirs.keys() and ours == pytest.approx(theirs, rel=1e-5)
    assert has(model, "evaluation-compiled", count=2) and not find(model, "evaluation-left")


def sft(model: nn.Module, folder, **options):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    train, held = (
        datasets.Dataset.from_list([{"input_ids": r["input_ids"].tolist()} for r in Rows(n)]) for n in (24, 6)
    )
    settings = {"max_length": 24, "bf16": False, "pad_token": "<pad>", "eval_steps": 2, **options}
    return trl.SFTTrainer(
        model,
        args=arguments(trl.SFTConfig, folder, **settings),
        train_dataset=train,
        eval_dataset=held,
        processing_class=tokenizer(),
    )


def test_sft_trainer(made, tmp_path):
    """Loss, entropy and accuracy, before and between its steps, which are those of a run without. (A loader of rows to
    evaluate draws a number, so that dropout would differ.)"""
    model, reference = both(dropout=0.0)
    alone = copy.deepcopy(reference)
    trainers = [sft(m, tmp_path) for m in (model, reference)]
    names = ("eval_loss", "eval_entropy", "eval_mean_token_accuracy")
    ours, theirs = (trainer.evaluate() for trainer in trainers)
    assert {n: ours[n] for n in names} == pytest.approx({n: theirs[n] for n in names}, rel=1e-5)
    assert not made and has(model, "evaluation-compiled", count=1)
    trainers[0].train()
    assert not made and has(model, "evaluation-compiled", count=3)
    without = sft(tunecompile.optimize(alone, executor="eager"), tmp_path, eval_strategy="no")
    without.train()
    assert [row["loss"] for row in trainers[0].state.log_history if "loss" in row] == curve(without)[::2]
    assert all(torch.equal(*each) for each in zip(model.parameters(), alone.parameters()))
