"""Models that somebody hooked, wrapped or placed, and such with other states: what a recorded step would not do again is left to transformers."""

import copy

import peft
import pytest
import torch
import transformers
from torch import nn

import tunecompile
from tests.runtime.rollouts.calls import greedy, made, pair, prompts
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
    return peft.get_peft_model(made(), config).eval()


def lora(**options) -> peft.LoraConfig:
    return peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False, **options
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
            given = super()._update_model_kwargs_for_generation(outputs, model_kwargs, **others)
            given["position_ids"] = given["position_ids"] * 2
            return given

    model = made()
    model.__class__ = Counts
    assert both(model) == {"generation-own-steps"}


def test_weights_on_several_devices():
    model = made()
    model.register_parameter("elsewhere", nn.Parameter(torch.empty(1, device="meta")))
    assert both(model) == {"generation-devices"}


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 20,
    "rope_theta": 10000.0,
}


def test_positions_that_are_scaled_from_a_length_on():
    """Phi-3 computes all tokens anew when the first one is past its original length."""
    model, ours, loop = pair(
        "phi3", initializer_range=0.2, rope_parameters=LONGROPE, original_max_position_embeddings=20
    )
    for new, calls in ((9, 1), (20, 1)):
        settings = greedy(max_new_tokens=new, eos_token_id=None)
        assert torch.equal(ours.generate(**prompts(), **settings), model.generate(**prompts(), **settings))
        assert loop.calls == calls
    assert {why.code for why in loop.left} == {"generation-own-steps"}


def test_a_cache_of_states_alone():
    """It counts no tokens."""
    config = transformers.Mamba2Config(
        hidden_size=64, num_hidden_layers=2, vocab_size=256, num_heads=8, head_dim=16, state_size=16, n_groups=1
    )
    model = transformers.Mamba2ForCausalLM(config).eval()
    ours = tunecompile.optimize(copy.deepcopy(model), executor="eager")
    loop_of(ours)
    assert torch.equal(ours.generate(**prompts(), **greedy()), model.generate(**prompts(), **greedy()))
