"""Diffusion transformers of diffusers: two streams of tokens, several lists of blocks, no head, sizes that change."""

import pytest
import torch

import tunecompile
from tests.support.compare import assert_close
from tests.support.models.diffusion import (
    LAYERS,
    adapted,
    batch,
    flux,
    in_nf4,
    qwen_image,
    sd3,
    step,
    wan,
)
from tests.support.notes import BROKEN, EAGER, find

pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = ({}, dict(height=6), dict(height=2, width=6, text=9), dict(rows=3, height=3, text=5))
FEW = dict(target_modules=["to_q"])  #: where adapters do not matter: graphs are half as large
ONE_ROW = (dict(rows=1), dict(rows=1, height=3, width=3, text=7))
#: model -> rewritten in all kinds of blocks: adapted linears, rotations, modulated norms, those of sums
FOUND = {flux: (17, 4, 5, 2), qwen_image: (12, 4, 4, 2), wan: (10, 2, 2, 1), sd3: (21, 0, 7, 3)}
FAMILIES = ("lora", "rope", "modulated_norm", "add_modulated_norm")


def matched(report):
    return tuple({m.family: m.rewritten for m in report.matches}.get(family, 0) for family in FAMILIES)


@pytest.mark.parametrize(
    "make", [wan, *(pytest.param(make, marks=pytest.mark.slow) for make in (flux, qwen_image, sd3))]
)
def test_gradients_at_every_size_are_those_of_eager(make):
    model = adapted(make)
    expected = [step(model, batch(make, **size)) for size in SIZES]
    tunecompile.optimize(model, executor="eager")
    for size, each in zip(SIZES, expected):
        assert_close(step(model, batch(make, **size)), each)
    report = tunecompile.report(model)
    assert matched(report) == FOUND[make], report
    assert all(m.found == m.rewritten for m in report.matches), report
    assert sum(region.layers for region in report.regions) == LAYERS * (1 + (make is flux)), report
    assert {region.compiles for region in report.regions} == {1}, report
    assert not find(report, *EAGER, *BROKEN), report.notes


def test_batches_of_one_row_have_one_graph():
    model = adapted(wan, **FEW)
    expected = [step(model, batch(wan, **size)) for size in ONE_ROW]
    tunecompile.optimize(model, executor="eager")
    for size, each in zip(ONE_ROW, expected):
        assert_close(step(model, batch(wan, **size)), each)
    assert {region.compiles for region in tunecompile.report(model).regions} == {1}


def test_checkpoints_around_blocks_in_nf4_are_a_budget():
    """diffusers' model calls the checkpoint, and not its blocks. A plan is made from it, until it is switched off."""
    pytest.importorskip("bitsandbytes")
    model = adapted(wan, in_nf4, **FEW)
    expected = [step(model, batch(wan, **size)) for size in SIZES[:2]]
    model.enable_gradient_checkpointing()
    function = model._gradient_checkpointing_func
    tunecompile.optimize(model, executor="eager")
    for size, each in zip(SIZES, expected):
        assert_close(step(model, batch(wan, **size)), each)
    report = tunecompile.report(model)
    (found,) = [match for match in report.matches if match.family == "nf4"]
    assert (found.found, found.rewritten) == (10, 10), report
    assert {region.compiles for region in report.regions} == {1} and not find(report, *EAGER, *BROKEN), report
    assert find(report, "checkpointing-is-budget"), report.notes
    model.disable_gradient_checkpointing()
    assert_close(step(model, batch(wan)), expected[0])
    assert not find(model, "checkpointing-is-budget")
    model.enable_gradient_checkpointing(function)
    assert_close(step(model, batch(wan)), expected[0])
    tunecompile.restore(model)
    assert model._gradient_checkpointing_func is function


@pytest.mark.slow
def test_a_step_is_verified():
    def error(model, given):
        return torch.nn.functional.mse_loss(model(**given["inputs"])[0], given["noise"])

    model, (inputs, noise) = adapted(sd3), batch(sd3)  # which has no rotations, that are in fp32 in the reference, too
    tunecompile.optimize(model, executor="eager")
    result = tunecompile.verify(model, {"inputs": inputs, "noise": noise}, loss=error)
    assert result.passed and matched(tunecompile.report(model)) == FOUND[sd3], result
