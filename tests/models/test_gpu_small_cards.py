"""A GPU that behaves as a smaller card: steps are as right as eager's, choices are the card's, and templates are tried."""

import copy

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.models.gpu import SHAPE
from tests.support.notes import EAGER, FAILED, find
from tunecompile._torch import card
from tunecompile.passes.plan import probe
from tunecompile.planner.device_memory import CudaGauge

pytestmark = pytest.mark.gpu


def qlora(dtype):
    model = zoo.make("llama", **SHAPE).to("cuda", dtype)
    return zoo.adapt(zoo.quantize(model, dtype), r=16, lora_alpha=16)


def scaled(model, inputs, dtype, factor):
    """(Loss, gradients), with a loss that is scaled as fp16 needs it."""
    loss, gradients = zoo.step(model, inputs, dtype, lambda model, inputs: model(**inputs).loss * factor)
    return loss / factor, {name: g / factor for name, g in gradients.items()}


@pytest.fixture
def whole():
    """The GPU's memory is all there behind the test."""
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("name", ["t4", "rtx3090", "rtx4090", "rtx5090"])
def test_steps_are_right_as_another_card(name, monkeypatch, whole):
    monkeypatch.setenv(card.VARIABLE, name)
    dtype = torch.float16 if name == "t4" else torch.bfloat16
    factor = 1024.0 if name == "t4" else 1.0
    model, inputs = qlora(dtype), zoo.batch(4099, 2, 256, "cuda")
    exact = zoo.step(zoo.in_fp32(model), inputs)
    eager = scaled(copy.deepcopy(model), inputs, dtype, factor)
    tunecompile.optimize(model)
    ours = scaled(model, inputs, dtype, factor)
    assert not find(model, *EAGER, *FAILED) and find(model, "emulated-card")
    limit = 1.2 * max(zoo.errors(eager[1], exact[1]).values())
    assert max(zoo.errors(ours[1], exact[1]).values()) <= limit and torch.isfinite(ours[0])
    used = {label for region in tunecompile.report(model).regions for label in region.providers}
    assert ("lora_mlp: joined" in used) == (name != "t4") and used
    gauge = CudaGauge(torch.device("cuda", 0))
    assert gauge.available() <= gauge.total() - (100 << 20) and gauge.total() <= card.CARDS[name].memory


def test_the_first_step_tries_templates_where_no_test_ran(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(probe, "is_tested", lambda device: False)
    monkeypatch.setattr(probe, "_known", {})
    model, inputs = qlora(torch.bfloat16), zoo.batch(4099, 2, 256, "cuda")
    expected = zoo.step(copy.deepcopy(model), inputs, torch.bfloat16)[0]
    loss, _ = zoo.step(tunecompile.optimize(model), inputs, torch.bfloat16)
    tried = {name: fault for (name, *_), fault in probe._known.items()}
    assert tried["lora_mlp"] == tried["lora_mlp_backward"] == "" and not any(tried.values())
    assert loss.item() == pytest.approx(expected.item(), rel=1e-2) and not find(
        model, *EAGER, *FAILED, "template-wrong"
    )
