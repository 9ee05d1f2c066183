"""A budget that nothing else fits has the MLP computed in pieces: fewer bytes, the same losses and gradients."""

import pytest

import tunecompile
from tests.support import zoo
from tests.support.memory.budgets import build, step
from tests.support.models.pairs import small
from tunecompile.cli.compare.meters import count_saved_bytes
from tunecompile.ir.op import Provider
from tunecompile.ops import lora_mlp
from tunecompile.planner import candidates
from tunecompile.planner.solver import KEEP, RECOMPUTE, LayerRun, Plan, PlanOption, choose

pytest.importorskip("transformers")
pytest.importorskip("peft")
SHAPE = dict(rows=2, length=64)


@pytest.fixture(autouse=True)
def joined(monkeypatch):
    """A provider that supports everything, so that the MLP is one op: there is none on a CPU. Fewer pieces are traced sooner."""
    monkeypatch.setattr(candidates, "TILES", (2, 4))
    monkeypatch.setattr(
        lora_mlp, "providers", [Provider("test", lambda *args: lora_mlp.reference(*args), lambda *args: None)]
    )


@pytest.fixture
def surveyed(monkeypatch):
    """The rows of every plan that is tried, by plan."""
    rows = {}
    survey = candidates.survey

    def keep(cut, plans):
        made = survey(cut, plans)
        rows.update({row.plan: row for row in made})
        return made

    monkeypatch.setattr(candidates, "survey", keep)
    return rows


def make(memory):
    return build(memory, make=small, intermediate_size=512)


def saved(model):
    return count_saved_bytes(model, lambda: model(**zoo.batch(**SHAPE)).loss)


def plans(model):
    return tunecompile.report(model).memory["plans"]


@pytest.mark.slow
def test_a_budget_that_nothing_else_fits(surveyed):
    plain = make(None)
    reference = step(plain, **SHAPE)
    model = make("1KiB")
    loss, gradients = step(model, **SHAPE)
    assert saved(model) < 0.5 * saved(plain)
    assert loss.item() == pytest.approx(reference[0].item(), rel=1e-6)
    assert max(zoo.errors(gradients, reference[1]).values()) < 1e-5
    report = tunecompile.report(model)
    assert all(plan["tiles"] > 1 for plan in plans(model)) and f"MLP in {plans(model)[0]['tiles']} tiles" in str(report)
    assert any("lora_mlp_tiled" in name for region in report.regions for name in region.providers)
    whole, half, quarter = surveyed[RECOMPUTE], surveyed[Plan(None, 2)], surveyed[Plan(None, 4)]
    assert (
        quarter.forward < half.forward < 0.7 * whole.forward and quarter.backward < half.backward < 0.7 * whole.backward
    )
    assert quarter.returned == half.returned == whole.returned
    assert quarter.backward_work.products == pytest.approx(whole.backward_work.products, rel=0.05)
    assert surveyed[Plan(tiles=4)].returned < surveyed[KEEP].returned


def test_the_fewest_bytes_in_passing_where_held_bytes_are_equal():
    options = (
        PlanOption(KEEP, 10, 100, 100, 0.0),
        PlanOption(Plan(tiles=4), 10, 30, 30, 0.1),
        PlanOption(Plan(tiles=16), 10, 10, 10, 0.1),
    )
    for room, tiles in ((200, {1}), (100, {4}), (60, {16})):
        choice = choose([LayerRun(4, options)], room)
        assert choice.fits and {o.plan.tiles for o in choice.options[0]} == tiles
