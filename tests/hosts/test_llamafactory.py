"""LLaMA-Factory by `run_exp(callbacks=...)`, its command under `tunecompile run`, and v1's kernel by our name: the losses
of training without, and a report of what was rewritten. `make test-hosts HOST=llamafactory` runs this in LLaMA-Factory's own environment.
"""

import importlib.machinery
import importlib.util
import json
import subprocess
import sys
import types

import pytest
import torch
import yaml

import tunecompile
from tests.support.hosts import assert_rewritten, data_file, losses, model_folder
from tests.support.matrix.trl import rows_of_words
from tunecompile.cli.commands import run

pytest.importorskip("llamafactory")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def without_sound(monkeypatch):
    """It imports torchaudio, which has no build for the CPU, and which text does not need."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("DISABLE_VERSION_CHECK", "1")
    if importlib.util.find_spec("torchaudio") is None:
        silent = types.ModuleType("torchaudio")
        silent.__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)
        monkeypatch.setitem(sys.modules, "torchaudio", silent)


def settings(folder) -> dict:
    folder.mkdir(exist_ok=True)
    rows = data_file(folder, instruction=slice(0, 3), output=slice(3, None))
    (folder / "dataset_info.json").write_text(
        json.dumps({"words": {"file_name": rows, "columns": {"prompt": "instruction", "response": "output"}}})
    )
    return dict(
        model_name_or_path=model_folder(folder),
        stage="sft",
        do_train=True,
        finetuning_type="lora",
        lora_rank=4,
        lora_alpha=8,
        lora_target="all",
        dataset="words",
        dataset_dir=str(folder),
        template="empty",
        cutoff_len=32,
        output_dir=str(folder / "out"),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=1,
        max_steps=3,
        save_steps=3,
        logging_steps=1,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        disable_gradient_checkpointing=True,
        use_cpu=True,
        bf16=False,
        report_to="none",
        seed=1,
    )


def test_it_trains_by_run_exp(tmp_path):
    from llamafactory.train.tuner import run_exp

    run_exp(settings(tmp_path / "plain"))
    plain = losses(tmp_path / "plain" / "out")
    mine = tunecompile.Callback(executor="eager")
    run_exp(settings(tmp_path / "ours"), callbacks=[mine])
    assert losses(tmp_path / "ours" / "out") == pytest.approx(plain, rel=1e-4) and len(plain) == 3
    assert_rewritten(mine.report())


def test_its_command(tmp_path):
    """`tunecompile run -- llamafactory-cli train train.yaml`, whose process knows nothing of us."""
    file, told = tmp_path / "train.yaml", tmp_path / "told"
    file.write_text(yaml.safe_dump(settings(tmp_path / "ours")))
    code = f"""
import importlib.machinery, sys, types
sys.modules["torchaudio"] = types.ModuleType("torchaudio")
sys.modules["torchaudio"].__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)
sys.argv = ["llamafactory-cli", "train", {str(file)!r}]
from llamafactory.cli import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=run.environment({"executor": "eager"}, told),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert told.read_text().split() == ["PeftModelForCausalLM"] and len(losses(tmp_path / "ours" / "out")) == 3


@pytest.fixture
def first(monkeypatch):
    """v1's trainers: one process is a group of one, and waits for a device that there is not."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "29511")
    if not torch.accelerator.is_available():
        monkeypatch.setattr(torch.accelerator, "synchronize", lambda *_: None)
    trainer = pytest.importorskip("llamafactory.v1.trainers.sft_trainer")
    monkeypatch.setattr(trainer.DistributedInterface, "destroy", lambda self: None)  # there are two trainings
    yield trainer
    torch.distributed.destroy_process_group()


def messages(folder) -> str:
    def said(role, words, weight):
        return {"role": role, "content": [{"type": "text", "value": " ".join(words)}], "loss_weight": weight}

    rows = [{"messages": [said("user", row[:3], 0.0), said("assistant", row[3:], 1.0)]} for row in rows_of_words()]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(folder / "rows.jsonl")


def test_v1s_kernel_by_our_name(first, tmp_path, monkeypatch):
    from tunecompile.trainers import llamafactory as door

    models, losses, own = [], [], first.SFTTrainer.compute_loss
    optimize = door.Door.optimize
    monkeypatch.setenv(
        "TUNECOMPILE_RUN", json.dumps({"options": {"executor": "eager"}, "told": str(tmp_path / "told")})
    )
    monkeypatch.setattr(door.Door, "optimize", lambda self, model: models.append(model) or optimize(self, model))
    monkeypatch.setattr(
        first.SFTTrainer, "compute_loss", lambda self, batch: losses.append(own(self, batch)) or losses[-1]
    )
    options = dict(
        model=model_folder(tmp_path),
        template="qwen3_nothink",
        train_dataset=messages(tmp_path),
        output_dir=str(tmp_path / "out"),
        micro_batch_size=2,
        global_batch_size=2,
        cutoff_len=64,
        max_steps=3,
        learning_rate=1e-3,
        bf16=False,
        batching_workers=0,
        enable_activation_checkpointing=False,
        peft_config={"name": "lora", "r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": "all"},
    )
    first.run_sft(dict(options))
    first.run_sft(options | {"kernel_config": {"name": "tunecompile"}})
    found = [loss.item() for loss in losses]
    assert len(models) == 1 and found[3:] == pytest.approx(found[:3], rel=1e-4) and len(found) == 6
    assert {match.family: match.rewritten for match in tunecompile.report(models[0]).matches}["lora"] == 7
