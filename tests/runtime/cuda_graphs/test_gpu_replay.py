"""CUDA graphs of several shapes in one memory, on a GPU: of layers one by one, and of all together."""

import copy
from statistics import fmean

import pytest
import torch

import tunecompile
from tests.support import zoo
from tunecompile.runtime.cuda_graphs import launch_bound, replay, stacks
from tunecompile.runtime.model_state import state_of

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


def gradients(model, batch, between=lambda: None):
    model.zero_grad(set_to_none=True)
    loss = model(**{name: value.cuda() for name, value in batch.items()}).loss
    between()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_shapes_come_again_in_any_order(monkeypatch):
    """Smaller ones lie over a larger one; a larger one has them recorded anew; and each gives what eager gives."""
    # by the clock, work of other processes on this GPU would decide
    monkeypatch.setattr(launch_bound.Clock, "decide", lambda self: True)
    monkeypatch.setattr(stacks, "MAX_BROKEN", 0)
    reference = zoo.adapt(zoo.make("llama", num_hidden_layers=4, hidden_size=256)).cuda().train()
    model = tunecompile.optimize(copy.deepcopy(reference))
    lengths = [64, *[48] * 4, *[32] * 4, *[96] * 4, *[48, 96, 32, 64] * 5]
    for seed, length in enumerate(lengths):
        batch = zoo.batch(rows=2, length=length, seed=seed)
        (loss, ours), (expected, theirs) = gradients(model, batch), gradients(reference, batch)
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
        assert max(zoo.errors(ours, theirs).values()) < 2e-3, (seed, length)
    replays = state_of(model).replays
    (graph,) = [graph for graph in replays.graphs if len(graph.pool.shapes) > 1]
    assert len({key[0] for key, place in graph.places.items() if place.recording is not None}) == len(graph.pool.shapes)
    recording = [graph for graph in replays.graphs if graph.pool.shapes]
    assert len(replays.recorder.pools) == len(recording), "forwards and backwards share one"
    assert replays.bytes < replay.MAX_SHARE * torch.cuda.get_device_properties(0).total_memory

    batch = zoo.batch(rows=2, length=48, seed=99)
    _, theirs = gradients(reference, batch)
    ours = gradients(model, batch, between=lambda: tunecompile.free(model))  # the backward is still to come
    assert max(zoo.errors(ours[1], theirs).values()) < 2e-3


WINDOWS = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"] * 2}
RECURRENT = {"layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"]}


@pytest.mark.parametrize(
    ("family", "padded", "changes"),
    [
        ("llama", False, {}),
        ("llama", True, {}),
        ("gemma3", True, WINDOWS),
        ("gpt_oss", True, WINDOWS),
        ("qwen3_5", True, RECURRENT),
    ],
)
def test_stacks_of_several_shapes(monkeypatch, family, padded, changes):
    """Their forwards save in one memory, dropout draws anew in each replay, and a second backward is right."""
    monkeypatch.setattr(launch_bound.Clock, "decide", lambda self: True)
    dtype = torch.bfloat16 if padded else torch.float32
    reference = zoo.make(family, num_hidden_layers=4, hidden_size=256, **changes)
    reference = zoo.adapt(reference).cuda().to(dtype).train()
    model = tunecompile.optimize(copy.deepcopy(reference))
    exact = copy.deepcopy(reference).float()
    lengths = [64, *[200] * 3, *[150] * 3, *[300] * 3, *[200, 300, 150, 64] * 3]
    of_losses, of_gradients = (
        [],
        [],
    )  # (ours, eager's) against fp32: of one batch, a token that is routed otherwise counts
    for seed, length in enumerate(lengths):
        batch = zoo.batch(rows=2, length=length, seed=seed)
        if padded:
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
            batch["attention_mask"][0, length - 20 :] = 0
            batch["labels"][0, length - 20 :] = -100
        (loss, ours), (eager, theirs) = gradients(model, batch), gradients(reference, batch)
        right, fp32 = gradients(exact, batch)
        of_losses.append(((loss - right).abs().item(), (eager - right).abs().item()))
        of_gradients.append(tuple(max(zoo.errors(found, fp32).values()) for found in (ours, theirs)))
    for errors, rounding in ((of_losses, 1e-3 if padded else 1e-4), (of_gradients, 2e-3)):
        mine, others = zip(*errors, strict=True)
        assert fmean(mine) <= 1.5 * fmean(others) + rounding, errors
        assert max(mine) <= (most := 3 * max(others) + rounding), errors
    found = state_of(model).replays
    assert found.stacks.chains.recorded >= 3 and not found.stacks.chains.broken, (
        found.notes(),
        found.stacks.chains.recorded,
    )
    assert found.bytes < replay.MAX_SHARE * torch.cuda.get_device_properties(0).total_memory

    batch = zoo.batch(rows=2, length=200, seed=99)
    _, fp32 = gradients(exact, batch)
    _, ours = gradients(model, batch, between=lambda: tunecompile.free(model))  # the backward is still to come
    assert max(zoo.errors(ours, fp32).values()) <= most


def test_dropout_of_a_stack_draws_anew(monkeypatch):
    monkeypatch.setattr(launch_bound.Clock, "decide", lambda self: True)
    reference = zoo.adapt(zoo.make("llama", num_hidden_layers=3), lora_dropout=0.5).cuda()
    # (Triton 3.6 does not compile Inductor's kernel of this dropout in fp32)
    model = tunecompile.optimize(reference.bfloat16().train())
    batch = zoo.batch(rows=2, length=64, seed=0)
    found = [gradients(model, batch) for _ in range(8)]
    assert state_of(model).replays.stacks.chains.recorded == 1
    name = next(name for name in found[0][1] if "lora_A" in name)
    replayed = [each[1][name] for each in found[-4:]]
    assert all((a - b).abs().max() > 1e-6 for a, b in zip(replayed, replayed[1:]))


def test_a_stack_whose_backward_runs_twice(monkeypatch):
    monkeypatch.setattr(launch_bound.Clock, "decide", lambda self: True)
    model = tunecompile.optimize(zoo.adapt(zoo.make("llama", num_hidden_layers=3)).cuda().train())
    batch = {name: value.cuda() for name, value in zoo.batch(rows=2, length=64, seed=0).items()}
    for _ in range(5):
        once = gradients(model, batch)[1]
    model.zero_grad(set_to_none=True)
    loss = model(**batch).loss
    loss.backward(retain_graph=True)
    model(**{**batch, "input_ids": batch["input_ids"].flip(1)})  # which may not write where that was saved
    loss.backward()
    for name, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(p.grad, 2 * once[name], rtol=1e-3, atol=1e-5)


def test_several_forwards_before_one_backward(monkeypatch):
    """As a loss that compares batches runs them, each of other lengths in each step."""
    monkeypatch.setattr(launch_bound.Clock, "decide", lambda self: True)
    reference = zoo.adapt(zoo.make("llama", num_hidden_layers=4, hidden_size=256)).cuda().train()
    model = tunecompile.optimize(copy.deepcopy(reference))
    for step in range(12):
        found = []
        for m in (model, reference):
            m.zero_grad(set_to_none=True)
            batches = [zoo.batch(rows=2, length=32 * (1 + (step + at) % 2), seed=3 * step + at) for at in range(3)]
            losses = torch.stack([m(**{k: v.cuda() for k, v in batch.items()}).loss for batch in batches])
            (losses * torch.tensor([1.0, 2.0, -1.5], device="cuda")).sum().backward()
            found.append((losses.detach(), {n: p.grad.clone() for n, p in m.named_parameters() if p.grad is not None}))
        torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-4)
        assert max(zoo.errors(found[0][1], found[1][1]).values()) < 2e-3, step
    chains = state_of(model).replays.stacks.chains.chains.values()
    assert any(len(chain.flights) > 1 and all(flight.recordings for flight in chain.flights) for chain in chains)
