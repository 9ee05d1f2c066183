"""Diffusion transformers of diffusers: two streams of tokens, several lists of blocks, no head, sizes that change."""


import pytest

import tunecompile
from tests.support.compare import assert_close
from tests.support.models.diffusion import LAYERS, MODELS, adapted, batch, flux, qwen_image, sd3, step, wan
from tests.support.notes import EAGER, find

pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = ({}, dict(height=6), dict(height=2, width=6, text=9), dict(rows=3, height=3, text=5))
#: model -> rewritten in all kinds of blocks: adapted linears, rotations
FOUND = {flux: (17, 4), qwen_image: (12, 4), wan: (10, 2), sd3: (21, 0)}


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_gradients_at_every_size_are_those_of_eager(make):
    model = adapted(make)
    expected = [step(model, batch(make, **size)) for size in SIZES]
    tunecompile.optimize(model, executor="eager")
    for size, each in zip(SIZES, expected):
        assert_close(step(model, batch(make, **size)), each)
    report = tunecompile.report(model)
    found = {m.family: m.rewritten for m in report.matches}
    assert (found["lora"], found.get("rope", 0)) == FOUND[make], report
    assert all(m.found == m.rewritten for m in report.matches), report
    assert sum(region.layers for region in report.regions) == LAYERS * (1 + (make is flux)), report
    assert not find(report, *EAGER), report.notes
