"""Long rows on a real GPU: what is predicted of a layer whose attention takes its heads in turn is what it needs."""

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.notes import EAGER, FAILED, find
from tunecompile.passes.lower import attention_by_heads as by_heads

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
LENGTH = 32768


@pytest.mark.parametrize("share", [0.5, 0.3])
def test_the_peak_is_the_predicted_one(share, monkeypatch):
    monkeypatch.setattr(by_heads, "ROOM", 256 << 20)
    monkeypatch.setattr(by_heads, "EACH", 256 << 20)
    others = torch.cuda.memory_allocated()  # what tests before have left
    model = zoo.make(
        "llama",
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=4099,
        max_position_embeddings=LENGTH,
    )
    model = zoo.adapt(model.to("cuda", torch.bfloat16), r=16).train()
    inputs = zoo.batch(4099, 1, LENGTH, "cuda")
    with torch.autocast("cuda", torch.bfloat16):
        whole = tunecompile.estimate(model, (1, LENGTH))
    own = whole.weights + whole.gradients + whole.optimizer + int(share * whole.activations)
    memory = others + own + (1 << 30)  # the GPU's context, and the allocator's share
    tunecompile.optimize(model, memory=memory)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    for _ in range(3):
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    report, budget = tunecompile.report(model), model._tunecompile.step.budget
    assert any(plan["recompute"] or plan["offload"] for plan in report.memory["plans"]), report
    assert budget.memory.surplus < 0.05 * budget.admitted.peak, (
        budget.memory.surplus,
        budget.admitted.peak,
        budget.admitted.choice.peak,
        str(report),
    )
    assert not find(report, *EAGER, *FAILED, "ran-out-of-memory", "smallest-plan-ran-out"), report
