"""Models that are trained in threads of one process."""

import threading

import pytest
import torch
from torch.fx import _symbolic_trace

import tunecompile
from tests.models import zoo
from tunecompile._torch import compile_lock

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


def test_a_step_waits_while_another_thread_compiles(monkeypatch):
    model = tunecompile.optimize(zoo.make("llama", num_hidden_layers=2).train(), executor="eager")
    expected, found = zoo.step(model, zoo.batch())[0], []
    another = threading.Thread(target=lambda: found.append(zoo.step(model, zoo.batch())[0]))
    with compile_lock, monkeypatch.context() as patch:
        patch.setattr(_symbolic_trace, "_is_fx_tracing_flag", True)  # as FX does, for all threads
        another.start()
        another.join(1.0)
        assert another.is_alive() and not found
    another.join(60)
    assert len(found) == 1 and torch.equal(torch.as_tensor(found[0]), torch.as_tensor(expected))


def test_a_mistake_of_the_callers_is_not_tried_again():
    """A model that is traced by FX itself."""
    model = tunecompile.optimize(zoo.make("llama", num_hidden_layers=2).train(), executor="eager")
    zoo.step(model, zoo.batch())
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="using FX to symbolically trace"):
        patch.setattr(_symbolic_trace, "_is_fx_tracing_flag", True)
        zoo.step(model, zoo.batch())
