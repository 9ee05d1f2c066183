"""Dense frozen weights that stand with their adapters, on a GPU: recorded and not, step for step what weights by themselves give."""

import copy

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.models.gpu import SHAPE, backward

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("length", [128, 1024], ids=["short", "long"])
def test_training_with_moved_weights(length):
    """Losses and gradients of each step; a short batch adds the adapters' share, for a long one B is written beside W."""
    base = zoo.adapt(zoo.make("llama", **{**SHAPE, "num_hidden_layers": 4}).to("cuda", torch.bfloat16), r=16)
    exact = copy.deepcopy(base).float()
    model, reference = tunecompile.optimize(copy.deepcopy(base)), tunecompile.optimize(base)
    reference._tunecompile.kept.moves = False
    optimizers = [
        torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-3, fused=True)
        for m in (model, reference)
    ]
    for seed in range(14):
        inputs = zoo.batch(4099, rows=2, length=length, device="cuda", seed=seed)
        (loss, ours), (expected, theirs) = (backward(m, inputs) for m in (model, reference))
        assert loss.item() == pytest.approx(expected.item(), rel=2e-3), seed
        if seed == 0:
            _, exactly = zoo.step(exact, inputs)
            off, apart = (max(zoo.errors(gradients, exactly).values()) for gradients in (ours, theirs))
            assert off < 1.2 * apart, (off, apart)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state, report = model._tunecompile, tunecompile.report(model)
    assert len(state.kept.moved) == 16 and not state.kept.bytes, report
    assert sum(variant.graphs for region in state.regions for variant in region.variants.values()) == 1, report
    assert state.replays.recorded == 8 and not state.replays.failures, report
