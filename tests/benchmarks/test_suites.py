"""The suites of other projects, plain and optimized, and each architecture beside itself."""

import json
from types import SimpleNamespace

import pytest

from benchmarks import report
from benchmarks.suites import suites


def test_a_suites_result_says_what_fails_only_when_optimized_and_keeps_what_did_not_run(tmp_path):
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
    from benchmarks.suites import architectures

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
