"""A result beside an older one: what is worse, better or the same, what cannot be compared, and what is refused."""

import copy
import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.support.comparisons import run
from tunecompile.cli.compare.against import check_like, compare_results, repeated
from tunecompile.cli.compare.console import show_summary
from tunecompile.cli.compare.judge import passed
from tunecompile.cli.compare.render import write_reports
from tunecompile.cli.compare.spec import Job
from tunecompile.cli.main import app
from tunecompile.errors import NotComparable


def verdicts(old, new, system="tunecompile"):
    return {
        row["figure"]: (row["verdict"], row["worse"]) for row in compare_results(old, new) if row["system"] == system
    }


def steps(*ms):
    return {"all_step_ms": list(ms), "repeats": len(ms)}


@pytest.fixture
def old(result):
    result["runs"] = [
        run("hf", 100.0, 0.5, **steps(99.0, 100.0, 101.0)),
        run("tunecompile", 80.0, 10.0, **steps(79.0, 80.0, 81.0)),
        result["runs"][1],
    ]
    return result


@pytest.fixture
def new(old):
    return copy.deepcopy(old)


def test_the_same_again_is_the_same(old, new):
    rows = compare_results(old, new)
    assert {row["verdict"] for row in rows if row["system"] != "liger"} == {"same"} and not any(
        row["worse"] for row in rows
    )
    assert [row["figure"] for row in rows if row["system"] == "hf"] == [
        "tokens/s",
        "peak memory, GiB",
        "saved for backward, MiB",
        "last loss",
        "held-out loss",
    ]


def test_what_got_worse_and_better_is_named(old, new):
    ours = new["runs"][1]
    ours |= run("tunecompile", 90.0, 10.0, **steps(89.0, 90.0, 91.0)) | {
        "peak_gib": 1.6,
        "saved_bytes": 2**19,
        "held_out_after": 3.5,
    }
    assert verdicts(old, new) == {
        "tokens/s": ("slower", True),
        "peak memory, GiB": ("more memory", True),
        "saved for backward, MiB": ("less memory", False),
        "last loss": ("same", False),
        "held-out loss": ("less exact", True),
        "gradient error, all parameters": ("same", False),
    }
    assert verdicts(new, old)["tokens/s"] == ("faster", False)


def test_a_difference_inside_both_spreads_is_none(old, new):
    old["runs"][1] |= steps(70.0, 72.0, 80.0, 88.0, 90.0)
    new["runs"][1] |= run("tunecompile", 86.0, 10.0, **steps(80.0, 84.0, 86.0, 90.0, 95.0))
    assert verdicts(old, new)["tokens/s"] == ("same", False)
    for held in (old, new):  # with two seeds it is their own spread that counts
        held["runs"][1:2] = [held["runs"][1] | {"seed": seed} for seed in (0, 1)]
    assert verdicts(old, new)["tokens/s"] == ("slower", True)


def test_gradients_are_told_by_family_where_one_moved(old, new):
    for row in new["gradients"]:
        if "lora_A" in row["parameter"]:
            row["error"] = 2e-3
    found = verdicts(old, new)
    assert (
        found["gradient error, all parameters"] == found["gradient error, mlp up_proj lora_A"] == ("less exact", True)
    )
    assert "gradient error, mlp up_proj lora_B" not in found
    for held, error in ((old, 1e-8), (new, 1e-6)):  # rounding, both of it
        held["gradients"] = [row | {"error": error} for row in held["gradients"]]
    assert verdicts(old, new)["gradient error, all parameters"] == ("same", False)


def test_rows_that_cannot_be_compared_are_listed(old, new):
    new["runs"][0] |= {"status": "oom"}
    new["runs"] = [*new["runs"], run("compile", 70.0, 1.0)]
    del new["runs"][1]["saved_bytes"]
    assert verdicts(old, new, "hf") == {"whole run": ("fails", True)}
    assert verdicts(old, new, "compile") == {"whole run": ("not comparable", False)} == verdicts(old, new, "liger")
    assert verdicts(old, new)["saved for backward, MiB"] == ("not comparable", False)
    assert verdicts(old, new | {"gradients": []})["gradient error, all parameters"] == ("not comparable", False)


def test_the_table_is_shown_and_decides(old, new, tmp_path):
    old["versions"] = {"torch": "2.12.0"}
    new["verdicts"] = []
    new["against"] = {
        "path": "old.json",
        "date": old["date"],
        "commit": None,
        "versions": old["versions"],
        "rows": compare_results(old, new),
    }
    assert passed(new)
    new["runs"][1] |= run("tunecompile", 90.0, 10.0, **steps(89.0, 90.0, 91.0))
    new["against"]["rows"] = compare_results(old, new)
    assert not passed(new)
    paths = write_reports(new, tmp_path)
    console = Console(record=True, width=160, quiet=False, file=open(tmp_path / "out", "w"))
    show_summary(new, paths, console)
    for text in (console.export_text(), paths["md"].read_text(), paths["html"].read_text()):
        for wanted in ("Since 2026-01-01: torch 2.12.0 → 2.13.0", "slower", "-11.1%", "not comparable"):
            assert wanted in text


def test_another_machine_model_or_option_is_refused_by_name(old):
    job = Job(system="hf", model="m", data="d.jsonl")
    machine = old["machine"]
    check_like("old.json", old, job, "m", machine)
    for changed, model, where, says in (
        (job, "n", machine, "model was 'm' and is 'n'"),
        (job.replace(dtype="bfloat16", lr=1.0), "m", machine, "lr was 0.0002 and is 1.0; dtype was"),
        (job, "m", machine | {"cpu": "another"}, "machine was 'some CPU' and is 'another'"),
        (job.replace(data="e.jsonl"), "m", machine, "data was 'd.jsonl'"),
        (job.replace(device="cuda"), "m", machine | {"gpu": "H200"}, "device was 'cpu' and is 'cuda'"),
    ):
        with pytest.raises(NotComparable, match=says):
            check_like("old.json", old, changed, model, where)


def test_a_file_with_other_rows_under_the_same_name_is_refused(old, tmp_path):
    (tmp_path / "d.jsonl").write_text("{}")
    old["settings"]["data_sha256"] = "0" * 64
    with pytest.raises(NotComparable, match="rows of the data was '0000"):
        check_like("old.json", old, Job(system="hf", model="m", data=str(tmp_path / "d.jsonl")), "m", old["machine"])


def test_an_old_result_can_be_repeated(old):
    old["settings"] |= {"seeds": 3, "adapter": "somewhere"}
    job, more = repeated(old)
    assert job == Job(system="hf", model="m", data="d.jsonl") and more == {
        "name": "m",
        "turns": True,
        "seeds": 3,
        "check": True,
        "reference_steps": 2,
    }


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "say what to train"),
        (["--against", "absent.json"], "FileNotFoundError"),
        (["--against", "{old}", "--steps", "9"], "--steps is 9: without --model"),
        (["--against", "{old}", "--out", "{folder}"], "give another folder"),
        (["--against", "{old}", "--model", "llama-tiny"], "model was 'm' and is 'llama-tiny'"),
    ],
)
def test_mistakes(old, tmp_path, options, says):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(old))
    options = [text.format(old=path, folder=tmp_path) for text in options]
    done = CliRunner().invoke(app, ["compare", "--out", str(tmp_path / "out"), *options])
    assert done.exit_code == 2 and says in " ".join(done.output.split()), done.output
