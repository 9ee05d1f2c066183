"""A user's mistakes: one line that names cause and mend, exit code 2, no traceback."""

import json

import pytest
from typer.testing import CliRunner

from tunecompile.cli.compare import spec
from tunecompile.cli.main import app
from tunecompile.errors import UnknownSystem


def compare(*options):
    return CliRunner().invoke(app, ["compare", *map(str, options)])


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({"text": "some text"}) + "\n")
    return path


@pytest.fixture
def no_config(tmp_path):
    (tmp_path / "empty").mkdir()
    return tmp_path / "empty"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--model", "./absent"], "no such folder"),
        (["--model", "absent"], "llama-3.1-8b"),
        (["--model", "llama-tiny", "--systems", "fast"], "no system 'fast'. Choose from: eager, hf"),
        (["--model", "llama-tiny", "--systems", ","], "Choose from"),
        (["--model", "llama-tiny", "--shape", "2by64"], "'2by64' is no shape"),
        (["--model", "llama-tiny", "--steps", "3"], "at least 4"),
        (["--model", "llama-tiny", "--qlora", "--full"], "only one of"),
        (["--model", "llama-tiny", "--loss", "dpo"], "needs rows with prompt, chosen and rejected"),
        (["--model", "some/model", "--loss", "dpo", "--full"], "use --lora or --qlora"),
        (["--model", "some/model", "--loss", "dpo", "--batching", "packed"], "its pairs are padded"),
        (["--model", "some/model"], "--data is missing"),
        (["--model", "some/model", "--data", "absent.jsonl"], "no data file at 'absent.jsonl'"),
    ],
)
def test_mistakes(options, says, tmp_path):
    result = compare(*options, "--device", "cpu", "--out", tmp_path / "out")
    shown = " ".join(result.output.split())
    assert result.exit_code == 2 and says in shown and "Traceback" not in shown, shown
    assert shown.startswith("error: ")


def test_a_folder_that_is_no_model(no_config):
    assert "has no config.json" in compare("--model", no_config).output


def test_a_shape_model_has_no_tokenizer_for_data(rows):
    assert "random tokens" in " ".join(compare("--model", "llama-tiny", "--data", rows).output.split())


def test_a_missing_package_is_named_with_its_extra(monkeypatch, tmp_path):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "bitsandbytes" else find(name, *rest)
    )
    result = compare("--model", "llama-tiny", "--out", tmp_path)
    assert result.exit_code == 2 and "pip install 'tunecompile[qlora]'" in " ".join(result.output.split())


def test_names_of_systems():
    names = lambda text, checkpointing=False: [s.name for s in spec.resolve_systems(text, checkpointing)]  # noqa: E731
    assert names("eager, tunecompile,hf") == ["hf", "tunecompile"]
    assert (
        spec.SYSTEMS["tunecompile-fp8"].precision == "fp8" and spec.SYSTEMS["tunecompile-fp8"].engine == "tunecompile"
    )
    assert names("eager,liger,compile,unsloth", True) == ["hf-checkpoint", "liger-checkpoint", "compile", "unsloth"]


def test_a_budget_is_part_of_a_systems_name():
    (found,) = spec.resolve_systems("tunecompile@20GiB", checkpointing=False)
    assert (found.name, found.engine, found.memory) == ("tunecompile@20GiB", "tunecompile", "20GiB")
    job = spec.Job(system="tunecompile-fp8@8GiB", model="m")
    assert (job.engine, job.precision, job.memory) == ("tunecompile", "fp8", "8GiB")
    for name in ("hf@8GiB", "nobody@8GiB"):
        with pytest.raises(UnknownSystem):
            spec.resolve_systems(name, checkpointing=False)
