"""Experts in 4 bits: quantised, adapted, trained through, loaded."""

import copy
import gc
import re
import sys

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import tunecompile
from tests.support import zoo
from tests.support.files import logits
from tests.support.models.packed import gradients, pair, stack
from tests.support.notes import BROKEN, EAGER, find
from tunecompile.errors import CannotQuantize, MissingExtra
from tunecompile.integrations.packed_experts import quantize
from tunecompile.runtime.model_state import state_of

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.filterwarnings("ignore")


def is_whole(model):
    return not find(tunecompile.report(model), *EAGER, *BROKEN, "compiled-without-rewrites", "packed-stacks")


def saved(model):
    """Bytes of what the last layer saves."""
    (region,) = state_of(model).regions
    return [size for backend in region.backends.values() for c in backend.contexts for _, size in c.saved]


def compare(model, dense, limit=2e-6, **options):
    errors = zoo.errors(gradients(model, **options), gradients(dense, **options))
    assert max(errors.values()) < limit, errors


@pytest.mark.parametrize(
    "options",
    [{"before": True}, {"num_hidden_layers": 1}],  # of one layer the region is the whole model
    ids=str,
)
def test_gradients_are_those_of_dense_experts(options):
    """One graph for all layers and steps; evaluations between steps leave nothing behind."""
    packed, dense = pair("qwen3_moe", **options)
    model = tunecompile.optimize(packed, executor="eager")
    for seed in range(2):
        compare(model, dense, seed=seed)
        torch.testing.assert_close(logits(model), logits(dense), rtol=1e-5, atol=1e-5)
    report = tunecompile.report(model)
    assert report.compiles == 1 and is_whole(model), report
    assert "2 x dequantize_4bit" in str(report) and "grouped_lora_linear" in str(report)
    tunecompile.restore(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_dequantised_experts_are_not_saved():
    """They are most of what a layer could save where there are many experts and few tokens."""
    packed, _ = pair("qwen3_moe", num_experts=64, num_experts_per_tok=2)
    model = tunecompile.optimize(packed, executor="eager")
    zoo.step(model, zoo.batch(rows=1, length=8))
    smallest = 64 * 64 * 64 * 4
    assert saved(model) and max(saved(model)) < smallest / 4


def test_all_may_come_after_optimize():
    """Before the first step, or between the first and the second."""
    _, dense = pair("qwen3_moe")
    reference = copy.deepcopy(dense)
    model = zoo.make("qwen3_moe", num_hidden_layers=2, num_experts_per_tok=4, moe_intermediate_size=64)
    tunecompile.optimize(model, executor="eager")
    names = tunecompile.quantize_experts(model)
    adapted = zoo.adapt(model, target_modules=["q_proj"], target_parameters=names)
    with torch.no_grad():
        ours, theirs = (dict(m.named_parameters()) for m in (adapted, reference))
        for name in ours:
            if "q_proj.lora" in name:
                theirs[name].copy_(ours[name])
    # the wrappers stand around each other in another order here
    for path, module in reference.named_modules():
        if hasattr(module, "parameter_name"):
            (mine,) = (
                m
                for p, m in adapted.named_modules()
                if getattr(m, "parameter_name", "") == module.parameter_name
                and p.replace(".base_layer", "") == path.replace(".base_layer", "")
            )
            for part in ("lora_A", "lora_B"):
                getattr(module, part).load_state_dict(getattr(mine, part).state_dict())
    compare(adapted, reference)
    assert is_whole(model), tunecompile.report(model)
    tunecompile.restore(model)
    assert not any("forward" in vars(module) for module in adapted.modules())


def test_names_and_a_second_call():
    model = zoo.make("gpt_oss", num_hidden_layers=2)
    values = {name: value.clone() for name, value in model.named_parameters() if "experts" in name}
    names = tunecompile.quantize_experts(model)
    assert names == [f"model.layers.{i}.mlp.experts.{part}" for i in range(2) for part in ("down_proj", "gate_up_proj")]
    packed = {name: p.data_ptr() for name, p in model.named_parameters()}
    assert tunecompile.quantize_experts(model) == names
    assert packed == {name: p.data_ptr() for name, p in model.named_parameters()}
    for name in names:
        error = (stack(model, name) - values[name]).norm() / values[name].norm()
        assert 0.01 < error < 0.12 and not stack(model, name).requires_grad
    adapted = zoo.adapt(model, target_modules=["q_proj"], target_parameters=names)
    assert tunecompile.quantize_experts(adapted) == names
    assert sum("experts" in name and "lora_A" in name for name, _ in adapted.named_parameters()) == 4


class Mixture(nn.Module):
    def __init__(self, *shape, dtype=torch.float32, count=2):
        super().__init__()
        self.num_experts = count
        self.stack = nn.Parameter(torch.zeros(*shape, dtype=dtype))
        self.conv = nn.Conv1d(2, 2, 64)


@pytest.mark.parametrize(
    "model, kind, says",
    [
        (lambda: Mixture(2, 8, 64), "int4", "give one of 'nf4', 'fp4'"),
        (lambda: Mixture(3, 8, 64), "nf4", "has no parameters"),
        (lambda: Mixture(2, 8, 60), "nf4", "stack has 60 columns"),
        (lambda: Mixture(2, 8, 64, dtype=torch.float64), "nf4", "is float64"),
        (lambda: Mixture(2, 8, 64).to("meta"), "nf4", "load the weights first"),
    ],
)
def test_what_cannot_be_quantised(model, kind, says):
    with pytest.raises(CannotQuantize, match=says):
        tunecompile.quantize_experts(model(), kind)


def test_convolutions_stay():
    model = Mixture(2, 8, 64)
    assert not quantize.is_stack(model.conv, "weight")
    assert tunecompile.quantize_experts(model, "fp4", blocksize=64) == ["stack"]
    assert model.conv.weight.dtype == torch.float32 and model.stack.shape == (2, 8, 64)


def test_without_bitsandbytes(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    quantize._replace.cache_clear()
    with pytest.raises(MissingExtra, match=r"bitsandbytes.*tunecompile\[qlora\]"):
        tunecompile.quantize_experts(Mixture(2, 8, 64))


def live_stacks() -> int:
    """Numbers in stacks that are not packed, each storage once."""
    gc.collect()
    storages = {}
    for value in gc.get_objects():
        if type(value) in (torch.Tensor, nn.Parameter) and value.dim() == 3 and value.is_floating_point():
            storages[value.untyped_storage().data_ptr()] = value.numel()
    return sum(number for pointer, number in storages.items() if pointer)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_one_stack_at_a_time_is_loaded(family, tmp_path, monkeypatch):
    from bitsandbytes import functional

    sizes = {"num_hidden_layers": 2, "moe_intermediate_size": 64, "intermediate_size": 64}
    zoo.make(family, **sizes).to(torch.bfloat16).save_pretrained(tmp_path)
    before, most, quantise = live_stacks(), [], functional.quantize_4bit

    def watched(value, *args, **options):
        if value.dim() == 3:
            most.append(live_stacks() - before)
        return quantise(value, *args, **options)

    monkeypatch.setattr(functional, "quantize_4bit", watched)
    model, told = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=tunecompile.nf4_config(), dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(told.values()) and len(most) == 4
    largest = 4 * 64 * 128
    assert max(most) <= 2 * largest and most[-1] <= most[1], "a stack, and the pieces it is made of"
    monkeypatch.undo()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    names = tunecompile.quantize_experts(plain)
    assert tunecompile.quantize_experts(model) == names
    assert all(torch.equal(stack(model, name), stack(plain, name)) for name in names)
    assert model.is_loaded_in_4bit and type(model.model.layers[0].self_attn.q_proj).__name__ == "Linear4bit"
    assert type(model.config.quantization_config).__name__ == "BitsAndBytesConfig"
    assert str(model.config.quantization_config.quant_method.value) == "bitsandbytes"
    if family == "qwen3_moe":
        model = zoo.adapt(model, target_modules=["q_proj"], target_parameters=names)
        tunecompile.optimize(model, executor="eager")
        gradients(model)
        # PEFT's clone of a 4-bit product is dropped although the experts' code writes in place
        assert is_whole(model) and re.search(r"^ *lora +1 +1$", str(tunecompile.report(model)), re.MULTILINE)


def test_an_adapter_is_loaded_by_peft_alone(tmp_path):
    """Onto a base that is quantised in the same way, and onto the plain one where it was adapted before."""
    from peft import PeftModel

    for before in (True, False):
        packed, dense = pair("qwen3_moe", before=before)
        expected = logits(tunecompile.optimize(packed, executor="eager"))
        packed.save_pretrained(tmp_path / str(before))
        base = zoo.make("qwen3_moe", num_hidden_layers=2, num_experts_per_tok=4, moe_intermediate_size=64)
        if before:
            tunecompile.quantize_experts(base)
        else:
            base = dense.unload()
        model = PeftModel.from_pretrained(base, tmp_path / str(before))
        if before:
            model = tunecompile.optimize(model, executor="eager")
        torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)
