"""Frozen weights kept dequantised, on a GPU: recorded and not, step for step what layers without them give."""

import copy

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.models.gpu import SHAPE, backward

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


def test_training_with_kept_weights():
    """Losses and gradients of each step; the optimizer's fused kernels write adapters in place."""
    model = zoo.make("llama", **{**SHAPE, "num_hidden_layers": 4}).to("cuda", torch.bfloat16)
    base = zoo.adapt(zoo.quantize(model, torch.bfloat16), r=16)
    model, reference = tunecompile.optimize(copy.deepcopy(base), memory=0.5), tunecompile.optimize(base)
    optimizers = [
        torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-3, fused=True)
        for m in (model, reference)
    ]
    for seed in range(14):
        inputs = zoo.batch(4099, rows=2, length=128, device="cuda", seed=seed)
        (loss, ours), (expected, theirs) = (backward(m, inputs) for m in (model, reference))
        assert loss.item() == pytest.approx(expected.item(), rel=2e-3), seed
        if seed == 0:
            assert max(zoo.errors(ours, theirs).values()) < 2e-2
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = model._tunecompile
    assert tunecompile.report(model).memory["kept_weights"] == state.kept.bytes > 0 and len(state.kept.matrices) == 16
    replays = state.replays
    assert replays.recorded == 8 or replays.stacks.chains.layers == 4, tunecompile.report(model)
    assert not replays.failures, tunecompile.report(model)
