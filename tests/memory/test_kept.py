"""Frozen weights kept dequantised: the same gradients whatever happens to weights, adapters and the order of calls."""

import copy

import pytest
import torch

import tunecompile
from tests.models import zoo

pytest.importorskip("transformers")
pytest.importorskip("peft")
ROOMY = "4GiB"


def build(memory=ROOMY, quantized=False, **options):
    model = zoo.make("llama", num_hidden_layers=2)
    model = zoo.adapt(zoo.quantize(model) if quantized else model, **options).train()
    return tunecompile.optimize(model, memory=memory, executor="eager") if memory != "eager" else model


def kept(model):
    return model._tunecompile.kept


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def step(model, **batch):
    model.zero_grad()
    loss = model(**zoo.batch(**batch)).loss
    loss.backward()
    return loss.detach(), gradients(model)


def equal(model, reference, run=step):
    (loss, ours), (expected, theirs) = run(model), run(reference)
    assert ours.keys() == theirs.keys()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize("options", [{}, {"quantized": True}, {"lora_dropout": 0.3}, {"use_rslora": True, "target_modules": ["q_proj", "up_proj", "down_proj"]}])
def test_training_is_the_same(options):
    if options.get("quantized"):
        pytest.importorskip("bitsandbytes")
    model, reference = build(**options), build("eager" if "lora_dropout" not in options else None, **options)
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2) for m in (model, reference)]

    def accumulated(m):
        m.zero_grad()
        torch.manual_seed(5)
        losses = [m(**zoo.batch(seed=seed)).loss for seed in (1, 2)]  # both before their backwards
        sum(losses).backward()
        return sum(losses).detach(), gradients(m)

    for _ in range(3):
        equal(model, reference, accumulated)
        for optimizer in optimizers:
            optimizer.step()
    assert kept(model).bytes > 0 and tunecompile.report(model).memory["kept_weights"] == kept(model).bytes
    assert "frozen weights stay dequantised" in str(tunecompile.report(model)) and not tunecompile.report(model).notes


def test_an_optimizer_that_writes_behind_autograds_back():
    model, reference = build(), build("eager")
    for m in (model, reference):
        step(m)
        for p in m.parameters():
            if p.requires_grad:
                p.data.add_(0.05)  # no version counts this
    equal(model, reference)


@pytest.mark.parametrize("rank", [4, 70])
def test_another_adapter_between_forward_and_backward(rank):
    model, reference = build(), build("eager")
    for m in (model, reference):
        other = copy.deepcopy(m.peft_config["default"])
        other.r = rank
        m.add_adapter("other", other)
        torch.manual_seed(8)
        for name, p in m.named_parameters():
            if "other" in name:
                torch.nn.init.normal_(p, std=0.05)

    def interleaved(m):
        m.zero_grad()
        losses = []
        for name in ("default", "other"):
            m.set_adapter(name)
            for other in ("default", "other"):  # both are trained
                m.set_requires_grad(other)
            losses.append(m(**zoo.batch()).loss)
        (losses[0] + 2 * losses[1]).backward()
        return losses[0].detach(), gradients(m)

    equal(model, reference, interleaved)
    equal(model, reference, interleaved)


def test_weights_that_change():
    model, reference = build(), build("eager")
    equal(model, reference)
    with torch.no_grad():
        for m in (model, reference):
            m.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight.mul_(1.5)
    equal(model, reference)
    for m in (model, reference):
        down = m.get_base_model().model.layers[1].mlp.down_proj.base_layer
        down.weight = torch.nn.Parameter(down.weight.detach() * 0.5, requires_grad=False)
    equal(model, reference)
    held = kept(model).bytes
    for m in (model, reference):
        for p in m.parameters():
            p.data = 0.9 * p.data  # moved, as .to(device) does
    equal(model, reference)
    assert kept(model).bytes == held and len(kept(model).owners) == len(kept(model).matrices)


def test_a_bigger_batch_takes_their_room():
    roomy = build()
    step(roomy)
    needed = roomy._tunecompile.step.budget.admitted
    model, reference = build(int(1.2 * (needed.weights + needed.choice.peak))), build("eager")
    equal(model, reference)
    assert kept(model).bytes == needed.weights
    equal(model, reference, lambda m: step(m, rows=12))
    assert not kept(model).bytes and not tunecompile.report(model).memory["kept_weights"]
    equal(model, reference)


def test_no_room_and_no_wish():
    for memory in (None, "600KiB"):
        model = build(memory)
        step(model)
        assert not kept(model).bytes


def test_merged_and_saved_weights_are_the_models_own(tmp_path):
    model, reference = build(), build("eager")
    equal(model, reference)
    for ours, theirs in zip(model.state_dict().values(), reference.state_dict().values()):
        assert torch.equal(ours, theirs)
    merged, expected = model.merge_and_unload(), reference.merge_and_unload()
    for ours, theirs in zip(merged.parameters(), expected.parameters()):
        assert torch.equal(ours, theirs)
