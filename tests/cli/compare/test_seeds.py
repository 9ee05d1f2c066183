"""Several seeds: what is drawn anew and what stays, the middle and the spread of figures, and where they are shown."""

import pytest

from tests.support.comparisons import run
from tunecompile.cli.compare import tasks
from tunecompile.cli.compare.curves import compare_curves, merge_seeds
from tunecompile.cli.compare.judge import judge_speed, judge_work
from tunecompile.cli.compare.progress import Progress
from tunecompile.cli.compare.render import run_table, write_reports
from tunecompile.cli.compare.request import Comparison
from tunecompile.cli.compare.run import run_comparison
from tunecompile.cli.compare.spec import SYSTEMS, Job


def seeded(system, *cases):
    """Runs of (seed, ms a step, last loss)."""
    return [
        run(system, ms, 0.5, seed=seed, losses=[3.0, 2.5, last], repeats=2, all_step_ms=[500.0, ms, ms + 2])
        for seed, ms, last in cases
    ]


def test_figures_have_a_middle_and_a_spread():
    (merged,) = merge_seeds(seeded("hf", (0, 100.0, 2.0), (1, 125.0, 2.3), (2, 80.0, 2.2)))
    assert merged["tokens_per_s"] == 1000.0 and merged["spread"]["tokens_per_s"] == [800.0, 1250.0]
    assert merged["step_ms"] == {"median": 100.0, "min": 72.0, "max": 150.0}
    assert merged["all_step_ms"] == [100.0, 102.0, 125.0, 127.0, 80.0, 82.0] and merged["repeats"] == 6
    assert (
        merged["losses"] == [3.0, 2.5, pytest.approx(6.5 / 3)]
        and merged["band"][-1] == [2.0, 2.3] == merged["spread"]["last_loss"]
    )


def test_a_single_run_and_another_shape_stay_as_they_are():
    alone, other = seeded("hf", (0, 100.0, 2.0)) + [run("hf", 90.0, 0.5, shape="2x8")]
    assert merge_seeds([alone, other]) == [alone, other]


def test_a_seed_that_failed_is_told():
    fine, lost = seeded("hf", (0, 100.0, 2.0), (1, 100.0, 2.0))
    away = {"system": "liger", "shape": "4x64", "status": "oom"}
    merged = merge_seeds([fine, lost | {"status": "oom"}, away, away])
    assert [row[0] for row in run_table(merged)[1]] == ["hf (1 of 2 seeds)", "liger"] and run_table(merged)[1][1][
        1
    ] == "oom"


def test_curves_and_time_are_judged_over_all_seeds():
    runs = merge_seeds(
        seeded("hf", (0, 100.0, 2.0), (1, 120.0, 2.2)) + seeded("tunecompile", (0, 120.0, 2.1), (1, 90.0, 2.1))
    )
    assert compare_curves(runs)[0]["last"] == pytest.approx(0.0)
    assert judge_speed(runs)[0].passed and "105.0 ms against 110.0 ms" in judge_speed(runs)[0].detail


def test_the_report_shows_the_spread(result, tmp_path):
    result["runs"] = seeded("hf", (0, 100.0, 2.0), (1, 125.0, 2.3)) + seeded(
        "tunecompile", (0, 80.0, 2.0), (1, 80.0, 2.3)
    )
    result["settings"]["seeds"] = 2
    paths = write_reports(result, tmp_path)
    for kind in ("md", "html"):
        text = paths[kind].read_text()
        assert "900 (800 to 1,000)" in text and "2.1500 (2.0000 to 2.3000)" in text and "seeds 0 to 1" in text, kind


def test_each_seed_draws_anew_and_weights_stay(tmp_path, monkeypatch):
    """In this process, for time's sake."""
    monkeypatch.setattr(
        "tunecompile.cli.compare.run.run_workers",
        lambda workers, *rest: [tasks.random_runs(w.job, Progress()) for w in workers],
    )
    job = Job(
        system="hf",
        model="llama-tiny",
        mode="lora",
        trainer="loop",
        shapes=("2x16",),
        steps=4,
        layers=1,
        saved_bytes=False,
    )
    made = run_comparison(Comparison([SYSTEMS["hf"]], job, tmp_path, seeds=2, check=False))
    first, second = made["runs"]
    assert (
        (first["seed"], second["seed"]) == (0, 1)
        and first["trainable"] > 0
        and first["losses"] != second["losses"]
        and made["settings"]["seeds"] == 2
    )
    assert max(abs(a - b) for a, b in zip(first["losses"], second["losses"])) < 0.1  # random tokens of the same model


def test_a_system_that_trains_less_is_told():
    same, less = (
        [{"system": name, "trainable": count} for name, count in (("hf", 8), ("unsloth", other))] for other in (8, 2)
    )
    assert judge_work(same)[0].passed and not judge_work(less)[0].passed and "unsloth 2" in judge_work(less)[0].detail
