"""The page of a plan: what it predicts adds up, what was sampled stands in it, and what cannot be shown is said."""

import importlib.util

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.memory import full_device
from tests.support.memory.budgets import LAYERS, build, needed, step
from tests.support.models.pairs import small
from tunecompile.errors import MissingExtra, NoPlan, NotOptimized
from tunecompile.report import memory_timeline
from tunecompile.runtime.memory.timeline_trace import STEPS
from tunecompile.runtime.parts import StepTelemetry

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")


def budget_of(model):
    return model._tunecompile.step.budget


def page(model, folder):
    return tunecompile.memory_timeline(model, folder / "memory.html").read_text()


def test_what_cannot_be_shown_is_said(tmp_path):
    with pytest.raises(NotOptimized):
        page(torch.nn.Linear(2, 2), tmp_path)
    for model, says in ((build(None), 'memory="20GiB"'), (build("1GiB"), "run a training step")):
        with pytest.raises(NoPlan, match=says):
            page(model, tmp_path)
    model = full_device.build("auto")
    full_device.step(model)
    with pytest.raises(NoPlan, match="auto"):
        page(model, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_plan_that_could_not_be_made_says_why(monkeypatch, tmp_path):
    from tunecompile.planner import candidates

    monkeypatch.setattr(candidates, "survey", lambda *_: 1 / 0)
    model = build("1MiB")
    step(model)
    with pytest.raises(NoPlan, match="ZeroDivisionError"):
        page(model, tmp_path)


def test_a_missing_package_is_named_with_its_extra(monkeypatch, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find(name, *rest)
    )
    with pytest.raises(MissingExtra, match=r"needs matplotlib.*tunecompile\[cli\]"):
        page(build("1GiB"), tmp_path)


def test_the_picture_is_the_planners_own_sum(tmp_path):
    model = build(int(0.6 * needed(make=small)), make=small)
    step(model)
    budget = budget_of(model)
    parts = memory_timeline.phases(budget)
    places = range(LAYERS)
    assert [(p.kind, p.place) for p in parts] == [
        *(("forward", i) for i in places),
        ("tail", None),
        *(("backward", i) for i in reversed(places)),
    ]
    assert max(p.most for p in parts) + budget.admitted.resident == budget.admitted.peak
    assert (
        all(after.before == before.after for before, after in zip(parts, parts[1:]))
        and parts[0].before == parts[-1].after == 0
    )
    assert sum(row["number"] for row in memory_timeline.rows(budget)) == LAYERS
    assert any("lora_linear" in row["recomputed"] for row in memory_timeline.rows(budget))


@pytest.mark.slow
def test_the_page_stands_alone_and_says_what_a_cpu_cannot_measure(tmp_path):
    model = build(int(0.6 * needed()))
    for _ in range(3):
        step(model)
    text = page(model, tmp_path)
    assert "LlamaForCausalLM" in text and "data:image/svg+xml;base64," in text and "a CPU keeps no count" in text
    assert not any(far in text for far in ("http:", "https:", "<script", "<link", "url("))
    assert budget_of(model).step_ms() is None  # the rates of one kernel say little of another's on a CPU
    assert (
        model._tunecompile.part(StepTelemetry).telemetry.step_ms
        and f"{model._tunecompile.part(StepTelemetry).telemetry.step_ms:,.1f}" in text
    )


@pytest.mark.gpu
def test_measured_bytes_follow_the_plan(tmp_path):
    model = (
        zoo.adapt(zoo.make("llama", num_hidden_layers=LAYERS, hidden_size=512, intermediate_size=1024)).train().cuda()
    )
    model = tunecompile.optimize(model, memory="20GiB", executor="eager")
    for _ in range(STEPS + 2):  # tensors of 8 MiB: the allocator counts up to a MiB more of each than was requested
        model(**zoo.batch(rows=32, length=128, device="cuda")).loss.backward()
        model.zero_grad()
    parts = memory_timeline.phases(budget_of(model))
    assert all(part.measured for part in parts)
    predicted, measured = (parts[LAYERS].before - parts[0].before, parts[LAYERS].measured - parts[0].measured)
    assert 0.7 < measured / predicted < 1.3
    assert "GiB" in page(model, tmp_path)
