"""Fifty steps of each of TRL's trainers in bf16: loss, rewards and KL stay as near to fp32's as eager's do."""

import importlib
import random

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.matrix.cells import small
from tests.support.matrix.runs import SETTINGS
from tests.support.matrix.trl import classifier, judged, pairs, prompts, reward, rows_of_words, texts, words
from tests.support.notes import fell_back
from tests.support.trainers import arguments

trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(560), pytest.mark.filterwarnings("ignore")]

STEPS, SEEDS = 50, 5
SAMPLED = dict(max_completion_length=8, per_device_train_batch_size=4, gradient_accumulation_steps=1)
GROUPS = dict(num_generations=2, beta=0.04)
KINDS = {
    "SFT": (texts, {}, {}),
    "DPO": (pairs, {}, {}),
    "KTO": (judged, {}, {"per_device_train_batch_size": 4}),
    "Reward": (pairs, {}, {}),
    "GRPO": (prompts, {"reward_funcs": reward}, {**SAMPLED, **GROUPS}),
    "RLOO": (prompts, {"reward_funcs": reward}, {**SAMPLED, **GROUPS}),
    "Distillation": (prompts, {"teacher_model": "qwen2"}, SAMPLED),
}
READ = ("loss", "kl", "rewards", "logps", "entropy", "margin", "logits")  #: parts of names of what is compared
COUNTED = "accurac"  #: shares of few tokens or pairs, which change in steps


def rollout(returns):
    """Completions as an engine gives them: the same ones, whatever the model's numbers are."""
    rows, draw = rows_of_words(), random.Random(3)

    def generate(prompt_ids, *_, **__):
        made = [[int(word[1:]) for word in draw.choice(rows)][: draw.randint(2, 8)] for _ in prompt_ids]
        return (made, None) if returns == "GRPO" else made

    return generate


def redraw(model, seed):
    """Other weights, for `small` and `adapt` draw the same ones each time; norms' stay ones."""
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02)


def curves(kind, dtype, optimize, folder, seed=None, steps=STEPS):
    rows, own, options = KINDS[kind]
    own = {name: small(value) if name == "teacher_model" else value for name, value in own.items()}
    settings = {
        **SETTINGS,
        "optim": "adamw_torch",
        "learning_rate": 1e-3,
        "max_steps": steps,
        "seed": seed or 1,
        **options,
    }
    config = arguments(getattr(trl, f"{kind}Config"), folder, gradient_checkpointing=False, **settings)
    torch.manual_seed(0)
    base = classifier() if kind == "Reward" else small("llama")
    if seed is not None:
        redraw(base, seed)
    task = "SEQ_CLS" if kind == "Reward" else "CAUSAL_LM"
    model = zoo.adapt(base.to(dtype), target_modules=["q_proj", "v_proj", "up_proj", "down_proj"], task_type=task)
    if optimize:
        tunecompile.optimize(model, executor="eager")
    own["train_dataset"] = datasets.Dataset.from_list(rows())
    trainer = getattr(trl, f"{kind}Trainer")(model, args=config, processing_class=words(), **own)
    trainer._generate_single_turn = rollout(kind)
    trainer.train()
    found: dict[str, list[float]] = {}
    for entry in trainer.state.log_history[:steps]:
        for name, value in entry.items():
            if any(part in name for part in READ) and COUNTED not in name:
                found.setdefault(name, []).append(float(value))
    return found, model


def distances(kind, folder, seed=None, steps=STEPS):
    """By name: our mean distance to fp32 over the steps, eager's, and the largest value."""
    if not hasattr(trl, f"{kind}Trainer"):
        pytest.skip("this TRL has no such trainer")
    if kind != "Reward" and not hasattr(importlib.import_module("trl.trainer.utils"), "add_fused_lm_head"):
        pytest.skip("this TRL's heads are its own")
    exact, _ = curves(kind, torch.float32, False, folder, seed, steps)
    eager, _ = curves(kind, torch.bfloat16, False, folder, seed, steps)
    ours, model = curves(kind, torch.bfloat16, True, folder, seed, steps)
    assert not fell_back(model), tunecompile.report(model)
    assert exact.keys() == ours.keys() and len(exact["loss"]) == steps

    def distance(curve, name):
        return sum(abs(a - b) for a, b in zip(curve[name], exact[name])) / steps

    return {name: (distance(ours, name), distance(eager, name), max(map(abs, exact[name]))) for name in exact}


@pytest.mark.parametrize("kind", KINDS)
def test_fifty_steps(kind, tmp_path):
    figures = distances(kind, tmp_path)
    print(kind, {name: [f"{each:.2e}" for each in row] for name, row in figures.items()})
    assert not {name: row for name, row in figures.items() if row[0] > 2 * row[1] + 1e-5 * row[2]}
