"""The tables of the README and of the docs, of results that are made up."""

import json

from benchmarks import report, report_tables


def test_tables_leave_out_what_was_cut_off(tmp_path):
    run = {"model": "m", "mode": "lora", "shape": "1x8"}
    for name, more in (("whole", {}), ("part", {"incomplete": ["check"]})):
        (tmp_path / f"{name}.json").write_text(json.dumps({"date": name, "runs": [run], **more}))
    assert [result["date"] for result in report_tables.load_results(tmp_path)] == ["whole"]
    assert report_tables.load_one("whole.json", tmp_path) and report_tables.load_one("part.json", tmp_path) is None


def test_a_row_that_no_time_was_left_for_is_in_no_table():
    run = {"model": "m", "mode": "lora", "shape": "1x8", "system": "hf", "status": "ok", "tokens_per_s": 5.0}
    run |= {"step_ms": {"median": 8.0, "min": 8.0, "max": 8.0}, "peak_gib": 1.0, "first_step_s": 1.0}
    late = {**run, "system": "unsloth", "status": "left out: no time was left"}
    table = report_tables.render_speed([{"date": "2026", "runs": [run, late], "versions": {}, "machine": {"gpu": "g"}}])
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
    lines = [line for line in report.render_trainers(tmp_path).splitlines() if "Trainer," in line]
    assert [line.split(" | ")[0][2:9] for line in lines] == ["DPOTrai", "DPOTrai", "GRPOTra"] and len(lines) == 3
    assert lines[0].endswith("| 2.00x |") and lines[1].endswith("|  |") and lines[2].endswith("|  |")
    assert report.render_trainers(tmp_path / "nothing") == ""


def test_a_case_says_what_is_not_usual():
    run = {"model": "m", "mode": "lora", "shape": "1x8"}
    assert report_tables.case(run) == "m, lora, 1x8"
    assert (
        report_tables.case({**run, "layers": 2, "experts": True, "rank": 8})
        == "m (2 layers), lora with experts, rank 8, 1x8"
    )


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
    (row,) = [line for line in report.render_predictions(tmp_path).splitlines() if line.startswith("| m")]
    assert row == "| m, qlora, 4x2048 | tunecompile, memory=auto | 9.50 | 10.00 | -5.0 % | 210 | 200 | +5.0 % |"
    assert report.render_predictions(tmp_path / "nothing") == ""


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
    text = report.render_scaling(tmp_path)
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
    text = report.render_scaling(tmp_path)
    assert (
        "| 2 | 390 | 2.0 | 1.0 | 97.5 % | 3.90x | 1.00x |" in text
        and "| none, each alone | **tunecompile** | 2 | 400 | 2.0 | 1.0 |  |  |  |" in text
    )


def test_generation_stands_beside_transformers_loop(tmp_path):
    """A size that one of them did not end has no row."""
    run = {"model": "m", "mode": "qlora", "layers": 4, "shape": "8x128+64", "status": "ok", "first_s": 2.0}
    run |= {"tokens_per_s": 1600.0, "apart": 0.01}
    runs = [
        run | {"system": "hf", "ms_a_token": 100.0},
        run | {"system": "hf", "ms_a_token": 90.0, "shape": "1x128+64"},
        run | {"system": "tunecompile", "ms_a_token": 5.0, "apart": 0.02, "beside_gib": 1.25},
        run | {"system": "tunecompile", "shape": "1x128+64", "status": "error: no memory"},
    ]
    result = {"date": "2026", "versions": {"torch": "2"}, "machine": {"gpu": "g"}, "runs": runs}
    (tmp_path / "generation-m.json").write_text(json.dumps(result))
    text = report.render_generation(tmp_path)
    row = "| m (4 layers), qlora, 8x128+64 | 100 | 5.0 | 20x | 1,600 | 2 | 1.2 | 0.020 (0.010) |"
    assert row in text and "1x128" not in text
    assert report.render_generation(tmp_path / "nothing") == ""


def test_first_losses_stand_beside_each_other(tmp_path):
    """Each batch has its own last step; none of these is a row of the table of speeds."""
    common = {"model": "m", "mode": "lora", "layers": 2, "shape": "2x8,1x4", "steps": 3, "status": "ok"}
    common |= {"steps_s": [1.0, 0.5, 0.02, 0.01], "all_s": 1.52}
    runs = [{**common, "system": "hf", "kind": "eager", "first_loss_s": 0.04}]
    runs += [{**common, "system": "tunecompile", "kind": "cold", "first_loss_s": 0.9}]
    header = {"date": "2026-01-01T00:00:00Z", "machine": {"gpu": "G"}, "versions": {"torch": "2", "transformers": "5"}}
    (tmp_path / "first-loss-m.json").write_text(json.dumps({**header, "runs": runs}))
    _, _, eager, ours, *_ = report.render_first_losses(tmp_path).splitlines()
    assert eager == "| m (2 layers), lora, 2x8,1x4 | eager | 0.0 | 3 in 1.5 | 20, 10 |"
    assert ours.endswith("| **tunecompile**, caches empty | 0.9 | 3 in 1.5 | 20, 10 |")
    assert not report.load_results(tmp_path)


def test_steps_with_images_have_a_section_once_they_were_measured(tmp_path):
    """A system that does not tell how much it compiled has no number, which is not zero."""
    run = {"model": "m", "mode": "lora", "shape": "4x256+~512px", "images": 10, "tower": "frozen", "status": "ok"}
    run |= {"step_ms": {"median": 20.0, "min": 10.0, "max": 90.0}, "peak_gib": 1.0, "first_step_s": 1.0}
    run |= {"repeats": 2, "all_step_ms": [90.0, 10.0, 20.0, 30.0]}
    runs = [
        run | {"system": "tunecompile", "tokens_per_s": 30.0, "slow_steps": 0, "late_compilations": 0},
        run | {"system": "hf", "tokens_per_s": 10.0, "slow_steps": 3},
        {"system": "unsloth", "status": "oom"},
    ]
    result = {"date": "2026", "versions": {"torch": "2"}, "machine": {"gpu": "g"}, "runs": runs}
    (tmp_path / "vision-m.json").write_text(json.dumps(result))
    text = report.render_vision(tmp_path)
    case = "| m, lora, 4x256+~512px, 10 sizes, tower frozen, steps 3 to 4 | "
    assert case + "HF + PEFT | 10 | 20 (10 to 90) | 3 |  | 1.0 | 1.0 | 3.00x |" in text
    assert case + "**tunecompile** | 30 | 20 (10 to 90) | 0 | 0 | 1.0 | 1.0 |  |" in text
    assert text.startswith("## ") and "Unsloth |" not in text and report.render_vision(tmp_path / "nothing") == ""
    (tmp_path / "embeddings-m.json").write_text(json.dumps(result))
    assert "| m, lora, 4x256+~512px | HF + PEFT | 10 | 20 (10 to 90) | 3 |" in report.render_others(tmp_path)
    assert not report_tables.load_results(tmp_path)


def test_whole_runs_have_a_section_and_a_row_once_they_were_measured(tmp_path):
    """A run that was cut has none; ratios are tunecompile's time with empty caches beside another's."""
    run = {"model": "llama-3.1-8b", "mode": "qlora", "shape": "2x~200", "accumulation": 4, "steps": 60, "status": "ok"}
    run |= {"step_ms": {"median": 550.0}, "peak_gib": 6.5, "wall_first_s": 20.0, "wall_tenth_s": 30.0}
    run |= {"slow_steps": [5], "captured": {"1": 2, "3": 1}, "checkpointing": True, "caches": "cold"}
    runs = [
        run | {"system": "tunecompile", "wall_s": 80.0},
        run | {"system": "tunecompile", "wall_s": 70.0, "caches": "warm", "peak_gib": 6.0},
        run | {"system": "unsloth", "wall_s": 160.0},
        run | {"system": "tunecompile-no-checkpoint", "wall_s": 79.0, "checkpointing": False, "wall_tenth_s": None},
        run | {"system": "hf", "wall_s": 200.0, "status": "incomplete"},
    ]
    result = {"date": "2026", "versions": {"torch": "2"}, "machine": {"gpu": "g"}, "runs": runs}
    assert report.render_runs(tmp_path) == "" and "steps from" not in report.render_rivals(tmp_path)
    (tmp_path / f"{report_tables.RUN}.json").write_text(json.dumps(result))
    text = report.render_runs(tmp_path)
    case = "| llama-3.1-8b, qlora, 2x~200 x 4, 60 steps | "
    assert case + "Unsloth | cold | 160 | 20 | 30 | 0.55 | 1 | 1: 2, 3: 1 | 6.5 | 0.50 of it |" in text
    assert case + "**tunecompile** | warm | 70 |" in text and "HF + PEFT |" not in text and text.startswith("## ")
    assert case + "**tunecompile**, checkpointing off | cold | 79 | 20 |  | 0.55 |" in text
    about = "| llama-3.1-8b, qlora, 2x~200 x 4, 60 steps from process start to saved adapter |"
    cells = "  |  |  | 160 s (6.5) ¹ | **80 s (6.5)**, caches warm 70 s (6.0) |"
    assert about + cells in report.render_rivals(tmp_path) and not report_tables.load_results(tmp_path)
    result["runs"] = runs[2:]
    (tmp_path / f"{report_tables.RUN}.json").write_text(json.dumps(result))
    assert "steps from" not in report.render_rivals(tmp_path) and case in report.render_runs(tmp_path)
