"""The training code of all systems: a plain loop with its losses, and TRL's SFTTrainer or DPOTrainer."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tunecompile.cli.compare.data import IGNORED
from tunecompile.cli.compare.meters import StepClock
from tunecompile.cli.compare.models import precision
from tunecompile.cli.compare.parallel import Stepper, stepper
from tunecompile.cli.compare.spec import REFERENCE, Job

Batch = dict[str, Tensor]
BETA = 0.1  # of DPO: weight of the distance to the reference


@dataclass
class Trained:
    """A finished run, and what another step of the same kind needs, for measurements by an extra step."""

    clock: StepClock
    forward: Callable[[Batch], Tensor]
    stepper: Stepper
    batch: Batch

    def step(self) -> None:
        """Run another step."""
        self.stepper.backward(self.forward(self.batch))
        self.stepper.step()


def real_tokens(batch: Batch) -> int:
    """Number of tokens without padding."""
    mask = batch.get("attention_mask")
    return int(mask.sum()) if mask is not None else batch["input_ids"].numel()


def to_device(batch: Batch, device: str) -> Batch:
    """The batch on the device."""
    return {key: value.to(device) for key, value in batch.items()}


def enable_checkpointing(model: nn.Module, job: Job) -> None:
    """Enable checkpointing as a user's loop does. Unsloth has enabled its own at loading."""
    if job.checkpoints and job.engine != "unsloth":
        # older transformers have the second name only
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        if job.mode != "full":
            model.enable_input_require_grads()


def train_loop(model: nn.Module, batches: list[Batch], job: Job, label: str) -> Trained:
    """Train by a plain loop of forward, backward and step, and return the timed run."""
    steps, clock = stepper(model, job), StepClock(job.device, label, len(batches))

    def forward(batch: Batch) -> Tensor:
        with precision(job):
            return loss_of(model, batch, job)

    model.train()
    for batch in batches:
        tokens = real_tokens(batch)
        batch = to_device(batch, job.device)
        clock.begin(tokens)
        loss = forward(batch)
        steps.backward(loss)
        steps.step()
        clock.end(loss)
    return Trained(clock, forward, steps, batch)


def make_trainer(job: Job, folder: str) -> tuple[type, Any]:
    """The class of TRL's trainer for the loss, and its settings."""
    common = dict(
        output_dir=folder,
        max_steps=job.steps,
        per_device_train_batch_size=job.batch,
        learning_rate=job.lr,
        lr_scheduler_type="constant",
        gradient_checkpointing=job.checkpoints,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        bf16=job.dtype == "bfloat16" and job.engine != REFERENCE,
        use_cpu=job.device == "cpu",
        dataloader_pin_memory=job.device == "cuda",
        seed=job.draw,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=10,
    )
    padded = dict(max_length=job.seq_len, pad_to_multiple_of=job.pad_to)
    if job.loss == "dpo":
        from trl import DPOConfig, DPOTrainer

        return DPOTrainer, DPOConfig(**common, **padded, beta=BETA)
    from trl import SFTConfig, SFTTrainer

    packed = dict(max_length=None, padding_free=True)  # no row is longer than seq_len
    return SFTTrainer, SFTConfig(**common, **(packed if job.batching == "packed" else padded))


def train_trl(model: nn.Module, tokenizer, rows: list[dict], job: Job, label: str) -> Trained:
    """Train by TRL's SFTTrainer or DPOTrainer on rows in its format, timed by a callback."""
    from datasets import Dataset

    exact = job.engine == REFERENCE
    folder = tempfile.TemporaryDirectory(prefix="tunecompile-")  # nothing is saved in it
    kind, config = make_trainer(job, folder.name)
    clock = StepClock(job.device, label, job.steps)
    trainer = kind(model=model, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    original, collate = trainer.compute_loss, trainer.data_collator
    pending: list[int] = []  # numbers of tokens of batches that are collated but not trained on yet

    def counting(examples):
        batch = collate(examples)
        pending.append(real_tokens(batch))
        return batch

    def recording(*args, **kwargs):
        loss = original(*args, **kwargs)
        clock.last_loss = loss.detach()
        return loss

    trainer.data_collator, trainer.compute_loss = counting, recording
    trainer.add_callback(timing_callback(clock, pending))
    with precision(job) if exact else contextlib.nullcontext():  # trainers do autocast themselves
        trainer.train()
    folder.cleanup()

    def forward(batch: Batch) -> Tensor:
        with precision(job) if exact else contextlib.nullcontext():
            return original(model, dict(batch))

    batch = trainer._prepare_inputs(collate([trainer.train_dataset[i] for i in range(job.batch)]))
    trainer.data_collator, trainer.compute_loss = collate, original
    model.train()
    model.zero_grad(set_to_none=True)
    return Trained(clock, forward, Stepper.of(trainer.optimizer), batch)


def timing_callback(clock: StepClock, pending: list[int]) -> Any:
    """A TrainerCallback that times optimizer steps. Trainers fetch ahead, so tokens are those of the oldest batch."""
    from transformers import TrainerCallback

    class Timing(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            clock.begin(pending.pop(0))

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            clock.end(clock.last_loss)

    return Timing()


# ---------------------------------------------------------------- losses of the plain loop


def loss_of(model: nn.Module, batch: Batch, job: Job) -> Tensor:
    """The loss of a batch, a scalar with a graph.

    batch: the arguments of the model, with labels. For DPO the rows with chosen answers precede the rejected ones.
    """
    return dpo_loss(model, batch) if job.loss == "dpo" else model(**batch).loss


def dpo_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The mean of -log sigmoid(beta ((c - c_ref) - (r - r_ref))) over pairs (arXiv:2305.18290, equation 7).

    c and r are the log-probabilities of chosen and rejected answers. The reference is the model without its adapter.
    """
    ours = answer_log_probs(model, batch)
    with torch.no_grad(), model.disable_adapter():
        reference = answer_log_probs(model, batch)
    chosen, rejected = (ours - reference).chunk(2)
    return -F.logsigmoid(BETA * (chosen - rejected)).mean()


def answer_log_probs(model: nn.Module, batch: Batch) -> Tensor:
    """The log-probability of each row's labelled tokens: [rows], in float32 or float64."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    labels = batch["labels"][:, 1:]
    return (
        -F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")
        .view(labels.shape)
        .sum(1)
    )
