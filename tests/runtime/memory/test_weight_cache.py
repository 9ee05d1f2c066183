"""Frozen weights kept dequantised: the same gradients whatever happens to weights, adapters and the order of calls."""

import copy
import dataclasses
import gc
import weakref

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.memory.weight_cache import (
    accumulated,
    activate,
    add,
    assert_same_by_element,
    gradients,
    interleaved,
    kept,
    step,
)
from tunecompile._torch import saved_strides
from tunecompile.ops import lora_linear
from tunecompile.runtime.memory.weight_cache import WeightCache

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")
ROOMY = "4GiB"


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"lora_dropout": 0.3}, {"use_rslora": True, "target_modules": ["q_proj", "up_proj", "down_proj"]}]
)
def test_training_is_the_same(options):
    model, reference = build(**options), build("eager" if "lora_dropout" not in options else None, **options)
    optimizers = [
        torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2) for m in (model, reference)
    ]

    for _ in range(3):
        assert_same_by_element(model, reference, accumulated)
        for optimizer in optimizers:
            optimizer.step()
    assert kept(model).bytes > 0 and tunecompile.report(model).memory["kept_weights"] == kept(model).bytes
    assert "frozen weights stay dequantised" in str(tunecompile.report(model)) and not tunecompile.report(model).notes


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


def copied_into(model, values):
    for name, p in model.named_parameters():
        if name in values:
            p.copy_(values[name])


def loaded_into(model, values):
    assert not model.load_state_dict(values, strict=False).unexpected_keys


@pytest.mark.parametrize("write", [copied_into, pytest.param(loaded_into, marks=pytest.mark.slow)])
def test_4_bit_weights_that_are_written_in_place(write):
    """A step after it computes with the new values, and not with matrices of the old ones."""
    model, reference = build(), build("eager")
    assert_same_by_element(model, reference)
    before, held = step(model), kept(model).bytes
    for m in (model, reference):
        packed = {name: p.detach().flip(0) for name, p in m.named_parameters() if p.dtype == torch.uint8}
        assert len(packed) == 14
        with torch.no_grad():
            write(m, packed)
    assert_same_by_element(model, reference)
    assert held == kept(model).bytes > 0 and max(zoo.errors(step(model)[1], before[1]).values()) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("rank", [4, 70])
def test_another_adapter_between_forward_and_backward(rank):
    model, reference = build(), build("eager")
    for m in (model, reference):
        add(m, "other", r=rank)

    assert_same_by_element(model, reference, interleaved)
    assert_same_by_element(model, reference, interleaved)


@pytest.mark.slow
def test_a_pending_backward_outlives_the_plan():
    """Of another adapter than the one that ran last, when a bigger batch takes the matrices' room."""
    roomy = build(target_modules=["q_proj", "v_proj"])
    step(roomy)
    needed = roomy._tunecompile.step.budget.admitted
    model = build(int(1.2 * (needed.weights + needed.choice.peak)), target_modules=["q_proj", "v_proj"])
    reference = build("eager", target_modules=["q_proj", "v_proj"])
    for m in (model, reference):
        add(m, "other")

    def run(m):
        m.zero_grad()
        losses = []
        for name, rows in (("default", 2), ("other", 2), ("other", 12)):
            activate(m, name)
            losses.append(m(**zoo.batch(rows=rows)).loss)
        sum(losses).backward()
        return losses[0].detach(), gradients(m)

    assert_same_by_element(model, reference, run)


@pytest.mark.slow
def test_weights_that_are_moved_or_replaced_leave_nothing_behind():
    model, reference = build(), build("eager")
    assert_same_by_element(model, reference)
    held = kept(model).bytes
    for _ in range(3):
        for m in (model, reference):
            for p in m.parameters():
                p.data = p.data.clone()  # as .to(device) does
            m.merge_adapter()  # 4-bit weights are replaced
            m.unmerge_adapter()
        assert_same_by_element(model, reference)
        assert kept(model).bytes == held


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
