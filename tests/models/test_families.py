"""Every family: all anchors rewritten, loss and gradients as eager computes them."""

import copy
from collections import Counter

import pytest
import torch

import tunecompile
from tests.models.golden import expected
from tests.support import zoo

pytest.importorskip("transformers")


#: its layers have biases, or norms of heads and windows of their own; adapters of plain weights are in other tests, too
QUICK = {("qwen2", "full"), ("gemma3", "qlora")}


def matches(model) -> dict[str, tuple[int, int]]:
    return {m.family: (m.found, m.rewritten) for m in tunecompile.report(model).matches}


@pytest.mark.parametrize(
    "family, mode",
    [
        pytest.param(family, mode, marks=[] if (family, mode) in QUICK else pytest.mark.slow)
        for family in zoo.FAMILIES
        for mode in ("full", "lora", "qlora")
        if family != "mistral" or mode == "lora"
    ],
)
def test_gradients_are_those_of_eager(family, mode):
    model = zoo.make(family)
    if mode == "qlora":
        pytest.importorskip("bitsandbytes")
        model = zoo.quantize(model)
    if mode != "full":
        pytest.importorskip("peft")
        model = zoo.adapt(model)
    inputs = zoo.batch()
    loss, gradients = zoo.step(model, inputs)
    tunecompile.optimize(model, executor="eager")
    got_loss, got = zoo.step(model, inputs)
    assert got_loss.item() == pytest.approx(loss.item(), rel=1e-5)
    worst = max(zoo.errors(got, gradients).items(), key=lambda item: item[1])
    assert worst[1] < 1e-4, worst
    found = matches(model)
    golden, _ = expected(family)
    for name in ("rms_norm", "rope", "swiglu"):
        assert found[name] == golden[name], tunecompile.report(model)
    assert found["linear_cross_entropy"] == (1, 1), tunecompile.report(model)
    if mode != "full":
        assert found["lora"] == (7, 7) and found["grouped_linear"] == (5, 5), tunecompile.report(model)
    if mode == "qlora":
        assert found["nf4"] == (7, 7), tunecompile.report(model)


@pytest.mark.parametrize("mode", ["qlora", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("lora", "full"))])
@pytest.mark.parametrize("autocast", [torch.bfloat16, pytest.param(None, marks=pytest.mark.slow)])
def test_half_precision_is_no_worse_than_eager(mode, autocast):
    """Error against fp32 (on the same dequantised weights), with eager's own as the yardstick. One batch's rounding is noise
    of a third either way, so the errors of four are averaged."""
    model = zoo.make("llama").to(torch.bfloat16)
    if mode == "qlora":
        model = zoo.quantize(model, torch.bfloat16)
    if mode != "full":
        model = zoo.adapt(model)
    reference, plain = zoo.in_fp32(model), copy.deepcopy(model)
    tunecompile.optimize(model, executor="eager")
    theirs, mine = Counter(), Counter()
    for seed in range(4):
        inputs = zoo.batch(length=64, seed=seed)
        _, exact = zoo.step(reference, inputs)
        theirs.update(zoo.errors(zoo.step(plain, inputs, autocast)[1], exact))
        mine.update(zoo.errors(zoo.step(model, inputs, autocast)[1], exact))
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
