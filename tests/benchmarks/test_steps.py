"""The benchmarks of training steps, each on a tiny model: its rows, and what the tables show of them."""

import json
import pkgutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import report


@pytest.fixture
def longest(monkeypatch, tmp_path):
    """The script as a module; its command line is what the fixture is called with."""
    pytest.importorskip("peft")
    import torch
    from rich.console import Console

    from benchmarks.steps import longest as module

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
def test_the_first_row_is_as_long_as_is_estimated_to_fit(longest, monkeypatch):
    module, run = longest
    monkeypatch.setattr(module.Bench, "train", lambda self, length: {"status": "oom", "reason": "", "length": length})
    (row,) = run("--within", "300MiB")[:1]
    assert 1024 <= row["length"] < 1 << 20 and row["length"] % 1024 == 0


@pytest.mark.slow
def test_one_budget_after_another(tmp_path, monkeypatch):
    pytest.importorskip("peft")
    import tunecompile
    from benchmarks.steps import budgets
    from tunecompile.cli.compare.spec import Job

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


@pytest.mark.slow
def test_gradients_of_families(tmp_path, monkeypatch, capsys):
    """One that is there, and one that is not: its row says so, and the others stay."""
    pytest.importorskip("peft")
    from benchmarks.steps import families

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
    from benchmarks.steps import speedups

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


def test_phases_of_the_first_step():
    """Times are exclusive, of a region once it is known; and each phase is the time of functions that there are."""
    from benchmarks.steps import compile_time

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


@pytest.mark.slow
def test_evaluations_beside_training_steps(tmp_path, monkeypatch, capsys):
    """Systems see the same batches; a row has the evaluation's figures, and those of the steps before it."""
    pytest.importorskip("peft")
    import tunecompile
    from benchmarks.steps import evaluation
    from tunecompile.cli.compare import models

    def apply(model, job):
        return tunecompile.optimize(model, executor="eager") if job.engine == "tunecompile" else model

    def run(given, name, folder, seconds):
        return evaluation.measure(SimpleNamespace(**{**vars(given), "systems": name, "folder": folder}))

    out = tmp_path / "evaluation-llama.json"
    monkeypatch.setattr(models, "apply_system", apply)
    monkeypatch.setattr(evaluation, "run", run)
    command = ["evaluation.py", "--model", "llama-tiny", "--layers", "2", "--shape", "padded-3x16", "--steps", "2"]
    monkeypatch.setattr(sys, "argv", [*command, "--systems", "hf,tunecompile", "--out", str(out)])
    assert evaluation.main() == 0
    hf, ours = json.loads(out.read_text())["runs"]
    assert ours["losses"] == pytest.approx(hf["losses"], rel=1e-3) and len(ours["losses"]) == 2
    assert ours["training"]["losses"] == pytest.approx(hf["training"]["losses"], rel=1e-3)
    assert ours["step_ms"]["median"] > 0 and ours["peak_gib"] > 0 and ours["training"]["peak_gib"] > 0
    assert "evaluations run compiled, without logits that nobody reads (2 batches)" in capsys.readouterr().out
    text = report.render_evaluation(tmp_path)
    assert text.count("| llama-tiny (2 layers), qlora, padded-3x16 |") == 2 and text.count("x |") == 1
    assert report.render_evaluation(tmp_path / "nothing") == ""


@pytest.mark.slow
def test_first_losses(tmp_path, monkeypatch, capsys):
    """Systems see the same batches, and a row tells what its first forward took, by phases."""
    pytest.importorskip("peft")
    from benchmarks.steps import first_loss

    out = tmp_path / "first-loss-llama.json"
    command = ["first_loss.py", "--model", "llama-tiny", "--mode", "lora", "--layers", "2", "--shapes", "2x16,1x8"]
    command += ["--kinds", "eager,cold", "--steps", "3", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    assert first_loss.main() == 0
    eager, ours = json.loads(out.read_text())["runs"]
    assert ours["losses"] == pytest.approx(eager["losses"], rel=1e-4) and len(ours["losses"]) == 3
    ((layers, phases),) = ours["phases"].items()
    assert "LlamaDecoderLayer" in layers and {"dynamo", "joint", "code"} <= phases.keys()
    assert "llama-tiny cold: first loss after" in capsys.readouterr().out


def test_a_small_card_is_told_by_a_usual_row_and_by_its_longest():
    from benchmarks.steps import cards

    class Bench:
        device, given = "cpu", SimpleNamespace(model="m", mode="qlora", experts=True, host_embedding=False)

        def train(self, length, timed, settling):
            assert self.given.within == "7.5GiB" and timed and settling
            return {"status": "ok" if length < 9000 else "oom"}

        def guess(self):
            return 10240

    rows = list(cards.measure(Bench(), "7.5GiB"))
    assert [(row["shape"], row["status"]) for row in rows] == [("1x2048", "ok"), ("1x10240", "oom"), ("1x8192", "ok")]
    assert {row["budget_gib"] for row in rows} == {7.5}


@pytest.mark.slow
@pytest.mark.parametrize("tower", ["trained", "frozen"])
def test_steps_with_images_of_changing_sizes(tower, tmp_path, monkeypatch):
    """Systems see the same batches, and a table is made of their rows. (In this process, with small images.)"""
    pytest.importorskip("peft")
    from benchmarks.steps import vision

    def here(given, name, folder, *_):
        return vision.measure(SimpleNamespace(**{**vars(given), "systems": name, "folder": folder}))

    monkeypatch.setattr(vision, "run", here)
    monkeypatch.setattr(vision, "SIZES", ((4, 4), (4, 8), (6, 4)))
    monkeypatch.setattr(vision, "UNTIMED", 3)
    out = tmp_path / "vision-tiny.json"
    command = ["vision.py", "--model", "qwen3-vl-tiny", "--tower", tower, "--systems", "hf-checkpoint,tunecompile"]
    command += ["--text", "8", "--layers", "2", "--sizes", "3", "--steps", "3", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    assert vision.main() == 0
    eager, ours = json.loads(out.read_text())["runs"]
    assert eager["losses"] == pytest.approx(ours["losses"], rel=1e-4) and len(ours["losses"]) == 6
    assert eager["trainable_parameters"] == ours["trainable_parameters"]
    assert ours["compilations"] >= 2 and eager["compilations"] == 0 and eager["checkpointing"]
    assert "tower " + tower in report.render_vision(tmp_path)


def test_steps_of_a_diffusion_transformer(tmp_path, monkeypatch):
    """Systems see the same batches of all aspects. (In this process, with small images.)"""
    pytest.importorskip("diffusers")
    pytest.importorskip("peft")
    from benchmarks.steps import diffusion

    def here(given, name, *_):
        return diffusion.measure(SimpleNamespace(**{**vars(given), "systems": name}))

    monkeypatch.setattr(diffusion, "run", here)
    out = tmp_path / "steps.json"
    command = ["diffusion.py", "--model", "wan-tiny", "--mode", "lora", "--systems", "hf,hf-checkpoint,tunecompile"]
    command += ["--pixels", "256", "--buckets", "3", "--text", "6", "--layers", "2", "--steps", "4", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    assert diffusion.main() == 0
    eager, checkpointed, ours = json.loads(out.read_text())["runs"]
    assert eager["losses"] == pytest.approx(ours["losses"], rel=1e-3) and eager["losses"] == checkpointed["losses"]
    assert len(ours["losses"]) == 13 and ours["repeats"] == 6 and ours["shape"] == "1x~256px" and ours["layers"] == 2
    assert checkpointed["checkpointing"] and eager["compilations"] == 0
    assert (ours["compilations"], ours["late_compilations"]) == (1, 0)


@pytest.mark.parametrize("model, kinds", [("vit-tiny", 1), pytest.param("whisper-tiny", 2, marks=pytest.mark.slow)])
def test_steps_of_encoders(model, kinds, tmp_path, monkeypatch):
    """Systems see the same batches of one size. (In this process.)"""
    pytest.importorskip("peft")
    import tunecompile
    from benchmarks.steps import encoders
    from tunecompile.cli.compare import models

    def apply(model, job):
        return tunecompile.optimize(model, executor="eager") if job.engine == "tunecompile" else model

    def here(given, name, *_):
        return encoders.measure(SimpleNamespace(**{**vars(given), "systems": name}))

    out = tmp_path / "steps.json"
    monkeypatch.setattr(encoders, "run", here)
    monkeypatch.setattr(models, "apply_system", apply)
    command = ["encoders.py", "--model", model, "--systems", "hf,hf-checkpoint,tunecompile", "--text", "8"]
    monkeypatch.setattr(sys, "argv", [*command, "--steps", "2", "--out", str(out)])
    assert encoders.main() == 0
    eager, checkpointed, ours = json.loads(out.read_text())["runs"]
    assert eager["losses"] == pytest.approx(ours["losses"], rel=1e-3) == checkpointed["losses"]
    assert (ours["compilations"], ours["late_compilations"]) == (kinds, 0) and eager["compilations"] == 0


def test_aspects_of_images_are_ten_of_about_as_many_tokens():
    from benchmarks.steps import diffusion

    for pixels, tokens in ((1024, 4096), (512, 1024)):
        sizes = diffusion.sizes_of(pixels, 10)
        assert len({*sizes}) == 10 and all(0.93 * tokens < height * width <= tokens for height, width in sizes)


def test_sizes_of_images_recur_or_are_all_others():
    """Up to ten come in turn, in grids that merge to whole tokens; and each of a hundred comes once."""
    from benchmarks.steps import vision

    assert len({*vision.sizes_of(10)}) == 10 and vision.sizes_of(2) == vision.sizes_of(10)[:2]
    assert len({*vision.sizes_of(100)}) == 100 and vision.sizes_of(100) == vision.sizes_of(100)
    grids = [*vision.sizes_of(10), *vision.sizes_of(100)]
    assert all(height % 2 == width % 2 == 0 for height, width in grids)
    assert vision.shape_of(256, 1) == "4x256+512px" and vision.shape_of(1024, 100) == "4x1024+~512px"


def test_slow_steps_are_those_after_the_first_two():
    from benchmarks._steps import StepTimes

    found = StepTimes("cpu")
    found.ms = [900.0, 80.0, 30.0, *[10.0] * 27, 10.0, 12.0, 26.0]
    found.tokens = [8] * len(found.ms)
    row = found.figures(untimed=30)
    assert row["slow_steps"] == 2 and row["step_ms"] == {"median": 12.0, "min": 10.0, "max": 26.0, "mean": 16.0}
    assert row["tokens_per_s"] == 500.0 and row["repeats"] == 3 and row["late_compilations"] == 0


@pytest.mark.slow
def test_whole_runs(tmp_path, monkeypatch, capsys):
    """Systems train on the same rows, cold and warm ones share caches, and a table is made. (All in this process.)"""
    pytest.importorskip("peft")
    pytest.importorskip("trl")
    from benchmarks import _run_script
    from benchmarks.steps import run

    caches = []

    def here(command, log, seconds, env, cwd):
        caches.append(env["TORCHINDUCTOR_CACHE_DIR"])
        return _run_script.measure(json.loads(Path(command[3]).read_text()), float(command[4]))

    monkeypatch.setattr(run, "row_apart", here)
    out = tmp_path / "run-tiny.json"
    command = ["run.py", "--model", "llama-tiny", "--systems", "hf,tunecompile,tunecompile-warm", "--steps", "4"]
    monkeypatch.setattr(sys, "argv", [*command, "--accumulation", "2", "--shape", "2x~16", "--out", str(out)])
    assert run.main() == 0
    eager, cold, warm = json.loads(out.read_text())["runs"]
    assert eager["losses"] == pytest.approx(cold["losses"], rel=1e-4) and len(eager["steps_s"]) == 4
    assert (cold["system"], cold["caches"], warm["system"], warm["caches"]) == (
        *["tunecompile", "cold"],
        *["tunecompile", "warm"],
    )
    assert eager["checkpointing"] and "compilations" not in eager and cold["compilations"] and cold["captured"]["1"]
    assert cold["wall_begin_s"] < cold["wall_first_s"] < cold["wall_last_s"] < cold["wall_s"]
    assert caches[0] != caches[1] == caches[2]
    assert "| llama-tiny (2 layers), lora, 2x~16 x 2, 4 steps | **tunecompile** | warm |" in report.render_runs(
        tmp_path
    )


def test_steps_of_a_run_that_are_slow():
    """After the third: three times the median, or five seconds. A graph that was captured belongs to its step."""
    from benchmarks import _run_script

    clock = _run_script.Clock(begun=0.0, cuda=False)
    clock.begin_s, clock.ends, clock.captured = (
        10.0,
        [40.0, 41.0, 51.0, 52.0, 53.0, 56.0, 57.0],
        [7, 9, 9, 10, 10, 10, 10, 10],
    )
    row = clock.figures(tokens=500)
    assert row["slow_steps"] == [6] and row["captured"] == {"1": 2, "3": 1} and row["tokens_per_s"] == 500.0
    assert (row["wall_begin_s"], row["wall_first_s"], row["wall_tenth_s"], row["wall_last_s"]) == (
        10.0,
        40.0,
        None,
        57.0,
    )
    clock.ends = [float(10 * n) for n in range(2, 14)]
    row = clock.figures(tokens=500)
    assert row["slow_steps"] == [*range(4, 13)] and row["wall_tenth_s"] == 110.0


def test_names_of_whole_runs():
    """Warm caches are those that the same system has filled before."""
    from benchmarks.steps import run

    systems = run.checked_systems(["tunecompile-no-checkpoint", "unsloth", "tunecompile-no-checkpoint-warm"])
    off, unsloth, warm = systems.values()
    assert off == {**warm, "caches": "cold"} and not off["checkpointing"] and unsloth["checkpointing"]
    for wrong in (["tunecompile", "tunecompile-no-checkpoint-warm"], ["tunecompile-warm", "tunecompile"], ["ligre"]):
        with pytest.raises(SystemExit, match=wrong[0] if wrong[0] != "tunecompile" else "is to follow"):
            run.checked_systems(wrong)


def test_rows_of_a_run_are_the_same_for_all_and_spread():
    from benchmarks.steps import run

    given = SimpleNamespace(shape="2x~200", accumulation=4, steps=60, seed=0)
    rows, longest = run.draw_rows(given, 32_000)
    assert (
        rows
        == run.draw_rows(given, 32_000)[0]
        != run.draw_rows(SimpleNamespace(**{**vars(given), "seed": 1}), 32_000)[0]
    )
    lengths = sorted(map(len, rows))
    assert len(rows) == 480 and longest == 1600 and 16 <= lengths[0] and lengths[-1] <= longest
    assert 180 < lengths[240] < 220 and lengths[-1] > 600
    given.shape = "2x64"
    rows, longest = run.draw_rows(given, 100)
    assert longest == 64 and {len(row) for row in rows} == {64} and max(map(max, rows)) < 100
