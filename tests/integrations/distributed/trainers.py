"""Engines as trainers and accelerate set them up: all that they log, and the weights, as without `optimize`."""

from __future__ import annotations

import importlib
import os
import tempfile
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch.utils.data import DataLoader

import tunecompile
from tests.integrations.distributed.common import DEVICE, batch, model, optimized, packed, part, whole
from tests.integrations.distributed.fsdp import _refused
from tests.integrations.distributed.ranks import slow
from tests.support import zoo
from tests.support.matrix.trainers import DISTILLED, GENERATED, hugging_face
from tests.support.matrix.trl import by_trl, classifier, judged, pairs, texts
from tests.support.notes import fell_back

PORT = {"MASTER_PORT": "29500"}  #: accelerate and Lightning want one, although the ranks have met


def _alike(run, make, limit=1e-4):
    """`run` gives numbers and what was trained: the same ones with `optimize` and without. What was optimized is returned."""
    outcomes, made = [], []
    for prepare in (optimized, lambda each: each):
        torch._dynamo.reset()
        torch.manual_seed(3)
        with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, PORT):
            outcomes.append(run(lambda: made.append(prepare(make())) or made[-1], Path(folder)))
    (numbers, ours), (expected, theirs) = outcomes
    assert numbers and numbers == pytest.approx(expected, rel=limit, abs=limit / 10)
    start = {name: p.detach() for name, p in make().named_parameters()}
    changes = [{name: found - start[name] for name, found in _weights(each).items()} for each in (ours, theirs)]
    assert any(change.any() for change in changes[1].values()), "it learns nothing, so it proves nothing"
    worst = zoo.errors(*changes)
    assert max(worst.values()) < 10 * limit, max(worst.items(), key=lambda item: item[1])
    return made[0]


def _weights(of):
    """What is trained, put together, by the names it has without wrappers."""
    found = {
        name.removeprefix("module.").replace("_checkpoint_wrapped_module.", ""): p.detach()
        for name, p in of.named_parameters()
        if p.requires_grad
    }
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in found.items()}


# -- DDP, by trainers ---------------------------------------------------------------------------------------------------------


@slow
def hugging_faces(rank, ranks):
    for full in (False, True):
        whole(_alike(hugging_face(gradient_accumulation_steps=2), lambda: model(full=full)))


@slow
def trls(rank, ranks):
    """DPO's reference is another adapter, which is switched to for each batch. KTO's is the model with the adapter switched off, and its batch of pairs that do not
    belong together has no gradients: three forwards, each of batches with padding and, on one rank, of one without."""
    for kind, rows, most in (("SFT", texts, 3), ("DPO", pairs, 3), ("KTO", judged, 6)):
        made = _alike(by_trl(kind, rows), model)
        report = tunecompile.report(made)
        assert report.compiles <= most and not fell_back(report), (kind, report)


@slow
def trls_that_generate(rank, ranks):
    """Each rank samples completions of its own, of other lengths than the other's."""
    for kind, options in (("GRPO", GENERATED), ("RLOO", GENERATED), ("Distillation", DISTILLED)):
        if hasattr(importlib.import_module("trl"), f"{kind}Trainer"):
            assert not fell_back(_alike(by_trl(kind, **options), model))


@slow
def trls_reward(rank, ranks):
    report = tunecompile.report(_alike(by_trl("Reward", pairs), classifier))
    assert report.compiles <= 2 and not fell_back(report), report


@slow
def lightnings(rank, ranks):
    try:
        import lightning
    except ImportError:
        return

    class Module(lightning.LightningModule):
        def __init__(self, made):
            super().__init__()
            self.made, self.numbers = made, {}

        def training_step(self, inputs, step):
            loss = self.made(**inputs).loss
            self.numbers[f"loss {step}"] = loss.item()
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    def run(make, folder):
        module = Module(make())
        trainer = lightning.Trainer(
            max_steps=4,
            accelerator="cpu" if DEVICE == "cpu" else "gpu",
            devices=ranks,
            strategy="ddp_find_unused_parameters_true",
            accumulate_grad_batches=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            default_root_dir=folder,
        )
        trainer.fit(module, DataLoader([part(batch(seed), rank, ranks) for seed in range(8)], batch_size=None))
        return module.numbers, module.made

    whole(_alike(run, model))


# -- FSDP2, by accelerate -----------------------------------------------------------------------------------------------------


def _by_accelerate(rank, ranks, **options):
    def run(make, folder):
        import accelerate
        from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        made = accelerate.Accelerator(cpu=DEVICE == "cpu")
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap", **options)
        for state in (
            accelerate.state.AcceleratorState,
            accelerate.state.PartialState,
        ):  # it takes plugins for GPUs only
            state._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
        each = make()
        each, rule = made.prepare(each, torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1))
        numbers = {}
        for seed in range(3):
            loss = each.train()(**part(batch(seed), rank, ranks)).loss
            made.backward(loss)
            norm = made.clip_grad_norm_(each.parameters(), 0.5)
            numbers |= {
                f"loss {seed}": loss.item(),
                f"norm {seed}": (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item(),
            }
            rule.step()
            rule.zero_grad()
        return numbers, each

    return run


@slow
def sharded_by_accelerate(rank, ranks):
    for make in (model, lambda: model(full=True), packed):
        made = _alike(_by_accelerate(rank, ranks), make)
        whole(made)
        assert not _refused(made), _refused(made)


@slow
def sharded_by_accelerate_in_other_ways(rank, ranks):
    """Loaded on one rank, gathered in bf16, and checkpointed by accelerate, which wraps the layers."""
    for options, limit in (
        ({"cpu_ram_efficient_loading": True}, 1e-4),
        ({"mixed_precision_policy": "bf16"}, 2e-2),
        ({"activation_checkpointing": True}, 1e-4),
    ):
        _alike(_by_accelerate(rank, ranks, **options), lambda: model(full=True), limit)
