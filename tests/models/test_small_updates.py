"""In bf16 an adapter's first steps are smaller than the last bit of what its base gives: they count all the same."""

import copy

import pytest
import torch

import tunecompile
from tests.support import zoo

pytest.importorskip("peft")
STEP = 3e-5  #: as AdamW's first step at this rate


def log_probability(model: torch.nn.Module, inputs: dict) -> float:
    """Of all labels, summed in fp32."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=model.dtype == torch.bfloat16):
        logits = model.train()(inputs["input_ids"], use_cache=False).logits
    return logits[:, :-1].float().log_softmax(-1).gather(-1, inputs["input_ids"][:, 1:, None]).sum().item()


def in_bf16(model: torch.nn.Module) -> torch.nn.Module:
    """A copy whose base is in bf16; adapters stay in fp32, as PEFT makes them."""
    made = copy.deepcopy(model)
    for name, parameter in made.named_parameters():
        parameter.data = parameter.data if "lora_" in name else parameter.data.bfloat16()
    return made


def three() -> dict[str, torch.nn.Module]:
    """The same fresh adapters in fp32, in bf16, and in bf16 optimized."""
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 8, "vocab_size": 512}
    exact = zoo.adapt(zoo.make("llama", **sizes), r=8, target_modules="all-linear")
    for name, parameter in exact.named_parameters():
        if "lora_B" in name:
            parameter.data.zero_()
    return {
        "exact": exact,
        "eager": in_bf16(exact),
        "ours": tunecompile.optimize(in_bf16(exact), executor="eager"),
    }


def test_a_first_update_is_as_large_as_in_fp32():
    """Eager adds what the adapter gives to a sum that is rounded already, so that most of a small update is lost."""
    made, inputs = three(), zoo.batch(512, rows=4, length=64)
    exact = made["exact"]
    exact(**inputs).loss.backward()
    before = {name: log_probability(model, inputs) for name, model in made.items()}
    updates = {name: -STEP * p.grad.sign() for name, p in exact.named_parameters() if "lora_B" in name}
    for model in made.values():
        for name, parameter in model.named_parameters():
            if name in updates:
                parameter.data.add_(updates[name])
    moved = {name: log_probability(model, inputs) - before[name] for name, model in made.items()}
    assert moved["exact"] > 0.1 and abs(moved["ours"] - moved["exact"]) < 0.2 * moved["exact"], moved
    assert moved["eager"] < 0.5 * moved["exact"], moved
