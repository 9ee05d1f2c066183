"""Models with LayerNorm under autocast, as a Trainer with bf16=True runs them: on a GPU their norms give fp32."""

import copy
from collections import Counter

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.autocast import norms_as_on_a_gpu

pytest.importorskip("peft")
pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def as_on_a_gpu():
    with norms_as_on_a_gpu():
        yield


def test_norms_are_found_and_gradients_no_worse_than_eager():
    """One batch's rounding is noise of a third either way, so errors of several are added up."""
    model = zoo.make("starcoder2").to(BF16)
    reference, plain = zoo.in_fp32(model), copy.deepcopy(model)
    tunecompile.optimize(model, executor="eager")
    theirs, mine = Counter(), Counter()
    for seed in range(4):
        inputs = zoo.batch(length=32, seed=seed)
        _, exact = zoo.step(reference, inputs)
        theirs.update(zoo.errors(zoo.step(plain, inputs, BF16)[1], exact, 1e-3))
        mine.update(zoo.errors(zoo.step(model, inputs, BF16)[1], exact, 1e-3))
    report = tunecompile.report(model)
    found = {match.family: (match.found, match.rewritten) for match in report.matches}
    assert (found["layer_norm"], found["add_layer_norm"]) == ((2, 2), (1, 1)), report
    middle = [sorted(each.values())[len(each) // 2] for each in (mine, theirs)]
    assert middle[0] <= middle[1] * 1.02
    floor = 4 * torch.finfo(BF16).eps
    worst = max(mine, key=lambda name: mine[name] / max(theirs[name], floor))
    assert mine[worst] / max(theirs[worst], floor) < 1.4, worst


def test_a_layer_saves_what_it_saves_in_bf16():
    """Without autocast a norm takes and gives bf16: its input is saved, and neither its result nor a copy in fp32."""
    saved = []
    for autocast in (None, BF16):
        torch._dynamo.reset()
        model = tunecompile.optimize(zoo.make("starcoder2", num_hidden_layers=2).to(BF16).train(), executor="eager")
        zoo.step(model, zoo.batch(), autocast)
        saved.append(tunecompile.report(model).regions[0].saved_bytes[-1])
    assert saved[0] == saved[1] > 0
