"""ms-swift with the callback: the losses of training without it, and a report of what was rewritten.
`make test-hosts HOST=swift` runs this in ms-swift's own environment.
"""

import subprocess
import sys

import pytest

import tunecompile
from tests.support.hosts import assert_rewritten, data_file, losses, model_folder
from tunecompile.errors import HostTooOld
from tunecompile.trainers import door as doors

pytest.importorskip("swift.callbacks")
from tunecompile.trainers import swift as door

pytestmark = pytest.mark.filterwarnings("ignore")


def train(folder, *more):
    from swift.pipelines import sft_main

    folder.mkdir(exist_ok=True)
    settings = dict(
        model=model_folder(folder),
        model_type="llama",
        template="dummy",
        dataset=data_file(folder, query=slice(0, 3), response=slice(3, None)),
        output_dir=folder / "out",
        add_version="false",
        torch_dtype="float32",
        bf16="false",
        fp16="false",
        tuner_type="lora",
        lora_rank=4,
        lora_alpha=8,
        lora_dropout=0,
        target_modules="all-linear",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=1,
        max_steps=3,
        save_steps=3,
        logging_steps=1,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        warmup_ratio=0,
        gradient_checkpointing="false",
        split_dataset_ratio=0,
        max_length=32,
        dataloader_num_workers=0,
        dataset_num_proc=1,
        use_cpu="true",
        seed=1,
        report_to="none",
        use_hf="true",
    )
    sft_main([text for name, value in settings.items() for text in (f"--{name}", str(value))] + list(more))
    return losses(folder / "out")


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_it_trains(tmp_path, monkeypatch):
    plain = train(tmp_path / "plain")
    met = []
    optimize = doors.optimize
    monkeypatch.setattr(
        doors, "optimize", lambda model, **given: met.append(model) or optimize(model, executor="eager", **given)
    )
    ours = train(tmp_path / "ours", "--external_plugins", str(door.PLUGIN), "--callbacks", "tunecompile")
    assert ours == pytest.approx(plain, rel=1e-4) and len(plain) == 3, (ours, plain)
    assert_rewritten(tunecompile.report(met[0]))


def test_where_the_plugin_is():
    printed = subprocess.run(
        [sys.executable, "-m", "tunecompile.trainers.swift"], capture_output=True, text=True, check=True
    ).stdout
    assert printed.strip() == str(door.PLUGIN) and door.PLUGIN.is_file()
    assert [file.name for file in door.PLUGIN.parent.glob("*.py")] == ["swift_callback.py"], "it goes on Python's path"


def test_an_old_swift(monkeypatch):
    monkeypatch.setattr(doors.importlib.metadata, "version", lambda package: "3.9.1")
    with pytest.raises(HostTooOld, match=r"needs ms-swift 4\.0 or newer"):
        door.register()
