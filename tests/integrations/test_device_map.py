"""Models that accelerate placed (`device_map`): found and compiled as others are, with accelerate's hooks where they were."""

import pytest
import torch
from torch import nn

import tunecompile
from tests.integrations.distributed.common import of_docs
from tests.support import zoo
from tests.support.compare import assert_same_step
from tests.support.notes import fell_back, has

hooks = pytest.importorskip("accelerate.hooks")
pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

PARTS = ("model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.layers.1", "model.norm", "lm_head")


def placed(model: nn.Module, *offloaded: str, devices: tuple[str, ...] = ("cpu",)) -> nn.Module:
    """As `dispatch_model` leaves it. (That does nothing where all is on a CPU.)"""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    where = {part: devices[i * len(devices) // len(PARTS)] for i, part in enumerate(PARTS)}
    weights = {name: p.detach() for name, p in base.named_parameters()}
    hooks.attach_align_device_hook_on_blocks(
        base,
        execution_device={"": devices[0], **where},
        offload={part: part in offloaded for part in PARTS},
        weights_map=weights if offloaded else None,
    )
    return model


def make() -> nn.Module:
    return zoo.adapt(zoo.make("llama", num_hidden_layers=2), r=8).train()


def same_gradients(model: nn.Module, reference: nn.Module, steps: int = 2) -> None:
    for seed in range(steps):
        assert_same_step(model, reference, zoo.batch(seed=seed, rows=2 + seed))


def test_layers_are_whole_and_compiled_once():
    reference, model = make(), make()
    tunecompile.optimize(placed(model), executor="eager")
    forwards = {module: module.forward for module in model.modules() if "_hf_hook" in vars(module)}
    same_gradients(model, reference, steps=1)
    report = tunecompile.report(model)
    assert report.compiles == 1 and not report.notes, report
    assert {m.family: m.rewritten for m in report.matches if m.found} == {
        "linear_cross_entropy": 1,
        "lora": 7,
        "grouped_linear": 5,
        "rope": 2,
        "rms_norm": 2,
        "add_rms_norm": 1,
        "swiglu": 1,
    }
    assert all(module.forward is forward for module, forward in forwards.items()) and len(forwards) > 20
    model.eval(), reference.eval()
    with torch.no_grad():
        inputs = zoo.batch(seed=7)
        assert torch.allclose(model(**inputs).logits, reference(**inputs).logits, atol=1e-5)


def test_what_accelerate_brings_for_each_call_runs_as_it_is():
    """Its weights are gone when the call is over."""
    reference, model = placed(make(), "lm_head"), placed(make(), "lm_head")
    same_gradients(tunecompile.optimize(model, executor="eager"), reference, steps=1)
    report = tunecompile.report(model)
    reasons = [*report.notes, *(reason for m in report.matches for reason in m.refused)]
    assert has(reasons, "head-eager", reason="weights-loaded-per-call"), report


def test_offloaded_modules_in_a_layer_on_another_device_are_refused():
    from tunecompile.integrations.accelerate import place

    layer = make().get_base_model().model.layers[0]
    assert place(layer) is None
    hooks.add_hook_to_module(layer, hooks.AlignDevicesHook("cpu"))
    assert not place(layer).refused
    hooks.add_hook_to_module(layer.mlp, hooks.AlignDevicesHook("meta"))
    assert place(layer).refused.code == "modules-on-several-devices"
    hooks.add_hook_to_module(layer.mlp, hooks.ModelHook())
    assert place(layer).refused.code == "unknown-hooks"


@pytest.mark.slow
def test_the_lines_of_the_docs(tmp_path):
    import peft
    import transformers

    make().get_base_model().save_pretrained(tmp_path)
    torch.manual_seed(0)
    model = of_docs(
        "device_map=",
        {
            "path": tmp_path,
            **{name: getattr(peft, name) for name in ("get_peft_model", "LoraConfig")},
            "AutoModelForCausalLM": transformers.AutoModelForCausalLM,
        },
    )
    zoo.step(model, zoo.batch())
    assert {m.family: m.rewritten for m in tunecompile.report(model).matches}["lora"] == 7


@pytest.mark.gpu
@pytest.mark.parametrize("memory", [None, "auto", "0.6 MB"])
def test_layers_on_two_gpus(memory):
    """Compiled once for each GPU; gradients as on one. Under a budget each GPU has its plan."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    reference = make().cuda()
    model = tunecompile.optimize(placed(make(), devices=("cuda:0", "cuda:1")), memory=memory)
    for seed in range(3):
        inputs = zoo.batch(seed=seed, device="cuda")
        (loss, ours), (expected, theirs) = zoo.step(model, inputs), zoo.step(reference, inputs)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
        assert max(zoo.errors({name: grad.to("cuda:0") for name, grad in ours.items()}, theirs).values()) < 1e-3
    report = tunecompile.report(model)
    assert {p.device.index for p in model.parameters()} == {0, 1} and not fell_back(report), report
    assert [plan["device"] for plan in ([report.memory, *report.elsewhere] if memory else [])] == (
        ["cuda:0", "cuda:1"] if memory else []
    ), report
