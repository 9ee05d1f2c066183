"""The support table of experts on a real GPU, in bf16, with the templates: adapters, all weights, experts in 4 bits."""

import copy

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.models.mixtures import MIXTURES, WAYS, make, prepared
from tests.support.models.packed import named
from tests.support.notes import BROKEN, EAGER, find

pytest.importorskip("peft")
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
DEVICE = "cuda"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", MIXTURES)
def test_gradients_are_no_further_from_fp32_than_eagers(family, way):
    """Op by op, so that eighty models take no minutes of Inductor's; test_gpu_experts.py has whole layers of its code."""
    pytest.importorskip("bitsandbytes")
    try:
        ours, dense = prepared(make(family).to(DEVICE, torch.bfloat16), family, way)
    except (AttributeError, TypeError) as error:  # of another transformers
        pytest.skip(str(error))
    batches = [zoo.batch(device=DEVICE, seed=seed) for seed in range(3)]  # one has its luck

    def steps(model):
        made = [zoo.step(model, inputs) for inputs in batches]
        return [loss for loss, _ in made], [named(model, gradients) for _, gradients in made]

    def distances(gradients):
        each = [zoo.errors(got, true, 1e-3) for got, true in zip(gradients, exact)]
        return {name: sum(errors[name] for errors in each) / len(each) for name in each[0]}

    wide, exact = steps(copy.deepcopy(dense).float())
    losses, theirs = steps(dense)
    tunecompile.optimize(ours, executor="eager")
    mine, got = steps(ours)
    eagers, errors, floor = distances(theirs), distances(got), torch.finfo(torch.bfloat16).eps
    assert sum(errors.values()) <= 1.15 * sum(eagers.values()), (errors, eagers)
    worst = max(errors, key=lambda name: errors[name] / max(eagers[name], floor))
    assert errors[worst] <= 2 * max(eagers[worst], floor), (worst, errors[worst], eagers[worst])
    assert all(abs(a - c) <= max(2 * abs(b - c), 1e-2) for a, b, c in zip(mine, losses, wide))
    report = tunecompile.report(ours)
    assert not find(report, *EAGER, *BROKEN, "compiled-without-rewrites"), report
    kinds = len(report.regions)
    counts = {match.family: (match.found, match.rewritten) for match in report.matches}
    assert counts["experts"] == (2 * kinds, 2 * kinds) and counts["expert_rows"] == (3 * kinds, 3 * kinds), report
