"""Trainers people use: Hugging Face's and TRL's give the curve they give without `optimize`."""

import importlib

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.models.pairs import pair, small
from tests.support.notes import fell_back, find, has
from tests.support.trainers import Rows, arguments, collate, curve, sft

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


# -- Hugging Face's Trainer ---------------------------------------------------------------------------------------------


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
    assert not find(report, "head-not-called", "fused-head-left"), report
    assert not fused or "packing" not in options or has(report, "packed-without-mask"), report
    rewritten = {m.family: m.rewritten for m in report.matches}
    assert rewritten["lora"] == 2 and rewritten["linear_cross_entropy"] == 1 and not fell_back(model)


@pytest.mark.gpu
def test_trl_offloads_activations(tmp_path):
    """TRL copies to the host what layers save; it wants a GPU."""
    model, reference = pair(lambda: zoo.adapt(small(), target_modules=["q_proj", "down_proj"]).cuda())
    options = {"use_cpu": False, "activation_offloading": True}
    curves = [curve(sft(m, tmp_path, **options)) for m in (model, reference)]
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)
    assert not fell_back(model), tunecompile.report(model)


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
