"""Cards of 8 to 24 GB. What they lack decides what runs; that is tested without one (and on a GPU by TUNECOMPILE_AS)."""

import copy

import pytest
import torch
from torch import nn

import tunecompile
from tests.support import zoo
from tests.support.notes import EAGER, find
from tunecompile._torch.card import acting_as
from tunecompile.estimate import multi_gpu
from tunecompile.estimate.meta_model import meta_model
from tunecompile.ir.op import refuse_gpu
from tunecompile.ir.pretend_gpu import as_on_gpu
from tunecompile.ops import lora_mlp
from tunecompile.ops.attention import documents
from tunecompile.planner.datasheets import find_gpu


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


def test_without_bfloat16_layers_in_it_run_as_they_did():
    model, x = zoo.Stack(Residual).bfloat16(), torch.randn(2, 5, 16).bfloat16()
    eager = copy.deepcopy(model)
    eager(x).backward()
    with acting_as("t4"):
        tunecompile.optimize(model, executor="eager")(x).backward()
    (said,) = [n for n in find(model, *EAGER) if n.code == "not-compiled"]
    assert said.detail.code == "gpu-without-bfloat16"
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), eager.parameters()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_which_templates_a_t4_takes(dtype):
    pytest.importorskip("triton")
    x = torch.empty(64, 64, dtype=dtype)
    heads = torch.empty(64, 2, 64, dtype=dtype)
    with as_on_gpu("t4"):
        refused = refuse_gpu(x)
        assert (refused is None) == (dtype is torch.float16)
        assert documents._refuse_flash(heads, heads, heads, 0.0) and documents.refuse_template(heads, heads, heads)
        (joined,) = [each for each in lora_mlp.providers if each.name == "joined"]
        args = (x, [x] * 3, [x] * 3, [x] * 3, [1.0] * 3, "dense", "silu")
        assert joined.refuses(*args) is not None
    with as_on_gpu("rtx3090"):
        assert refuse_gpu(x) is None and documents._refuse_flash(heads, heads, heads, 0.0) is None


def scaled_steps(model, steps=4):
    """Losses, the scaler's factors and the adapters, in fp16 with a scaler whose first factors overflow."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    scaler, told = torch.amp.GradScaler("cpu", init_scale=2.0**24, backoff_factor=2.0**-8), []
    for seed in range(steps):
        with torch.autocast("cpu", torch.float16):
            loss = model.train()(**zoo.batch(seed=seed)).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        told += [loss.item(), scaler.get_scale()]
    return told, {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.slow
def test_qlora_in_float16_overflows_as_eager_does_and_has_no_bfloat16(monkeypatch, tmp_path):
    pytest.importorskip("bitsandbytes")
    monkeypatch.setenv("TUNECOMPILE_DUMP", str(tmp_path))
    model = zoo.adapt(zoo.quantize(zoo.make("llama").half(), torch.float16))
    eager = copy.deepcopy(model)
    begun = {n: p.detach().clone() for n, p in model.named_parameters()}
    told, trained = scaled_steps(eager)
    with acting_as("t4"):
        found, ours = scaled_steps(tunecompile.optimize(model, executor="eager"))
    assert not find(model, *EAGER) and found[1::2] == told[1::2] and found[1] < 2.0**24  # the first step was skipped
    assert found[::2] == pytest.approx(told[::2], rel=2e-3)
    moved = max((trained[n] - begun[n]).norm() for n in trained)
    assert moved > 0 and all((ours[n] - trained[n]).norm() < 0.1 * moved for n in trained)
    graphs = [file.read_text() for file in tmp_path.rglob("*.py")]
    assert graphs and not any("bf16" in text or "bfloat16" in text for text in graphs)


@pytest.mark.slow
def test_plans_for_a_t4_are_in_float16(monkeypatch):
    pytest.importorskip("transformers")
    asked = []
    monkeypatch.setattr(multi_gpu, "meta_model", lambda *given: asked.append(given[3]) or meta_model(*given))
    question = multi_gpu.Question(
        "llama-tiny", "qlora", 1, 512, find_gpu("t4"), 1, 8, 50.0, None, None, 16, together=False
    )
    assert multi_gpu.plan(question).to_dict() and set(asked) == {torch.float16}
