"""Trainers' evaluations: metrics as without `optimize`, and logits for those who read them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tunecompile
from tests.support.models.pairs import adapted_layers, pair
from tests.support.notes import find, has
from tests.support.trainers import Rows, arguments, collate, curve, tokenizer

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
slow = pytest.mark.slow


def both(dropout: float = 0.5) -> tuple[nn.Module, nn.Module]:
    return pair(lambda: adapted_layers(lora_dropout=dropout))


def hits(outcome) -> dict[str, float]:
    found, labels = outcome.predictions[:, :-1], outcome.label_ids[:, 1:]
    found = found if found.ndim == 2 else found.argmax(-1)
    return {"hits": float((found == labels)[labels != -100].mean()), "sum": float(outcome.predictions.sum())}


def greatest(logits, labels):
    assert type(logits) is torch.Tensor
    return logits.argmax(-1)


def own_loss(outputs, labels, num_items_in_batch=None):
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def evaluated(model: nn.Module, folder, given: dict, **options) -> dict[str, float]:
    from transformers import Trainer, TrainingArguments

    settings = arguments(TrainingArguments, folder, per_device_eval_batch_size=4, **options)
    rows = {"train_dataset": Rows(), "eval_dataset": Rows(6), "data_collator": collate}
    found = Trainer(model, settings, **rows, **given).evaluate()
    return {name: value for name, value in found.items() if not name.endswith(("_second", "runtime", "time"))}


#: what a Trainer is given, its arguments, how often logits are made for two batches, and how many ran compiled
WAYS = {
    "loss": ({}, {}, 0, 2),
    "metrics": ({"compute_metrics": hits}, {}, 2, 2),
    "preprocessed": ({"compute_metrics": hits, "preprocess_logits_for_metrics": greatest}, {}, 2, 2),
    "metrics, loss only": ({"compute_metrics": hits}, {"prediction_loss_only": True}, 0, 2),
    "label smoothing": ({}, {"label_smoothing_factor": 0.1}, 2, 2),
    "own loss": ({"compute_loss_func": own_loss}, {}, 0, 2),
}


@pytest.mark.parametrize("way", [pytest.param(way, marks=[] if way in ("loss", "metrics") else slow) for way in WAYS])
def test_trainer(way, made, tmp_path):
    given, options, logits, batches = WAYS[way]
    model, reference = both()
    ours = evaluated(model, tmp_path, given, **options)
    assert len(made) == logits
    theirs = evaluated(reference, tmp_path, given, **options)
    assert ours.keys() == theirs.keys() and ours == pytest.approx(theirs, rel=1e-5)
    assert has(model, "evaluation-compiled", count=batches) and not find(model, "evaluation-left")


@slow
def test_trainer_predicts(tmp_path):
    from transformers import Trainer, TrainingArguments

    found = []
    for model in both():
        settings = arguments(TrainingArguments, tmp_path, per_device_eval_batch_size=4, eval_strategy="no")
        found.append(Trainer(model, settings, data_collator=collate).predict(Rows(6)))
    ours, theirs = found
    assert (ours.label_ids == theirs.label_ids).all() and abs(ours.predictions - theirs.predictions).max() < 1e-5


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


@slow
def test_dpo_trainer(made, tmp_path):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    words = [{"prompt": "w1 w2", "chosen": f"w{3 + i} w4", "rejected": f"w5 w{6 + i} w7"} for i in range(4)]
    rows, found = datasets.Dataset.from_list(words), []
    model, reference = both()
    for m in (model, reference):
        settings = arguments(trl.DPOConfig, tmp_path, bf16=False, max_length=24, per_device_eval_batch_size=2)
        about = {"train_dataset": rows, "eval_dataset": rows, "processing_class": tokenizer()}
        found.append(trl.DPOTrainer(m, args=settings, **about).evaluate())
        assert m is not model or not made
    told = [{k: v for k, v in each.items() if not k.endswith(("_second", "runtime", "time"))} for each in found]
    assert told[0] == pytest.approx(told[1], rel=1e-4, abs=1e-6) and find(model, "evaluation-compiled")
