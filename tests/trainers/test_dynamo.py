"""`torch.compile(model, backend="tunecompile")`."""

import importlib.metadata

import pytest
import torch

from tests.support import zoo
from tunecompile.compiler.backend import Backend
from tunecompile.trainers import dynamo

pytestmark = pytest.mark.filterwarnings("ignore")


def test_it_is_a_backend_of_torchs():
    try:
        importlib.metadata.distribution("tunecompile")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("tunecompile is not installed, so that its entry points are unknown")
    assert "tunecompile" in torch._dynamo.list_backends()


def test_a_whole_model(monkeypatch):
    """Rewritten, with the gradients of eager. (Op by op: Inductor takes a minute here.)"""
    made = []

    def quick(name, passes, executor):
        made.append(Backend(name, passes, "eager"))
        return made[-1]

    monkeypatch.setattr(dynamo, "Backend", quick)
    model, reference = (zoo.make("llama", num_hidden_layers=1) for _ in range(2))
    reference.load_state_dict(model.state_dict())
    batch = zoo.batch(256, 2, 12)
    losses = []
    for each, call in ((model, torch.compile(model, backend=dynamo.backend)), (reference, reference)):
        loss = call(**batch).loss
        loss.backward()
        losses.append(float(loss))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for ours, theirs in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    found = {tally.family: tally.rewritten for b in made for context in b.contexts for tally in context.tallies}
    assert found["rms_norm"] == 3 and found["swiglu"] == 1, found
