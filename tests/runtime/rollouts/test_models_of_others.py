"""Models that somebody hooked, wrapped or placed: what a recorded step would not do again is left to transformers."""

import copy

import peft
import pytest
import torch
from torch import nn

import tunecompile
from tests.runtime.rollouts.calls import greedy, pair, prompts
from tests.runtime.rollouts.recorder import loop_of
from tests.support import zoo

pytestmark = pytest.mark.filterwarnings("ignore")


def both(model: nn.Module, prepare=lambda model: None, **given) -> set[str]:
    """Why transformers' own loop generated, with the tokens of a model that is not optimized."""
    ours = tunecompile.optimize(copy.deepcopy(model), executor="eager")
    loop = loop_of(ours)
    for each in (model, ours):
        prepare(each)
    assert torch.equal(
        ours.generate(**prompts(), **greedy(), **given), model.generate(**prompts(), **greedy(), **given)
    )
    assert loop.calls == (not loop.left)
    return {why.code for why in loop.left}


def adapted(config: peft.PeftConfig) -> nn.Module:
    torch.manual_seed(0)
    return peft.get_peft_model(zoo.make("llama", initializer_range=0.2).float(), config).eval()


def lora(**options) -> peft.LoraConfig:
    return peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj", "up_proj"], init_lora_weights=False, **options
    )


def test_a_hook_sees_each_token():
    model, ours, loop = pair()
    for calls, where in enumerate(("model.layers.1", "model.layers.0.self_attn", "lm_head")):
        counts = []
        loop.left.clear()
        for each in (model, ours):
            seen = []
            handle = each.get_submodule(where).register_forward_hook(lambda *_, seen=seen: seen.append(1))
            each.generate(**prompts(), **greedy(eos_token_id=None))
            handle.remove()
            counts.append(len(seen))
        assert counts == [20, 20] and {why.code for why in loop.left} == {"generation-hooked"}, where
        assert loop.calls == calls
        ours.generate(**prompts(), **greedy())
    assert loop.calls == 3


def test_a_hook_on_all_modules():
    _, ours, loop = pair()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        ours.generate(**prompts(), **greedy())
    finally:
        handle.remove()
    assert {why.code for why in loop.left} == {"generation-hooked"}


def test_the_hook_of_checkpoints_is_recorded():
    assert both(adapted(lora()), lambda model: model.enable_input_require_grads()) == set()


def test_adapters_of_each_row():
    model = adapted(lora())
    model.add_adapter("other", lora(r=4))
    assert both(model, adapter_names=["default", "other", "__base__"]) == {"generation-hooked"}


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_prompts_that_are_learnt(kind):
    model = adapted(getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=5))
    assert both(model) == {"generation-own-steps"}


def test_a_method_of_the_models_own():
    """What it adds to its arguments at each token is not known."""

    class Counts(type(zoo.make("llama"))):
        def _update_model_kwargs_for_generation(self, outputs, model_kwargs, **others):
            made = super()._update_model_kwargs_for_generation(outputs, model_kwargs, **others)
            made["position_ids"] = made["position_ids"] * 2
            return made

    model = zoo.make("llama", initializer_range=0.2).float().eval()
    model.__class__ = Counts
    assert both(model) == {"generation-own-steps"}


def test_weights_on_several_devices():
    model = zoo.make("llama").float().eval()
    model.register_parameter("elsewhere", nn.Parameter(torch.empty(1, device="meta")))
    assert both(model) == {"generation-devices"}
