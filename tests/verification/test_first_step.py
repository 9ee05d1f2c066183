"""`optimize(model, verify=True)`: the first training step is verified, and goes on as if nothing had looked at it."""

import copy
import importlib

import pytest

import tunecompile
import tunecompile.passes
from tests.support import zoo
from tests.support.models.verified import build
from tests.support.notes import find, has
from tests.support.planted_passes import planted_passes

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")
verification = importlib.import_module("tunecompile.verification.verify")  # the package has the function by that name


@pytest.mark.gpu  # needs none, but half a minute
def test_the_first_training_step_is_verified(monkeypatch, caplog):
    monkeypatch.setattr(tunecompile.passes, "PIPELINE", planted_passes(1.01))
    model, plain = build(), None
    plain = tunecompile.optimize(copy.deepcopy(model), executor="eager")
    monkeypatch.undo()
    expected = zoo.step(tunecompile.optimize(copy.deepcopy(model), executor="eager"), zoo.batch())
    monkeypatch.setattr(tunecompile.passes, "PIPELINE", planted_passes(1.01))
    tunecompile.optimize(model, executor="eager", verify=True)
    loss, gradients = zoo.step(model, zoo.batch())
    assert (
        max(zoo.errors(gradients, expected[1]).values())
        < 1e-5
        < max(zoo.errors(zoo.step(plain, zoo.batch())[1], expected[1]).values())
    )
    (note,) = find(model, "verified")
    assert "the rewrite at fault is planted: wrong" in note.detail and "FAILED" in caplog.text
    zoo.step(model, zoo.batch())
    assert len(find(model, "verified")) == 1


@pytest.mark.slow
def test_under_accelerates_mixed_precision():
    accelerate = pytest.importorskip("accelerate")
    model = tunecompile.optimize(build(), executor="eager", verify=True)
    model = accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare_model(model)
    batch = zoo.batch(rows=4, length=64)
    model(**batch).loss.backward()
    result = tunecompile.verify(model, batch)
    assert result.reference == "float32" and 1e-4 < max(row["eager_error"] for row in result.gradients) < 0.1
    assert has(model, "verified")


@pytest.mark.slow
def test_a_trial_that_fails_leaves_the_model_as_it_was(monkeypatch):
    monkeypatch.setattr(tunecompile.passes, "PIPELINE", planted_passes(1.01))
    model = tunecompile.optimize(build(), executor="eager", verify=True)
    before = model._tunecompile.passes
    monkeypatch.setattr(verification, "find", lambda passes, wrong: wrong(passes[:1]) and 1 / 0)
    zoo.step(model, zoo.batch())
    assert model._tunecompile.passes == before and has(model, "not-verified", detail="ZeroDivisionError")
