"""The norm behind the last layer, which eager code computes in fp32: of a long batch it is compiled as well."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import tunecompile
from tests.support import zoo
from tests.support.batches import padded
from tests.support.models.pairs import adapted_layers, of_plain_layers, pair, token_wise
from tunecompile.runtime.layers import norm_slot
from tunecompile.runtime.layers.norm_slot import NormSlot
from tunecompile.runtime.step.mode import Mode
from tunecompile.runtime.step.state import Step

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
    model, reference = pair(token_wise)
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
    model = tunecompile.optimize(adapted_layers(), executor="eager")
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
    model = tunecompile.optimize(of_plain_layers().to(torch.bfloat16), executor="eager")
    before = saved_bytes(model)
    monkeypatch.setattr(norm_slot, "LARGE", 0)
    zoo.step(model, zoo.batch(rows=2, length=64))
    hidden = 2 * 64 * zoo.SMALL["hidden_size"]
    assert saved_bytes(model) <= before - 2 * hidden


def test_a_policy_is_scored_by_the_code_that_trains_it(monkeypatch):
    """Eager code would round otherwise: log-ratios of the first step were not 0."""
    monkeypatch.setattr(norm_slot, "LARGE", 0)
    model = tunecompile.optimize(adapted_layers(), executor="eager")
    inputs = {"input_ids": zoo.batch()["input_ids"], "use_cache": False}
    with torch.no_grad():
        old = model(**inputs).logits
    assert len(compiled(model)) == 1 and not old.requires_grad
    new = model(**inputs).logits
    new.sum().backward()
    assert torch.equal(old, new) and compiled(model)[0].compiles == 1


def test_a_norm_reads_the_row_of_its_one_argument():
    """What else it is given, or by name, is as it comes: nothing says what it is for."""
    unpadded = SimpleNamespace(row_of=lambda tensor: ("flat", tensor))
    slot, x = SimpleNamespace(before=(unpadded, None), layer=nn.Identity(), step=Step()), torch.ones(2)
    assert NormSlot._row(slot, (x,), {}) == ("flat", x)
    for args, kwargs in (((x, x), {}), ((), {"hidden_states": x}), ((x,), {"gate": x}), ((), {})):
        assert NormSlot._row(slot, args, kwargs) is None
    slot.before = None
    assert NormSlot._row(slot, (x,), {}) is None


@pytest.mark.parametrize(
    "options", [{}, {"active": False}, {"grad": False}, {"tokens": 5}, {"refused": True}, {"compiling": True}], ids=str
)
def test_a_norm_is_compiled_for_many_tokens_of_a_step(options, monkeypatch):
    """Anywhere else it is the module's own code, whose rounding others know."""
    told = {"active": True, "grad": True, "tokens": 6, "refused": False, "compiling": False, **options}
    monkeypatch.setattr(norm_slot, "LARGE", 24)
    monkeypatch.setattr(norm_slot, "is_compiling", lambda: told["compiling"])
    slot = SimpleNamespace(
        step=Step(mode=Mode.TRAIN if told["active"] else Mode.EAGER), layer=nn.Identity(), compiled=None
    )
    slot._refused, slot._gathered = lambda: told["refused"], lambda compiled, args, kwargs: "compiled"
    with torch.set_grad_enabled(told["grad"]):
        found = NormSlot._norm(slot, (torch.ones(1, told["tokens"]),), {})
    assert isinstance(found, torch.Tensor) if options else found == "compiled"
