"""What the parts of one model share."""

from types import SimpleNamespace

from torch import nn

from tunecompile.integrations.rank_store import RankStore
from tunecompile.runtime import model_state
from tunecompile.runtime.model_state import State
from tunecompile.runtime.parts import StepTelemetry


def test_the_ranks_store_is_looked_for_once(monkeypatch):
    """As a step first needs it: the name that ranks meet under has the parameters that are there then."""
    made, model = [], nn.Linear(1, 1)
    settings = type("Settings", (), {"memory": None})()
    monkeypatch.setattr(RankStore, "of", lambda given: made.append(given) or RankStore(None, 0, 1))
    assert model_state.RankStore is RankStore
    state = State(model, settings, ())
    assert state.has_store is False and made == []
    store = state.store
    assert state.has_store is True and state.store is store and made == [model]
    assert State(model, settings, (), store).store is store and State(model, settings, (), store).has_store is True
    assert made == [model]


def test_steps_are_timed_where_a_monitor_may_ask():
    part = StepTelemetry()
    part.telemetry = None
    assert part.step_ms is None
    part.telemetry = SimpleNamespace(step_ms=12.5)
    assert part.step_ms == 12.5
