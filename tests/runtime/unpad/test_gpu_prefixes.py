"""Rows that begin alike, on a real GPU: no further from fp32 than eager, by one graph for all shapes, twice the same bits."""

import copy
import math

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.batches import branches
from tests.support.compare import equal_bits
from tests.support.models.gpu import assert_no_further, build
from tests.support.reports import shared

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
SHAPES = [(200, 256, 4), (300, 333, 5), (164, 400, 3), (129, 130, 8), (600, 900, 2)]


def on_gpu(batch):
    return {name: value.cuda() for name, value in batch.items()}


@pytest.mark.parametrize(
    "family, mode", [("llama", "qlora"), ("gemma3", "lora"), ("gemma2", "lora"), ("qwen3", "full")]
)
@pytest.mark.parametrize("side", ["none", "right"])
def test_no_further_from_fp32_than_eager(family, mode, side):
    changes = {"sliding_window": 100} if family.startswith("gemma") else {}
    model = build(family, mode, use_cache=False, **changes)
    reference, plain = zoo.in_fp32(model), copy.deepcopy(model)
    tunecompile.optimize(model)
    for seed, (prefix, length, rows) in enumerate(SHAPES):
        inputs = on_gpu(branches(prefix, length, rows, seed, side))
        steps = [zoo.step(each, inputs, torch.bfloat16) for each in (model, plain)]
        assert_no_further(*steps, zoo.step(reference, inputs), 1.25 if side == "right" else math.inf)
    region = tunecompile.report(model).regions[0]
    assert shared(model)[0] == len(SHAPES), tunecompile.report(model)
    # none are known of code that another process compiled
    names = {name for name in region.providers if name.startswith("branch_attention")}
    assert names in ({"branch_attention: triton", "branch_attention_backward: triton"}, set()), region.providers
    assert region.compiles <= (2 if family.startswith("gemma") else 1), region


def test_two_runs_are_equal():
    model = build("llama", "lora")
    tunecompile.optimize(model)
    inputs = on_gpu(branches(300, 400, 6, side="right"))
    zoo.step(model, inputs, torch.bfloat16)
    steps = [zoo.step(model, inputs, torch.bfloat16) for _ in range(3)]
    assert equal_bits(steps[0], steps[1]) and equal_bits(steps[0], steps[2])
