"""The norm behind the last layer, which eager code computes in fp32: of a long batch it is compiled as well."""

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.batches import padded
from tests.support.models.pairs import attending, of_plain_layers, pair
from tunecompile.runtime.layers import norm_slot

pytest.importorskip("transformers")
pytest.importorskip("peft")


def compiled(model):
    return [made for made in tunecompile.report(model).regions if made.name.endswith("RMSNorm")]


def saved_bytes(model):
    held = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
        loss = model(**zoo.batch(rows=2, length=64)).loss
    del loss
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values())


def test_padding_is_not_normalised(monkeypatch):
    """Where batches differ by their longest row, a norm of all [B, T] would be long enough to be compiled in the middle of
    a training: 1 of 2 seconds of a GRPO step with completions up to 2,600 tokens."""
    seen: list = []
    run = norm_slot.call_original
    monkeypatch.setattr(norm_slot, "call_original", lambda norm, x: seen.append(x.shape) or run(norm, x))
    model, reference = pair(attending)
    for seed in range(2):
        inputs = padded(3, 24, "left", seed=seed)
        (loss, gradients), (expected, exact) = zoo.step(model, inputs), zoo.step(reference, inputs)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        assert max(zoo.errors(gradients, exact).values()) < 1e-4
        real = int(inputs["attention_mask"].sum())
        assert seen[-1][0] == 1 and real <= seen[-1][1] < real + 8
    model.model.norm.register_forward_hook(lambda *_: None)  # it would see tokens without their rows
    zoo.step(model, inputs)
    assert seen[-1][:2] == inputs["input_ids"].shape


def test_small_batches_are_left_alone(monkeypatch):
    """Those of training steps and of evaluations; a generation runs the norm's own code."""
    model = tunecompile.optimize(zoo.adapt(of_plain_layers(), target_modules=["inner"]), executor="eager")
    zoo.step(model, zoo.batch())
    assert not compiled(model)
    monkeypatch.setattr(norm_slot, "LARGE", 0)
    with torch.no_grad():
        model.eval()(zoo.batch()["input_ids"])
        assert not compiled(model)
        model(**zoo.batch())
        assert len(compiled(model)) == 1
    zoo.step(model.train(), zoo.batch())
    assert len(compiled(model)) == 1
    tunecompile.restore(model)
    assert not any(module._compiled_call_impl for module in model.modules())


def test_fewer_bytes_are_saved(monkeypatch):
    """Of hidden states in half precision, no copy in fp32."""
    model = tunecompile.optimize(attending().to(torch.bfloat16), executor="eager")
    before = saved_bytes(model)
    monkeypatch.setattr(norm_slot, "LARGE", 0)
    zoo.step(model, zoo.batch(rows=2, length=64))
    hidden = 2 * 64 * zoo.SMALL["hidden_size"]
    assert saved_bytes(model) <= before - 2 * hidden


def test_a_policy_is_scored_by_the_code_that_trains_it(monkeypatch):
    """Eager code would round otherwise: log-ratios of the first step were not 0."""
    monkeypatch.setattr(norm_slot, "LARGE", 0)
    model = tunecompile.optimize(zoo.adapt(of_plain_layers(), target_modules=["inner"]), executor="eager")
    inputs = {"input_ids": zoo.batch()["input_ids"], "use_cache": False}
    with torch.no_grad():
        old = model(**inputs).logits
    assert len(compiled(model)) == 1 and not old.requires_grad
    new = model(**inputs).logits
    new.sum().backward()
    assert torch.equal(old, new) and compiled(model)[0].compiles == 1
