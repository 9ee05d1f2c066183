"""`compare --config`: what a YAML of TRL or axolotl says is what is compared, unless an option says otherwise."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tunecompile.cli.commands import compare as command
from tunecompile.cli.compare.user_config import read_config
from tunecompile.cli.main import app
from tunecompile.errors import BadOption

yaml = pytest.importorskip("yaml")
TRL = dict(
    model_name_or_path="llama-tiny-folder",
    dataset_name="rows.jsonl",
    use_peft=True,
    load_in_4bit=True,
    lora_r=8,
    lora_alpha=32,
    per_device_train_batch_size=2,
    learning_rate="2e-4",
    max_length=256,
    packing=True,
    max_steps=1000,
    gradient_accumulation_steps=4,
    output_dir="out",
)
AXOLOTL = dict(
    base_model="llama-tiny-folder",
    adapter="lora",
    datasets=[dict(path="rows.jsonl", ds_type="json", type="completion")],
    sequence_len=128,
    micro_batch_size=3,
    learning_rate=1e-3,
    bf16="auto",
    gradient_checkpointing=True,
    flash_attention=True,
)


def written(folder: Path, settings: dict) -> Path:
    file = folder / "train.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


def test_trls_keys(tmp_path):
    found = read_config(written(tmp_path, TRL))
    assert found.host == "trl" and found.job == {"rank": 8, "alpha": 32}
    assert found.options == dict(
        model="llama-tiny-folder",
        data=Path("rows.jsonl"),
        qlora=True,
        lora=False,
        full=False,
        batch=2,
        lr=2e-4,
        seq_len=256,
        batching="packed",
    )
    assert found.left == ["gradient_accumulation_steps"]


def test_axolotls_keys(tmp_path):
    found = read_config(written(tmp_path, AXOLOTL))
    assert found.host == "axolotl" and found.options["lora"] and found.options["data"] == Path("rows.jsonl")
    assert (found.options["batch"], found.options["seq_len"], found.options["gradient_checkpointing"]) == (3, 128, True)
    assert "dtype" not in found.options and found.left == ["flash_attention"]
    assert read_config(written(tmp_path, {"base_model": "x"})).options["full"]


@pytest.mark.parametrize(
    "settings, says", [([1], "names neither"), ({"base_model": "x", "load_in_8bit": True}, "8 bits")]
)
def test_what_cannot_be_compared(tmp_path, settings, says):
    with pytest.raises(BadOption, match=says):
        read_config(written(tmp_path, settings))
    with pytest.raises(BadOption, match="cannot be read"):
        read_config(tmp_path / "absent.yaml")


def test_options_go_before_the_file(tmp_path, monkeypatch):
    """And rows of the hub are refused, with the way to make a file of them."""
    seen = []
    monkeypatch.setattr(command, "conduct_against", lambda against, comparison: seen.append(comparison.job) or 0)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"text": "some text"}))
    file = written(tmp_path, {**TRL, "dataset_name": str(rows)})
    done = CliRunner().invoke(app, ["compare", "--config", str(file), "--lora", "--batch", "7", "--device", "cpu"])
    assert done.exit_code == 0, done.output
    (job,) = seen
    assert (job.mode, job.batch, job.seq_len, job.rank, job.data) == ("lora", 7, 256, 8, str(rows))
    assert "not taken over: gradient_accumulation_steps" in done.output
    file = written(tmp_path, {**TRL, "dataset_name": "trl-lib/Capybara"})
    done = CliRunner().invoke(app, ["compare", "--config", str(file), "--device", "cpu"])
    assert done.exit_code == 2 and "to_json" in done.output, done.output
