"""Models of speech under adapters: what is found in their encoders and decoders, and the gradients of eager code."""

import copy

import pytest
import torch

import tunecompile
from tests.models import golden
from tests.support import zoo
from tests.support.models import speech
from tests.support.notes import EAGER, find

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


@pytest.mark.parametrize("name", speech.MODELS)
def test_a_model_of_speech(name):
    """In batches of several sizes; encoders are compiled in one piece, also where sounds are of several lengths."""
    torch._dynamo.reset()
    make, batches = speech.MODELS[name]
    reference = zoo.adapt(make(), target_modules=list(speech.LINEARS), task_type=None).train()
    model = tunecompile.optimize(copy.deepcopy(reference), executor="eager")
    for inputs in batches():
        (loss, ours), (exact, theirs) = zoo.step(model, inputs), zoo.step(reference, inputs)
        assert abs(loss - exact) < 1e-5 and set(ours) == set(theirs)
        assert max(zoo.errors(ours, theirs, 1e-6).values()) < 1e-5
    report = tunecompile.report(model)
    found = {match.family: (match.found, match.rewritten) for match in report.matches if match.found}
    assert found == golden.SPEECH[name] and not find(report, *EAGER), report
