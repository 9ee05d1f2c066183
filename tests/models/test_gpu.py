"""On a real GPU, with generated code and templates: gradients no further from fp32 than eager's."""

import copy

import pytest
import torch

import tunecompile
from tests.models import zoo

pytestmark = pytest.mark.gpu

SHAPE = dict(hidden_size=576, intermediate_size=1536, num_hidden_layers=2, num_attention_heads=9, num_key_value_heads=3, head_dim=64,
             vocab_size=4099)  # nothing is a power of two


def build(family: str, mode: str):
    model = zoo.make(family, **SHAPE).to("cuda", torch.bfloat16)
    if mode == "qlora":
        model = zoo.quantize(model, torch.bfloat16)
    return model if mode == "full" else zoo.adapt(model, r=16, lora_alpha=16)


def median(values) -> float:
    return sorted(values)[len(values) // 2]


def compare(model, reference, inputs, autocast) -> None:
    _, exact = zoo.step(reference, inputs)
    with tunecompile_off(model):
        _, eager = zoo.step(model, inputs, autocast)
    _, ours = zoo.step(model, inputs, autocast)
    theirs, mine = zoo.errors(eager, exact), zoo.errors(ours, exact)
    assert median(mine.values()) <= 1.02 * median(theirs.values())
    floor = torch.finfo(torch.bfloat16).eps
    worst = max(mine, key=lambda name: mine[name] / max(theirs[name], floor))
    assert mine[worst] / max(theirs[worst], floor) < 1.25, (worst, mine[worst], theirs[worst])


class tunecompile_off:
    """The same model, as it was before `optimize`, for one step."""

    def __init__(self, model):
        self.model = model

    def __enter__(self):
        self.slots = {m: m._compiled_call_impl for m in self.model.modules() if m._compiled_call_impl is not None}
        for module in self.slots:
            module._compiled_call_impl = None

    def __exit__(self, *_):
        for module, slot in self.slots.items():
            module._compiled_call_impl = slot


@pytest.mark.parametrize("family, mode, autocast", [("llama", "qlora", torch.bfloat16), ("qwen3", "lora", None), ("gemma2", "full", torch.bfloat16)])
def test_no_further_from_fp32_than_eager(family, mode, autocast):
    model = build(family, mode)
    reference = zoo.in_fp32(model)
    tunecompile.optimize(model)
    compare(model, reference, zoo.batch(4099, 2, 256, "cuda"), autocast)
    compare(model, reference, zoo.batch(4099, 3, 200, "cuda", seed=2), autocast)  # symbolic sizes from here on
    notes = tunecompile.report(model).notes
    assert not [note for note in notes if "eagerly" in note], notes


def test_checkpointing_changes_memory_and_nothing_else():
    model = build("llama", "qlora")
    other = copy.deepcopy(model)
    other.gradient_checkpointing_enable()
    inputs = zoo.batch(4099, 8, 512, "cuda")
    for m in (model, other):
        tunecompile.optimize(m)
    (loss, gradients), (again, same) = zoo.step(model, inputs, torch.bfloat16), zoo.step(other, inputs, torch.bfloat16)
    assert loss.item() == pytest.approx(again.item(), rel=1e-4)
    assert median(zoo.errors(same, gradients).values()) < 1e-2
    peaks = []
    for m in (model, other):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        zoo.step(m, inputs, torch.bfloat16)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < peaks[0]


def test_templates_are_taken():
    model = tunecompile.optimize(build("llama", "qlora"))
    zoo.step(model, zoo.batch(4099, 2, 128, "cuda"), torch.bfloat16)
    found = {m.family: (m.found, m.rewritten) for m in tunecompile.report(model).matches}
    assert found["lora_nf4"] == (4, 4) and found["nf4"] == (7, 7)
    chosen = tunecompile.report(model).regions[0].providers
    assert any("k_extension" in name or "grouped" in name for name in chosen), chosen


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_launch_bound_layers_are_replayed(dropout):
    """fp32, so that nothing but a fault makes a difference; recording begins a few steps in."""
    from tunecompile.api import _state

    reference = zoo.adapt(zoo.make("llama", **{**SHAPE, "num_hidden_layers": 4}), lora_dropout=dropout).to("cuda")
    model = tunecompile.optimize(copy.deepcopy(reference))
    losses = []
    for seed in range(10):
        inputs = zoo.batch(4099, rows=2, length=32, device="cuda", seed=seed if not dropout else 0)
        loss, ours = zoo.step(model, inputs)
        losses.append(loss.item())
        if not dropout:
            assert max(zoo.errors(ours, zoo.step(reference, inputs)[1]).values()) < 2e-3
    report = tunecompile.report(model)
    assert _state(model).replays.recorded == 8, report
    if dropout:
        assert len(set(losses)) == 10, "every replay draws its own masks"
    else:  # what a replay hands out is not overwritten by the next
        first, second = (zoo.batch(4099, rows=2, length=32, device="cuda", seed=seed) for seed in (20, 21))
        for m in (model, reference):
            m.zero_grad(set_to_none=True)
            a, b = m(**first).loss, m(**second).loss
            (a + 2 * b).backward()
        mine, theirs = ({n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m in (model, reference))
        assert max(zoo.errors(mine, theirs).values()) < 2e-3
