"""Models with LayerNorm under autocast, as a Trainer with bf16=True runs them: on a GPU their norms give fp32."""

import copy
from collections import Counter

import pytest
import torch
from torch import nn

import tunecompile
from tests.support import zoo
from tests.support.autocast import norms_as_on_a_gpu
from tests.support.matrix.compiled import bert
from tests.support.models import images, speech

pytest.importorskip("peft")
pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def as_on_a_gpu():
    with norms_as_on_a_gpu():
        yield


def tower() -> tuple[nn.Module, list[dict]]:
    """Adapters in fp32 over a tower and a decoder in bf16."""
    torch.manual_seed(0)
    model, _, targets = images.qwen3_vl()
    model = zoo.adapt(model.to(BF16), target_modules=[*targets, "linear_fc1", "linear_fc2"])
    return model, [images.images_of(grid, BF16) for grid in images.GRIDS[:6]]


def texts(make):
    return lambda: (make(), [zoo.batch(length=32, seed=seed) for seed in range(4)])


def classes() -> tuple[nn.Module, list[dict]]:
    model, given = texts(lambda: bert().to(BF16))()
    return model, [{"input_ids": each["input_ids"], "labels": torch.tensor([0, 2])} for each in given]


def sounds() -> tuple[nn.Module, list[dict]]:
    given = [{**each, "input_features": each["input_features"].to(BF16)} for each in speech.batches()[:4]]
    return zoo.adapt(speech.whisper().to(BF16), target_modules=list(speech.LINEARS), task_type=None), given


NORMS = {"layer_norm": (2, 2), "add_layer_norm": (1, 1)}
SLOW = {
    "qwen3_vl": (tower, {"layer_norm": (3, 3), "add_layer_norm": (1, 1)}),  # the tower's block, and its merger
    "gpt2, adapters": (texts(lambda: zoo.adapt(zoo.make("gpt2").to(BF16))), NORMS),
    "gpt2, in fp32": (texts(lambda: zoo.make("gpt2")), NORMS),
    "starcoder2, adapters": (texts(lambda: zoo.adapt(zoo.make("starcoder2").to(BF16))), NORMS),
    "bert": (classes, {"layer_norm": (2, 2), "add_layer_norm": (2, 2)}),
    "whisper": (sounds, {"layer_norm": (5, 5), "add_layer_norm": (3, 3)}),
}
CASES = {
    "starcoder2": (texts(lambda: zoo.make("starcoder2").to(BF16)), NORMS),
    **SLOW,
}


@pytest.mark.parametrize("name", [pytest.param(each, marks=[pytest.mark.slow] * (each in SLOW)) for each in CASES])
def test_norms_are_found_and_gradients_no_worse_than_eager(name):
    """One batch's rounding is noise of a third either way, so errors of several are added up."""
    torch._dynamo.reset()
    make, expected = CASES[name]
    model, batches = make()
    reference, plain = zoo.in_fp32(model), copy.deepcopy(model)
    tunecompile.optimize(model, executor="eager")
    theirs, mine = Counter(), Counter()
    for inputs in batches:
        wide = {key: each.float() if each.is_floating_point() else each for key, each in inputs.items()}
        _, exact = zoo.step(reference, wide)
        theirs.update(zoo.errors(zoo.step(plain, inputs, BF16)[1], exact, 1e-3))
        mine.update(zoo.errors(zoo.step(model, inputs, BF16)[1], exact, 1e-3))
    report = tunecompile.report(model)
    found = {match.family: (match.found, match.rewritten) for match in report.matches}
    assert {name: found[name] for name in expected} == expected, report
    middle = [sorted(each.values())[len(each) // 2] for each in (mine, theirs)]
    assert middle[0] <= middle[1] * 1.02
    floor = 4 * torch.finfo(BF16).eps
    worst = max(mine, key=lambda name: mine[name] / max(theirs[name], floor))
    assert mine[worst] / max(theirs[worst], floor) < 1.4, worst


@pytest.mark.parametrize("family", ["starcoder2", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_a_layer_saves_what_it_saves_in_bf16(family):
    """Without autocast a norm takes and gives bf16: its input is saved, and neither its result nor a copy in fp32."""
    saved = []
    for autocast in (None, BF16):
        torch._dynamo.reset()
        model = tunecompile.optimize(zoo.make(family, num_hidden_layers=2).to(BF16).train(), executor="eager")
        zoo.step(model, zoo.batch(), autocast)
        saved.append(tunecompile.report(model).regions[0].saved_bytes[-1])
    assert saved[0] == saved[1] > 0
