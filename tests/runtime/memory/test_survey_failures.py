"""A survey that fails: the step is right, and what was found before stays."""

import pytest

import tunecompile
from tests.support import zoo
from tests.support.compare import assert_equal
from tests.support.memory.budgets import build, needed, step
from tests.support.models.pairs import attending, optimized
from tests.support.notes import find, has
from tunecompile.planner import candidates

pytest.importorskip("transformers")
pytest.importorskip("peft")


@pytest.mark.slow
def test_a_second_survey_that_fails_leaves_what_the_first_found(monkeypatch):
    inner, broken = candidates.survey, []

    def survey(cut, plans):
        if broken:
            raise RuntimeError("cannot be cut like that")
        return inner(cut, plans)

    monkeypatch.setattr(candidates, "survey", survey)
    model, reference = build(int(0.8 * needed())), build(None)
    assert_equal(step(model), step(build(None)))
    budget = model._tunecompile.step.budget
    (before,) = budget.surveys.candidates.values()
    broken.append(True)
    for _ in range(3):
        assert_equal(step(model, rows=8), step(reference, rows=8))
    (after,) = budget.surveys.candidates.values()
    assert not before.whole and after.whole and after.rows == before.rows and len(after.rows) > 1
    assert any(plan["recompute"] for plan in tunecompile.report(model).memory["plans"])
    assert len(find(model, "no-memory-plan", "few-memory-plans", detail="cannot be cut like that")) == 1


def test_a_survey_that_fails_leaves_what_it_found(monkeypatch):
    inner, courses = candidates.survey, []

    def survey(cut, plans):
        courses.append(plans)
        if len(courses) == 3:
            raise RuntimeError("cannot be cut like that")
        return inner(cut, plans)

    monkeypatch.setattr(candidates, "survey", survey)
    model, whole = (optimized(zoo.adapt(attending()).train(), memory=memory) for memory in ("1KiB", None))
    assert_equal(step(model), step(whole))
    report = tunecompile.report(model)
    assert any(plan["recompute"] for plan in report.memory["plans"])
    assert has(report, "few-memory-plans", detail="cannot be cut like that")
