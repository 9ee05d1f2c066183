"""Rounding in half precision, and compilations of deep models. (Each family's gradients: test_golden.py.)"""

import copy
from collections import Counter

import pytest
import torch

import tunecompile
from tests.support import zoo

pytest.importorskip("transformers")


def test_half_precision_is_no_worse_than_eager():
    """Error against fp32 (on the same dequantised weights), with eager's own as the yardstick. One batch's rounding is noise
    of a third either way, so the errors of four are averaged."""
    model = zoo.adapt(zoo.quantize(zoo.make("llama").to(torch.bfloat16), torch.bfloat16))
    reference, plain = zoo.in_fp32(model), copy.deepcopy(model)
    tunecompile.optimize(model, executor="eager")
    theirs, mine = Counter(), Counter()
    for seed in range(4):
        inputs = zoo.batch(length=64, seed=seed)
        _, exact = zoo.step(reference, inputs)
        theirs.update(zoo.errors(zoo.step(plain, inputs, torch.bfloat16)[1], exact))
        mine.update(zoo.errors(zoo.step(model, inputs, torch.bfloat16)[1], exact))
    assert median(mine.values()) <= median(theirs.values())
    floor = 4 * torch.finfo(torch.bfloat16).eps
    worst = max(mine, key=lambda name: mine[name] / max(theirs[name], floor))
    assert mine[worst] / max(theirs[worst], floor) < 1.25, worst


def median(values) -> float:
    return sorted(values)[len(values) // 2]


def test_compiles_at_most_twice_with_the_default_cache_setting():
    model = zoo.adapt(zoo.make("llama", num_hidden_layers=12))
    assert model.config.use_cache
    tunecompile.optimize(model, executor="eager")
    for seed in range(3):
        zoo.step(model, zoo.batch(seed=seed))
    assert tunecompile.report(model).compiles <= 2
