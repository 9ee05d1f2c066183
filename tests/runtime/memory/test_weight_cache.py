"""Frozen weights kept dequantised: the same gradients whatever happens to weights, adapters and the order of calls."""

import copy
import dataclasses
import gc
import weakref

import pytest
import torch

import tunecompile
from tests.support import zoo
from tunecompile._torch import saved_strides
from tunecompile.ops import lora_linear
from tunecompile.runtime.memory.weight_cache import WeightCache

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")
ROOMY = "4GiB"


def kept(model):
    return model._tunecompile.kept


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def step(model):
    model.zero_grad()
    loss = model(**zoo.batch()).loss
    loss.backward()
    return loss.detach(), gradients(model)


def assert_same_by_element(model, reference, run=step):
    """Gradients element by element: a stale weight changes few."""
    (loss, ours), (expected, theirs) = run(model), run(reference)
    assert ours.keys() == theirs.keys()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-6, msg=name)


@pytest.fixture(autouse=True)
def gpu_paths(monkeypatch):
    """On a CPU the reference would read W only; these read the whole matrix."""
    for op in (lora_linear, lora_linear.backward_op):
        monkeypatch.setattr(
            op,
            "providers",
            [
                dataclasses.replace(p, refuses=lambda *_: None) if p.name in ("k_extension", "grouped") else p
                for p in op.providers
            ],
        )


def build(memory=ROOMY, **options):
    model = zoo.adapt(zoo.quantize(zoo.make("llama", num_hidden_layers=2)), **options).train()
    return tunecompile.optimize(model, memory=memory, executor="eager") if memory != "eager" else model


def test_an_optimizer_that_writes_behind_autograds_back(monkeypatch):
    """Also where strides of saved tensors are compared: matrices stand in the places of 4-bit weights."""
    monkeypatch.setattr(saved_strides._Seen, "hooks", True)
    model, reference = build(), build("eager")
    for m in (model, reference):
        step(m)
        for p in m.parameters():
            if p.requires_grad:
                p.data.add_(0.05)  # no version counts this
    assert_same_by_element(model, reference)


def test_4_bit_weights_that_are_written_in_place():
    """A step after it computes with the new values, and not with matrices of the old ones."""
    model, reference = build(), build("eager")
    assert_same_by_element(model, reference)
    before, held = step(model), kept(model).bytes
    for m in (model, reference):
        packed = {name: p.detach().flip(0) for name, p in m.named_parameters() if p.dtype == torch.uint8}
        assert len(packed) == 14
        with torch.no_grad():
            for name, p in m.named_parameters():
                if name in packed:
                    p.copy_(packed[name])
    assert_same_by_element(model, reference)
    assert held == kept(model).bytes > 0 and max(zoo.errors(step(model)[1], before[1]).values()) > 0.1


@pytest.mark.slow
def test_matrices_are_freed():
    model = build()
    step(model)
    alive = [weakref.ref(values) for values in kept(model).matrices.values()]
    assert alive
    tunecompile.restore(model)
    gc.collect()
    assert not any(ref() is not None for ref in alive)
    model = build()
    step(model)
    alive = [weakref.ref(values) for values in kept(model).matrices.values()]
    del model
    gc.collect()
    assert alive and not any(ref() is not None for ref in alive)


def test_layers_of_another_list_run_between(monkeypatch):
    """A tower's mergers: adapters of each list are written once a step, before its first layer."""
    cache, written = WeightCache(), []
    monkeypatch.setattr(cache, "begin", written.append)
    for _ in range(2):
        cache.expect()
        for place, stack in ((0, 0), (1, 0), (4, 1), (2, 0), (5, 1), (3, 0)):
            cache.enter(place, stack)
    assert written == [0, 1, 0, 1]
    cache.enter(1, 0)  # by itself, behind an optimizer's step
    assert written[4:] == [0]


class Patches(torch.nn.Module):
    """Joins each four neighbours of n patches, [n, 32], as towers' mergers do: the width 128 is 32 * (n // (n // 4)) there."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(128, 64), torch.nn.Linear(64, 128)

    def forward(self, hidden):
        joined = (2 * hidden).view(-1, 128)
        return hidden + self.down(torch.nn.functional.gelu(self.up(joined))).view(hidden.shape)


class Tower(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Patches() for _ in range(2))

    def forward(self, hidden):
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


@pytest.mark.slow
def test_a_width_that_is_a_symbol_in_graphs_for_changing_sizes():
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["up", "down"], init_lora_weights=False)
    reference = peft.get_peft_model(zoo.quantize(Tower()), config).train()
    model = tunecompile.optimize(copy.deepcopy(reference), memory=ROOMY, executor="eager")

    def run(m, patches):
        m.zero_grad()
        loss = m(torch.randn(patches, 32, generator=torch.Generator().manual_seed(patches))).square().mean()
        loss.backward()
        return loss.detach(), gradients(m)

    for patches in (12, 20, 32, 12):
        assert_same_by_element(model, reference, lambda m: run(m, patches))
    assert len(kept(model).matrices) == 4
