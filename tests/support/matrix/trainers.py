"""What people train by: trainers as they are released, optimizers, and loops that do more than train. A cell each (see `cells.py`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support import zoo
from tests.support.matrix.cells import DEVICE, Cell, Make, lora, small, trained, two_adapters
from tests.support.matrix.runs import SETTINGS, Numbers, Outcome, adapted, logged
from tests.support.matrix.trl import by_trl, classifier, completions_of, judged, pairs, prompts, reward, talks, texts
from tests.support.trainers import Rows, arguments, collate

# -- Hugging Face's ------------------------------------------------------------------------------------------------------


def hugging_face(own: dict | None = None, **options: Any) -> Callable[[Make, Path], Outcome]:
    """`own`: what else the Trainer is given."""

    def run(make: Make, folder: Path) -> Outcome:
        from transformers import Trainer, TrainingArguments

        trainer = Trainer(
            make(),
            arguments(TrainingArguments, folder, **{**SETTINGS, **options}),
            data_collator=collate,
            train_dataset=Rows(),
            eval_dataset=Rows(6),
            **(own or {}),
        )
        trainer.train()
        return logged(trainer), trainer.model

    return run


def shifted_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits.float(), labels[:, 1:].flatten(), reduction="sum") / (
        num_items_in_batch or (labels[:, 1:] != -100).sum()
    )


def hits(outcome: Any) -> Numbers:
    """The share of tokens that the greatest logit names."""
    found, labels = outcome.predictions[:, :-1].argmax(-1), outcome.label_ids[:, 1:]
    return {"hits": float((found == labels)[labels != -100].mean())}


def resumed(make: Make, folder: Path) -> Outcome:
    """From a checkpoint, in a model of its own, to the very bits of a run that was not interrupted; dropout's random numbers among them."""
    from transformers import Trainer, TrainingArguments

    class Even(Rows):
        """Of one length: other shapes may be other code, and that rounds otherwise."""

        def __getitem__(self, i: int) -> dict:
            return {"input_ids": zoo.batch(rows=1, seed=i)["input_ids"][0]}

    trainers = []
    for resume in (None, str(folder / "checkpoint-2")):
        args = arguments(
            TrainingArguments,
            folder,
            **{
                **SETTINGS,
                "optim": "adamw_torch",
                "learning_rate": 1e-2,
                "max_steps": 4,
                "save_strategy": "steps",
                "save_steps": 2,
            },
        )
        trainers.append(Trainer(make(), args, data_collator=collate, train_dataset=Even()))
        trainers[-1].train(resume_from_checkpoint=resume)
    whole, again = trainers
    assert [entry["loss"] for entry in again.state.log_history if "loss" in entry] == [
        entry["loss"] for entry in whole.state.log_history if "loss" in entry
    ]
    for (name, one), other in zip(whole.model.named_parameters(), again.model.parameters()):
        assert torch.equal(one, other), name
    return {}, again.model


# -- TRL's ---------------------------------------------------------------------------------------------------------------


GENERATED = dict(
    rows=prompts,
    own=lambda: {"reward_funcs": reward},
    num_generations=2,
    max_completion_length=6,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=1,
    beta=0.04,
)
DISTILLED = dict(
    rows=prompts,
    own=lambda: {"teacher_model": small("qwen2")},
    max_completion_length=6,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=1,
)


# -- loops of the user's own, accelerate's and Lightning's -----------------------------------------------------------------


def inputs_of(step: int) -> dict:
    return zoo.batch(seed=step, device=DEVICE)


def loop(
    optimizer: Callable[[list], torch.optim.Optimizer] = functools.partial(torch.optim.SGD, lr=0.5),
    between: Callable[[nn.Module, int], Numbers] = lambda model, step: {},
    clip: float | None = None,
    accumulate: int = 1,
    steps: int = 4,
    precision: torch.dtype | None = None,
) -> Callable[[Make, Path], Outcome]:
    """`between`: what the user does after each step, and what numbers he sees. `precision`: of autocast, and fp16's losses are scaled."""

    def run(make: Make, folder: Path) -> Outcome:
        model, numbers = make().train(), {}
        rule = optimizer([p for p in model.parameters() if p.requires_grad])
        scaler = torch.amp.GradScaler(DEVICE, enabled=precision is torch.float16)
        for step in range(steps):
            for part in range(accumulate):
                with torch.autocast(DEVICE, precision, enabled=precision is not None):
                    loss = model(**inputs_of(step * accumulate + part)).loss / accumulate
                scaler.scale(loss).backward()
                numbers[f"loss {step}.{part}"] = loss.item()
            if clip is not None:
                scaler.unscale_(rule)
                numbers[f"norm {step}"] = nn.utils.clip_grad_norm_(model.parameters(), clip).item()
            scaler.step(rule)
            scaler.update()
            rule.zero_grad()
            numbers |= {f"{name} {step}": value for name, value in between(model, step).items()}
        return numbers, model

    return run


def bnb(name: str, **options: Any) -> Callable[[list], torch.optim.Optimizer]:
    """An optimizer of bitsandbytes; all of its states have few bits, small ones too."""

    def build(parameters: list) -> torch.optim.Optimizer:
        return getattr(pytest.importorskip("bitsandbytes").optim, name)(parameters, lr=1e-2, **options)

    return build


def evaluated(model: nn.Module, step: int) -> Numbers:
    """A loss and its accuracy in evaluation, and what is generated."""
    model.eval()
    inputs, seen = inputs_of(20 + step), {}
    for name, reading in (("no_grad", torch.no_grad), ("inference_mode", torch.inference_mode)):
        with reading():
            out = model(**inputs)
            seen |= {
                f"loss under {name}": out.loss.item(),
                f"accuracy under {name}": (out.logits[:, :-1].argmax(-1) == inputs["labels"][:, 1:])
                .float()
                .mean()
                .item(),
            }
    ids = model.generate(
        input_ids=inputs["input_ids"][:, :5],
        attention_mask=torch.ones_like(inputs["input_ids"][:, :5]),
        max_new_tokens=4,
        do_sample=False,
        pad_token_id=0,
    )
    model.train()
    return seen | {f"generated token {i}": float(token) for i, token in enumerate(ids.flatten().tolist())}


def scored(model: nn.Module, step: int) -> Numbers:
    """Logits of a model in training, without gradients."""
    inputs, seen = inputs_of(30 + step), {}
    for name, reading in (("no_grad", torch.no_grad), ("inference_mode", torch.inference_mode)):
        with reading():
            out = model(**inputs, use_cache=False)
            seen |= {
                f"loss under {name}": out.loss.item(),
                f"entropy under {name}": torch.distributions.Categorical(logits=out.logits).entropy().mean().item(),
            }
    return seen


def switched(model: nn.Module, step: int) -> Numbers:
    """Both adapters first, then one after the other."""
    model.base_model.set_adapter([["default"], ["other"], ["default", "other"]][step % 3])
    return {}


def thawed(model: nn.Module, step: int) -> Numbers:
    """One layer more learns after each step, from the last to the first."""
    for index, layer in enumerate(model.model.layers):
        layer.requires_grad_(index >= len(model.model.layers) - 1 - step)
    return {}


def without_adapter(model: nn.Module, step: int) -> Numbers:
    """What the base gives, and what the weights give once the adapter is merged into them, and taken out again."""
    seen, inputs = {}, inputs_of(50 + step)
    with torch.no_grad(), model.disable_adapter():
        seen["loss of the base"] = model(**inputs).loss.item()
    model.merge_adapter()
    with torch.no_grad():
        seen["loss when merged"] = model(**inputs).loss.item()
    model.unmerge_adapter()
    return seen


def averaged(make: Make, folder: Path) -> Outcome:
    """An exponential moving average of the weights, by torch: what is compared are the averages, and the loss they give."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    averages: list[nn.Module] = []

    def update(model: nn.Module, step: int) -> Numbers:
        if not averages:
            averages.append(AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)))
        averages[0].update_parameters(model)
        with torch.no_grad():
            return {"loss of the averages": averages[0](**inputs_of(40)).loss.item()}

    numbers, _ = loop(between=update)(make, folder)
    return numbers, averages[0].module


def by_accelerate(make: Make, folder: Path) -> Outcome:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(
        reset_partial_state=True
    )  # a trainer in this process may have left its precision there
    made = accelerate.Accelerator(cpu=DEVICE == "cpu", gradient_accumulation_steps=2)
    model = make()
    rows = torch.utils.data.DataLoader(
        [{name: value[0] for name, value in zoo.batch(rows=1, seed=seed).items()} for seed in range(12)], batch_size=2
    )
    model, rule, rows = made.prepare(
        model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5), rows
    )
    numbers = {}
    model.train()
    for step, inputs in enumerate(rows):
        with made.accumulate(model):
            loss = model(**inputs).loss
            made.backward(loss)
            if made.sync_gradients:
                numbers[f"norm {step}"] = made.clip_grad_norm_(model.parameters(), 0.5).item()
            rule.step()
            rule.zero_grad()
        numbers[f"loss {step}"] = made.gather(loss.detach()).mean().item()
    return numbers, made.unwrap_model(model)


def by_lightning(make: Make, folder: Path) -> Outcome:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self, model: nn.Module):
            super().__init__()
            self.model, self.numbers = model, {}

        def training_step(self, inputs: dict, step: int) -> Tensor:
            loss = self.model(**inputs).loss
            self.numbers[f"loss {step}"] = loss.item()
            return loss

        def validation_step(self, inputs: dict, step: int) -> None:
            self.numbers[f"evaluated {len(self.numbers)}"] = self.model(**inputs).loss.item()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.5)

    module = Module(make())
    trainer = lightning.Trainer(
        max_steps=4,
        accelerator="cpu" if DEVICE == "cpu" else "gpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        gradient_clip_val=0.5,
        default_root_dir=folder,
        val_check_interval=2,
    )
    trainer.fit(
        module,
        *(
            torch.utils.data.DataLoader([zoo.batch(seed=seed) for seed in seeds], batch_size=None)
            for seeds in (range(4), range(20, 22))
        ),
    )
    return module.numbers, module.model


WHOLE = trained(lambda path: True)
TRAINERS: dict[str, dict] = {
    "Trainer": dict(run=hugging_face()),
    "Trainer, all weights": dict(build=WHOLE, run=hugging_face()),
    "Trainer, gradient checkpointing": dict(run=hugging_face(gradient_checkpointing=True)),
    "Trainer, NEFTune": dict(run=hugging_face(neftune_noise_alpha=5.0)),
    "Trainer, label smoothing": dict(run=hugging_face(label_smoothing_factor=0.1)),
    "Trainer, a loss of the user's (compute_loss_func)": dict(run=hugging_face({"compute_loss_func": shifted_loss})),
    "Trainer, evaluated with metrics": dict(
        run=hugging_face({"compute_metrics": hits}, eval_strategy="steps", eval_steps=1)
    ),
    "Trainer, resumed from a checkpoint to the bit": dict(build=lora(lora_dropout=0.1), run=resumed, random=True),
    "SFT": dict(run=by_trl("SFT", texts, packing=False)),
    "SFT, packed": dict(run=by_trl("SFT", texts, packing=True, max_length=24)),
    "SFT, without padding": dict(run=by_trl("SFT", texts, padding_free=True, max_length=None)),
    "SFT, assistant_only_loss": dict(run=by_trl("SFT", talks, assistant_only_loss=True)),
    "SFT, completions only": dict(run=by_trl("SFT", completions_of)),
    "DPO": dict(run=by_trl("DPO", pairs)),
    "ORPO": dict(run=by_trl("ORPO", pairs)),
    "CPO": dict(run=by_trl("CPO", pairs)),
    "KTO": dict(run=by_trl("KTO", judged)),
    "GRPO": dict(run=by_trl("GRPO", **GENERATED)),
    "RLOO": dict(run=by_trl("RLOO", **GENERATED)),
    "reward": dict(build=classifier, run=by_trl("Reward", pairs)),
    "distillation": dict(run=by_trl("Distillation", **DISTILLED)),
    "distillation (GKD)": dict(run=by_trl("GKD", talks, own=lambda: {"teacher_model": small("qwen2")}, lmbda=0.0)),
    "accelerate": dict(run=by_accelerate),
    "Lightning": dict(run=by_lightning),
}
LOOPS: dict[str, dict] = {
    "gradient clipping and accumulation": dict(run=loop(clip=0.1, accumulate=2), compiles=1),
    "AdamW": dict(run=loop(functools.partial(torch.optim.AdamW, lr=1e-2))),
    "autocast in fp16, with a GradScaler": dict(run=loop(clip=0.1, precision=torch.float16), limit=1e-2),
    "autocast in bf16": dict(run=loop(precision=torch.bfloat16), limit=0.1),
    "AdamW in 8 bits": dict(run=loop(bnb("AdamW8bit", min_8bit_size=16))),
    "AdamW, paged": dict(run=loop(bnb("PagedAdamW32bit"))),
    "AdamW in 8 bits, paged": dict(run=loop(bnb("PagedAdamW8bit", min_8bit_size=16))),
    "a moving average of the weights": dict(run=averaged),
    "evaluation and generation between steps": dict(run=loop(between=evaluated)),
    "no_grad and inference_mode between steps": dict(run=loop(between=scored)),
    "adapters switched between steps": dict(build=two_adapters(["default", "other"]), run=loop(between=switched)),
    "adapters disabled and merged between steps": dict(run=loop(between=without_adapter)),
    "layers thawed between steps": dict(build=WHOLE, run=loop(between=thawed)),
}
QUICK = {"evaluation and generation between steps"}
CELLS = [
    Cell(section, name, **{"build": adapted, "quick": name in QUICK, **what})
    for section, table in {"trainer": TRAINERS, "loop": LOOPS}.items()
    for name, what in table.items()
]
