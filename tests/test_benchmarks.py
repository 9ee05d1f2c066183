"""The kernel benchmarks run: every case, tiny, in Triton's interpreter where there is no GPU. And the README's table of them."""

import importlib.util
import json
import os
import pkgutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"
WRONG_IN_THE_INTERPRETER = ("lora_mlp", "fp8")  # products in bf16, rounding to e4m3 (see tests/templates/conftest.py)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    pytest.importorskip("triton")
    out = tmp_path_factory.mktemp("kernels") / "kernels.json"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, FOLDER / "kernels", "--dry", "--out", out],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(out.read_text())


@pytest.mark.slow
def test_templates_and_references_run_in_every_case(result):
    own = [row for row in result["rows"] if row["system"] in ("template", "Inductor", "")]
    assert not [row for row in own if "failed" in row]
    cases = {row["shown"] for row in own}
    assert len(cases) >= 20 and all(
        {"template", "Inductor"} <= {row["system"] for row in own if row["shown"] == case} for case in cases
    )
    assert {row["family"] for row in own} == {"rms_norm", "swiglu", "cross_entropy", "nf4", "lora", "lora_mlp", "fp8"}


@pytest.mark.slow
def test_results_agree(result):
    off = [
        row
        for row in result["rows"]
        if row.get("error", 0.0) > 0.02
        and row["family"] not in WRONG_IN_THE_INTERPRETER
        and not row["system"].startswith(("Liger", "Unsloth"))
    ]
    assert not off, off


def script(name):
    """One of the benchmarks as a module."""
    (path,) = FOLDER.rglob(f"{name}.py")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_readmes_table_names_the_fastest_peer(result):
    report = script("report")
    row = {"family": "swiglu", "case": "8x4 forward", "shown": "SwiGLU", "percent": 91.4}
    rows = [
        {**row, "system": "Inductor", "ms": 0.5},
        {**row, "system": "Liger, fused", "ms": 0.42},
        {**row, "system": "Unsloth", "failed": "not installed"},
        {**row, "system": "Liger", "ms": 0.6},
        {**row, "system": "template", "ms": 0.4},
        {**row, "shown": "", "system": "template", "ms": 7.77},
    ]
    text = report.render_kernels({**result, "rows": rows})
    assert "| SwiGLU | 8x4 forward | 0.400 | 0.500 | 0.420 (Liger, fused) | 91 % |" in text and "7.77" not in text
    assert report.render_kernels(None) == "" and report.render_kernels({**result, "rows": rows[:2]}) == ""
    assert len(report.render_kernels(result).splitlines()) > 20


def test_tables_leave_out_what_was_cut_off(tmp_path):
    tables = script("report_tables")
    run = {"model": "m", "mode": "lora", "shape": "1x8"}
    for name, more in (("whole", {}), ("part", {"incomplete": ["check"]})):
        (tmp_path / f"{name}.json").write_text(json.dumps({"date": name, "runs": [run], **more}))
    assert [result["date"] for result in tables.load_results(tmp_path)] == ["whole"]
    assert tables.load_one("whole.json", tmp_path) and tables.load_one("part.json", tmp_path) is None


def test_a_row_that_no_time_was_left_for_is_in_no_table():
    run = {"model": "m", "mode": "lora", "shape": "1x8", "system": "hf", "status": "ok", "tokens_per_s": 5.0}
    run |= {"step_ms": {"median": 8.0, "min": 8.0, "max": 8.0}, "peak_gib": 1.0, "first_step_s": 1.0}
    late = {**run, "system": "unsloth", "status": "left out: no time was left"}
    table = script("report_tables").render_speed(
        [{"date": "2026", "runs": [run, late], "versions": {}, "machine": {"gpu": "g"}}]
    )
    assert "HF + PEFT" in table and "Unsloth" not in table


def test_trainers_stand_beside_each_other(tmp_path):
    """A system that failed, or that no time was left for, has no row."""
    run = {"model": "m", "mode": "qlora", "shape": "8x~800", "status": "ok", "peak_gib": 1.0, "first_step_s": 1.0}
    rows = [("tunecompile", "dpo", 40.0), ("unsloth", "dpo", 20.0), ("unsloth", "grpo", 30.0)]
    runs = [
        {**run, "system": name, "trainer": trainer, "tokens_per_s": rate, "step_ms": {"median": 1e3 / rate}}
        for name, trainer, rate in rows
    ]
    result = {"date": "2026", "versions": {"torch": "2"}, "machine": {"gpu": "g"}}
    result["runs"] = [
        *runs,
        {**run, "system": "hf-checkpoint", "trainer": "dpo", "status": "left out: no time was left"},
    ]
    (tmp_path / "trainers-m.json").write_text(json.dumps(result))
    lines = [line for line in script("report").render_trainers(tmp_path).splitlines() if "Trainer," in line]
    assert [line.split(" | ")[0][2:9] for line in lines] == ["DPOTrai", "DPOTrai", "GRPOTra"] and len(lines) == 3
    assert lines[0].endswith("| 2.00x |") and lines[1].endswith("|  |") and lines[2].endswith("|  |")
    assert script("report").render_trainers(tmp_path / "nothing") == ""


def test_a_file_says_what_is_to_come(tmp_path):
    write = script("_results").write
    out = tmp_path / "new" / "rows.json"
    write(out, {"runs": [1]}, ["the second"])
    assert json.loads(out.read_text()) == {"runs": [1], "incomplete": ["the second"]}
    write(out, {"runs": [1, 2]})
    assert json.loads(out.read_text()) == {"runs": [1, 2]} and list(out.parent.iterdir()) == [out]


def test_a_case_says_what_is_not_usual():
    run = {"model": "m", "mode": "lora", "shape": "1x8"}
    case = script("report_tables").case
    assert case(run) == "m, lora, 1x8"
    assert case({**run, "layers": 2, "experts": True, "rank": 8}) == "m (2 layers), lora with experts, rank 8, 1x8"


@pytest.fixture
def longest(monkeypatch, tmp_path):
    """The script as a module; its command line is what the fixture is called with."""
    pytest.importorskip("peft")
    import torch
    from rich.console import Console

    module = script("longest")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run(*arguments):
        out = tmp_path / "longest.json"
        monkeypatch.setattr(
            sys,
            "argv",
            ["longest.py", "--model", "llama-tiny", "--mode", "lora", "--layers", "2", "--out", str(out), *arguments],
        )
        module.run(module.parse_arguments(), {"runs": []}, Console(quiet=True))
        return json.loads(out.read_text())["runs"]

    return module, run


@pytest.mark.slow
def test_longer_rows_until_one_does_not_fit(longest, monkeypatch):
    """Rows grow while they fit, and the last is half way between what did and what did not."""
    module, run = longest
    trained = module.Bench.train

    def limited(self, length):
        return (
            {"status": "oom", "reason": "too long"}
            if length > 40_000
            else trained(self, length)
            if length < 2000
            else {"status": "ok", "first_step_s": 1.0, "peak_gib": 0.1, "peak_reserved_gib": None}
        )

    monkeypatch.setattr(module.Bench, "train", limited)
    monkeypatch.setattr(module, "GROWTH", 32)
    rows = run("--begin", "1024")
    assert [(row["shape"], row["status"]) for row in rows][:3] == [
        ("1x1024", "ok"),
        ("1x32768", "ok"),
        ("1x1048576", "oom"),
    ]
    assert rows[0]["first_step_s"] > 0 and rows[0]["memory"]["predicted_peak"] > 0
    fitted, failed = (
        max(int(row["shape"][2:]) * (row["status"] == status) for row in rows[i:])
        for status, i in (("ok", 0), ("oom", len(rows) - 1))
    )
    assert fitted <= 40_000 and len(rows) < 12 and (rows[-1]["status"] == "ok" or failed - fitted <= 0.1 * failed)


@pytest.mark.slow
def test_rows_of_given_lengths_under_a_budget_of_their_own(longest):
    _, run = longest
    rows = run("--lengths", "64,128", "--memory", "1KiB")
    assert [(row["shape"], row["status"]) for row in rows] == [("1x64", "ok"), ("1x128", "ok")]
    assert all(plan["recompute"] for row in rows for plan in row["memory"]["plans"])


@pytest.mark.slow
def test_the_first_row_is_as_long_as_is_estimated_to_fit(longest, monkeypatch):
    module, run = longest
    monkeypatch.setattr(module.Bench, "train", lambda self, length: {"status": "oom", "reason": "", "length": length})
    (row,) = run("--within", "300MiB")[:1]
    assert 1024 <= row["length"] < 1 << 20 and row["length"] % 1024 == 0


@pytest.mark.slow
def test_one_budget_after_another(tmp_path, monkeypatch):
    pytest.importorskip("peft")
    import tunecompile
    from tunecompile.cli.compare.spec import Job

    budgets, report = script("budgets"), script("report")
    monkeypatch.setattr(
        budgets.models,
        "apply_system",
        lambda model, job: tunecompile.optimize(model, memory=job.memory, executor="eager"),
    )
    job = Job(
        system="hf",
        model="llama-tiny",
        mode="lora",
        trainer="loop",
        shapes=("2x32",),
        steps=3,
        layers=3,
        launches=False,
        saved_bytes=False,
    )
    outcome = budgets.sweep(job, ["tunecompile@1TiB", "tunecompile@1KiB"])
    (roomy,), (tight,) = (result["runs"] for result in outcome.values())
    assert roomy["losses"] == tight["losses"] and roomy["memory"]["predicted_peak"] > tight["memory"]["predicted_peak"]
    assert not any(plan["recompute"] for plan in roomy["memory"]["plans"]) and all(
        plan["recompute"] for plan in tight["memory"]["plans"]
    )
    common = {"model": "llama-tiny", "mode": "lora", "shape": "2x32"}
    rows = [
        {**common, **run, "system": name, "peak_gib": peak}
        for name, run, peak in (("tunecompile@1TiB", roomy, 2.0), ("tunecompile@1KiB", tight, 1.0))
    ]
    report.draw_budgets({"runs": [*rows, {**rows[0], "system": "unsloth"}]}, tmp_path / "memory.svg")
    assert (tmp_path / "memory.svg").stat().st_size > 5000


def test_what_was_predicted_stands_beside_what_was_measured(tmp_path):
    run = {
        "system": "tunecompile@auto",
        "model": "m",
        "mode": "qlora",
        "shape": "4x2048",
        "status": "ok",
        "peak_gib": 10.0,
        "step_ms": {"median": 200.0},
        "predicted": {"peak_gib": 9.5, "step_ms": 210.0},
    }
    (tmp_path / "a.json").write_text(
        json.dumps({"runs": [run, {**run, "predicted": {"failed": "why"}}, {"status": "oom"}]})
    )
    (row,) = [line for line in script("report").render_predictions(tmp_path).splitlines() if line.startswith("| m")]
    assert row == "| m, qlora, 4x2048 | tunecompile, memory=auto | 9.50 | 10.00 | -5.0 % | 210 | 200 | +5.0 % |"
    assert script("report").render_predictions(tmp_path / "nothing") == ""


@pytest.mark.slow
def test_gradients_of_families(tmp_path, monkeypatch, capsys):
    """One that is there, and one that is not: its row says so, and the others stay."""
    pytest.importorskip("peft")
    families, report = script("families"), script("report")
    monkeypatch.setattr(families, "SIZES", {**families.zoo.SMALL, "num_hidden_layers": 2})
    monkeypatch.setattr(families, "FOLLOWING", {})
    monkeypatch.setattr(families, "LENGTH", 32)
    monkeypatch.setitem(families.zoo.NAMES, "nothing", ("Nothing", {}))
    monkeypatch.setattr(
        sys,
        "argv",
        ["families.py", "--families", "llama,nothing", "--processes", "1", "--out", str(tmp_path / "families.json")],
    )
    assert families.main() == 1
    runs = json.loads((tmp_path / "families.json").read_text())["runs"]
    assert [run["status"] for run in runs] == ["ok", "ok", "failed", "failed"] and "Nothing" in runs[2]["reason"]
    assert all(
        run["passed"] and 0 < run["error"] < 1.02 * run["eager_error"] < 0.1 and run["matches"]["rope"] == [2, 2]
        for run in runs[:2]
    ), runs
    (row,) = [line for line in report.render_families(tmp_path).splitlines() if line.startswith("| llama")]
    assert row.count("%") == 2 and "nothing" not in report.render_families(tmp_path)


@pytest.mark.slow
def test_speedups_of_families(tmp_path, monkeypatch, capsys):
    pytest.importorskip("peft")
    speedups, report = script("speedups"), script("report")
    monkeypatch.setattr(speedups, "WIDTHS", {"llama": (64, 128, 4, 2), "qwen3": (64, 128, 4, 2, 16)})
    for name, value in {"VOCABULARY": 256, "LENGTH": 32, "LAYERS": 2, "STEPS": 1}.items():
        monkeypatch.setattr(speedups, name, value)
    monkeypatch.setitem(speedups.WIDTHS, "nothing", (1, 1, 1, 1))
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "speedups.py",
            "--families",
            "llama,qwen3,nothing",
            "--processes",
            "0",
            "--out",
            str(tmp_path / "speedups.json"),
        ],
    )
    assert speedups.main() == 1
    runs = json.loads((tmp_path / "speedups.json").read_text())["runs"]
    assert [run["status"] for run in runs] == ["ok"] * 6 + ["failed"] * 3
    for eager, compiled, ours in (runs[:3], runs[3:6]):
        assert eager["losses"] == pytest.approx(compiled["losses"], rel=1e-3) and eager["losses"] == pytest.approx(
            ours["losses"], rel=1e-3
        )
    told = report.render_speedups(tmp_path)
    assert told.count("\n| llama") == 1 == told.count("\n| qwen3") and "nothing" not in told


def test_the_readmes_table_of_several_gpus(tmp_path):
    run = {"model": "m", "mode": "lora", "shape": "2x8", "status": "ok", "step_ms": {"median": 2.0}, "peak_gib": 1.0}
    runs = [
        run | {"system": system, "gpus": gpus, "parallel": "ddp" if gpus > 1 else None, "tokens_per_s": rate}
        for system, gpus, rate in (
            ("hf", 1, 100.0),
            ("hf", 2, 150.0),
            ("tunecompile", 1, 200.0),
            ("tunecompile", 2, 390.0),
        )
    ]
    (tmp_path / "scaling-m.json").write_text(
        json.dumps({"runs": [*runs, run | {"system": "liger", "gpus": 2, "status": "oom"}]})
    )
    text = script("report").render_scaling(tmp_path)
    assert (
        "| DDP | HF + PEFT | 2 | 150 | 2.0 | 1.0 | 75.0 % |  |" in text
        and "| 2 | 390 | 2.0 | 1.0 | 97.5 % | 2.60x |" in text
        and "iger" not in text
    )
    alone = [
        row | {"gpus": 2}
        for row in (
            run | {"system": "tunecompile", "parallel": "alone", "tokens_per_s": 400.0},
            run | {"system": "hf-checkpoint", "parallel": "ddp", "tokens_per_s": 100.0},
            run | {"system": "compile-layers", "parallel": "ddp", "tokens_per_s": 390.0},
        )
    ]
    (tmp_path / "scaling-m.json").write_text(json.dumps({"runs": [*runs[3:], *alone]}))
    text = script("report").render_scaling(tmp_path)
    assert (
        "| 2 | 390 | 2.0 | 1.0 | 97.5 % | 3.90x | 1.00x |" in text
        and "| none, each alone | **tunecompile** | 2 | 400 | 2.0 | 1.0 |  |  |  |" in text
    )


def test_a_suites_result_says_what_fails_only_when_optimized_and_keeps_what_did_not_run(tmp_path):
    suites = script("suites")
    passes, fails = ("passed", "", True), ("failed", "why", False)
    plain = {"a.One::test_x": passes, "a.One::test_y": fails, "a.OneMore::test_x": passes}
    row = suites.row(
        "a.One",
        plain,
        {"a.One::test_x": fails, "a.One::test_y": fails, "a.One::test_new": fails, "a.OneMore::test_x": passes},
    )
    assert (
        row["plain"] == {"passed": 1, "skipped": 0, "failed": 1}
        and row["optimized"]["failed"] == 3
        and row["compiled"] == 0
    )
    assert row["faults"] == {"test_x": "why"} and set(row["fail_anyway"]) == {"test_y", "test_new"}
    given = SimpleNamespace(out=tmp_path / "out.json", suite=tmp_path, tests=["a.py"], executor="eager")
    assert suites.kept(given) == {}
    given.out.write_text(
        json.dumps({"suite": tmp_path.name, "tests": ["a.py"], "executor": "eager", "classes": {"a.One": row}})
    )
    assert suites.kept(given) == {"a.One": row}
    given.executor = "inductor"
    assert suites.kept(given) == {}


@pytest.mark.slow
def test_architectures_beside_themselves(tmp_path, monkeypatch, capsys):
    pytest.importorskip("peft")
    pytest.importorskip("transformers")
    architectures, report = script("architectures"), script("report")
    rows = [architectures.compared(("llama", mode)) for mode in ("full", "lora")]
    assert [row["status"] for row in rows] == ["same", "same"] and all(
        0 < row["error"] < 1e-5 and row["rewritten"] for row in rows
    )
    optimize = architectures.tunecompile.optimize

    def wrong(model, **options):
        model.lm_head.weight.data *= 1.01
        return optimize(model, **options)

    monkeypatch.setattr(architectures.tunecompile, "optimize", wrong)
    rows.append(architectures.compared(("gemma", "full")))
    assert rows[-1]["status"] == "differs" and rows[-1]["error"] > 1e-4
    monkeypatch.setattr(architectures, "FORMS", ())
    rows.append(architectures.compared(("llama", "full")))
    assert rows[-1]["status"] == "not made"
    text = report.render_architectures({**architectures.header(), "runs": rows})
    assert (
        "1 of 2 right trained as a whole, 1 of 1 right by adapters" in text
        and "- gemma, trained as a whole: gradients off by" in text
    )


def test_phases_of_the_first_step():
    """Times are exclusive, of a region once it is known; and each phase is the time of functions that there are."""
    compile_time = script("compile_time")
    places = [path for paths in compile_time.PHASES.values() for path in paths]
    before, watch = [*map(pkgutil.resolve_name, places)], compile_time.Stopwatch()
    with watch.running():
        during = [*map(pkgutil.resolve_name, places)]
        with watch.phase("dynamo", None):
            with watch.phase("copies", "layers"), watch.phase("recognize", None):
                time.sleep(0.04)
            time.sleep(0.02)
    assert not {*map(id, before)} & {*map(id, during)} and before == [*map(pkgutil.resolve_name, places)]
    found = watch.taken()["layers"]
    assert found["recognize"] >= 0.04 and found["dynamo"] >= 0.02 and "copies" not in found and not watch.taken()
    assert sum(found.values()) < 1


def test_a_small_card_is_told_by_a_usual_row_and_by_its_longest():
    cards = script("cards")

    class Bench:
        device, given = "cpu", SimpleNamespace(model="m", mode="qlora", experts=True, host_embedding=False)

        def train(self, length, timed):
            assert self.given.within == "7.5GiB" and timed
            return {"status": "ok" if length < 9000 else "oom"}

        def guess(self):
            return 10240

    rows = list(cards.measure(Bench(), "7.5GiB"))
    assert [(row["shape"], row["status"]) for row in rows] == [("1x2048", "ok"), ("1x10240", "oom"), ("1x8192", "ok")]
    assert {row["budget_gib"] for row in rows} == {7.5}
