"""The report from a made-up result: self-contained, complete, and honest about rows that failed."""

import re
from dataclasses import asdict

import pytest

from tests.support.comparisons import run

pytest.importorskip("pydantic")

from tunecompile.cli.compare.assemble import break_even
from tunecompile.cli.compare.curves import compare_curves, judge_curves
from tunecompile.cli.compare.judge import passed
from tunecompile.cli.compare.render import error_summary, run_table, write_reports
from tunecompile.cli.compare.result import load_result


def test_three_files_that_say_the_same(result, tmp_path):
    paths = write_reports(result, tmp_path / "deep" / "er")
    assert load_result(paths["json"]) == result
    for kind in ("md", "html"):
        text = paths[kind].read_text()
        for wanted in (
            "not installed",
            "step 501",
            "rms_norm",
            "a note",
            "What?",
            "A check fails",
            "too slow",
            "2 longer ones left out",
        ):
            assert wanted in text, (kind, wanted)
    assert "80.0" in run_table(result["runs"])[1][2]


def test_versions_of_peers_and_how_to_install_one_that_is_away(result):
    assert "version" not in run_table(result["runs"])[0]  # of an older result
    result["runs"][0]["version"] = "5.23.0"
    head, rows = run_table(result["runs"])
    assert rows[0][head.index("version")] == "5.23.0" and rows[1][1] == "not installed: pip install liger-kernel"


def test_the_page_needs_nothing_from_outside_and_escapes(result, tmp_path):
    html = write_reports(result, tmp_path)["html"].read_text()
    assert len(re.findall(r'src="data:image/svg\+xml;base64,', html)) == 6
    assert not re.search(r'(src|href)="(?!data:)', html) and html.count("<script") == 1
    assert "<b>bold</b>" not in html and "&lt;b&gt;bold" in html
    assert html.count("x &lt; y") == 1  # a reason is told once


def test_a_result_without_a_finished_run_is_still_a_report(result, tmp_path):
    result |= {"runs": [{**r, "status": "oom"} for r in result["runs"]], "matches": [], "gradients": [], "answers": []}
    assert "oom" in write_reports(result, tmp_path)["html"].read_text()
    assert not passed(result)


def test_a_reduced_precision_is_shown_beside_and_not_judged_by_gradients(result, tmp_path):
    result["runs"].append(run("tunecompile-fp8", 60.0, 11.0, losses=[3.01, 2.49, 2.26]))
    result |= {
        "curves": compare_curves(result["runs"]),
        "reduced_gradients": [{**row, "error": 0.04} for row in result["gradients"]],
        "verdicts": [asdict(v) for v in judge_curves(result["runs"])],
    }
    paths = write_reports(result, tmp_path)
    for kind in ("md", "html"):
        text = paths[kind].read_text()
        assert (
            "Gradients in 8 bits, not judged" in text
            and "4.00e-02" in text
            and "Loss beside hf" in text
            and "1.00e-02" in text
        )
    assert "Every check passes" in text


def test_gradient_errors_stand_beside_eagers_by_family(result, tmp_path):
    for row in result["gradients"]:
        row["error"] = 1.5e-3 if "lora_A" in row["parameter"] else 1e-3
    rows = {row[0]: row[1:] for row in error_summary(result["gradients"])}
    assert list(rows) == ["all", "mlp up_proj lora_A", "mlp up_proj lora_B"] and rows["all"][:4] == [
        "6",
        "2.00e-03",
        "1.25e-03",
        "37.5%",
    ]
    assert rows["mlp up_proj lora_A"][3:5] == ["25.0%", "0.750"] and rows["mlp up_proj lora_B"][3:5] == [
        "50.0%",
        "0.500",
    ]
    assert error_summary([row | {"error": 4e-3} for row in result["gradients"]])[0][4] == "no: 2.00x as far"
    tiny = error_summary([row | {"error": 2e-7, "eager_error": 1e-7} for row in result["gradients"]])
    assert tiny[0][4] == "both are rounding" and error_summary([]) == []
    paths = write_reports(result, tmp_path)
    for kind in ("md", "html"):
        assert "nearer than eager by" in paths[kind].read_text() and "tunecompile's, median" in paths[
            kind
        ].read_text().replace("&#39;", "'")


def test_break_even():
    eager = run("hf", 100.0, 0.5)
    assert break_even(run("tunecompile", 80.0, 10.5), eager) == 501
    assert break_even(run("tunecompile", 100.0, 10.5), eager) is None
    assert break_even(run("tunecompile", 80.0, 0.1), eager) == 1
