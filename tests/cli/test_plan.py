"""`tunecompile plan`: what people and machines read, and a user's mistakes in one line that names the mend."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tunecompile.cli.main import app
from tunecompile.estimate.known_shapes import shape_config

pytest.importorskip("peft")
FIGURE = r"\b\d[\d,]*(?:\.\d+)?"


def plan(*options):
    return CliRunner().invoke(app, ["plan", *map(str, options)])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["absent/model"], "hf download absent/model config.json"),
        (["./absent"], "there is no such path"),
        (["llama-tiny", "--gpu", "x900"], "Known are b200, h200, h100"),
        (["llama-tiny", "--gpu", "h100,vram=3"], "no figure of a datasheet"),
        (["llama-tiny", "--gpus", "12"], "give a multiple"),
        (["llama-tiny", "--gpus", "4", "--global-batch", "6"], "equal shares"),
        (["llama-tiny", "--batch", "1", "--global-batch", "8"], "one of the two"),
        (["llama-tiny", "--qlora", "--full"], "only one of"),
        (["llama-tiny", "--memory", "plenty"], "is no budget"),
        (["llama-tiny", "--host-memory", "some"], "is no budget"),
    ],
)
def test_mistakes(options, says):
    result = plan(*options)
    shown = " ".join(result.output.split())
    assert result.exit_code == 2 and says in shown and shown.startswith("error: ") and "Traceback" not in shown, shown


def test_a_folder_without_a_config_and_one_that_cannot_be_read(tmp_path):
    assert "no config.json" in " ".join(plan(tmp_path).output.split())
    (tmp_path / "config.json").write_text('{"model_type": "no such type"}')
    result = plan(tmp_path)
    assert result.exit_code == 2 and "transformers cannot read it" in " ".join(result.output.split())


@pytest.mark.slow
def test_people_read_a_table_and_machines_json(tmp_path):
    shape_config("llama-tiny").save_pretrained(tmp_path)
    options = ["--lora", "--batch", "2", "--seq-len", "256", "--gpu", "rtx4090", "--gpus", "2"]
    table, told = plan(tmp_path, *options), plan(tmp_path / "config.json", *options, "--json")
    assert table.exit_code == told.exit_code == 0, table.output + told.output
    for word in (
        "one GPU",
        "DDP x 2",
        "FSDP2 x 2",
        "device_map x 2",
        "tokens/s",
        "take ",
        "not measured",
        "NVIDIA GeForce RTX 4090",
    ):
        assert word in table.output, table.output
    found = json.loads(told.stdout)
    assert [engine["engine"] for engine in found["engines"]] == ["one GPU", "DDP", "FSDP2", "device_map"] and found[
        "best"
    ] in table.output
    assert (
        found["question"]["gpu"]["source"].startswith("https://")
        and found["engines"][1]["peak"] > 0
        and 0 < found["engines"][1]["communication_share"] < 1
    )


@pytest.mark.slow
def test_the_plan_in_the_docs_is_this():
    page = Path(__file__).parents[2] / "docs" / "pages" / "guides" / "several-gpus.md"
    command, shown = re.search(
        r"`tunecompile plan (.*?)` prints:\n\n```\n(.*?)```", page.read_text(encoding="utf-8"), re.S
    ).groups()
    told = plan(*command.split()).output
    lines = [[re.sub(FIGURE, "#", line).split() for line in text.splitlines()] for text in (told, shown)]
    assert lines[0] == lines[1]
    figures = [[float(figure.replace(",", "")) for figure in re.findall(FIGURE, text)] for text in (told, shown)]
    assert figures[0] == pytest.approx(figures[1], rel=5e-3, abs=0.011), told  # the last digit may be another


def test_help_names_it():
    assert "without a GPU" in " ".join(CliRunner().invoke(app, ["--help"]).output.split())
