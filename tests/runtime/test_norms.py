"""The norm behind the last layer, which eager code computes in fp32: of a long batch it is compiled as well."""

import copy

import pytest
import torch

import tunecompile
from tests.support import zoo
from tunecompile.runtime import layer_slot

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


@pytest.mark.slow
@pytest.mark.parametrize("family, adapted", [("llama", True), ("gemma2", False)])
def test_gradients_are_those_of_eager(family, adapted, monkeypatch):
    monkeypatch.setattr(layer_slot, "LARGE", 0)
    model = zoo.adapt(zoo.make(family)) if adapted else zoo.make(family)
    plain = copy.deepcopy(model)
    tunecompile.optimize(model, executor="eager")
    for seed, length in enumerate((24, 17, 9)):
        loss, gradients = zoo.step(model, zoo.batch(length=length, seed=seed))
        expected, reference = zoo.step(plain, zoo.batch(length=length, seed=seed))
        assert (
            loss.item() == pytest.approx(expected.item(), rel=1e-6)
            and max(zoo.errors(gradients, reference).values()) < 1e-5
        )
    (made,) = compiled(model)
    assert made.compiles == 2 and any(
        "rms_norm" in name for name in made.providers
    )  # as it is first, then for all lengths


def test_small_batches_and_evaluation_are_left_alone(monkeypatch):
    model = tunecompile.optimize(zoo.adapt(zoo.make("llama")), executor="eager")
    zoo.step(model, zoo.batch())
    assert not compiled(model)
    monkeypatch.setattr(layer_slot, "LARGE", 0)
    with torch.no_grad():
        model.eval()(**zoo.batch())
    assert not compiled(model)
    zoo.step(model.train(), zoo.batch())
    assert len(compiled(model)) == 1
    tunecompile.restore(model)
    assert not any(module._compiled_call_impl for module in model.modules())


def test_fewer_bytes_are_saved(monkeypatch):
    """Of hidden states in half precision, no copy in fp32."""
    model = tunecompile.optimize(zoo.adapt(zoo.make("llama").to(torch.bfloat16)), executor="eager")
    before = saved_bytes(model)
    monkeypatch.setattr(layer_slot, "LARGE", 0)
    zoo.step(model, zoo.batch(rows=2, length=64))
    hidden = 2 * 64 * zoo.SMALL["hidden_size"]
    assert saved_bytes(model) <= before - 2 * hidden
