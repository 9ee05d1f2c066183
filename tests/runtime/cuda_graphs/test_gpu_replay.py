"""CUDA graphs of several shapes in one memory, on a GPU."""

import copy

import pytest
import torch

import tunecompile
from tests.support import zoo
from tunecompile.runtime.cuda_graphs import launch_bound, replay
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
