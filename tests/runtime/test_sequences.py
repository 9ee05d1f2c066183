"""Whatever users do to a model in training, in whatever order: losses, gradients and weights are those of a model that was never
optimized. Hypothesis draws the acts."""

from __future__ import annotations

import contextlib
import copy
import io

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import tunecompile
from tests.support import zoo
from tests.support.batches import packed, padded

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")

MODULES = ["q_proj", "v_proj", "down_proj"]
BATCHES = {
    "whole": lambda seed: zoo.batch(256, 3, 12, seed=seed),
    "padded": lambda seed: padded(3, 12, seed=seed),
    "padded on the left": lambda seed: padded(3, 12, "left", seed=seed),
    "packed": lambda seed: packed((5, 7), (3, 9), seed=seed),
    "one row": lambda seed: zoo.batch(256, 1, 9, seed=seed),
}


class Training(RuleBasedStateMachine):
    """Two models that are treated alike; the first one is optimized."""

    @initialize(adapted=st.booleans(), checkpointed=st.booleans())
    def build(self, adapted, checkpointed):
        torch.manual_seed(0)
        base = zoo.make("llama", num_hidden_layers=2, hidden_size=32, intermediate_size=48, head_dim=8)
        self.adapters = ["default"] if adapted else []
        if adapted:
            base = peft.get_peft_model(base, self._config())
            self._fill(base)
        self.models = [tunecompile.optimize(copy.deepcopy(base), executor="eager").train(), base.train()]
        self.optimizers, self.patched, self.seed = None, contextlib.ExitStack(), 0
        if checkpointed:
            for model in self.models:
                model.gradient_checkpointing_enable()
                model.enable_input_require_grads()

    def _config(self):
        return peft.LoraConfig(r=4, lora_alpha=8, target_modules=MODULES, task_type="CAUSAL_LM")

    def _fill(self, model):
        torch.manual_seed(5)
        for name, parameter in model.named_parameters():
            if "lora_B" in name and parameter.device.type != "meta" and not parameter.any():
                torch.nn.init.normal_(parameter, std=0.05)

    def teardown(self):
        if hasattr(self, "patched"):
            self.patched.close()

    @rule(kind=st.sampled_from(sorted(BATCHES)), count=st.integers(1, 2), clip=st.booleans())
    def train(self, kind, count, clip):
        losses = []
        for model in self.models:
            trained = [p for p in model.parameters() if p.requires_grad]
            model.zero_grad(set_to_none=True)
            for number in range(count):
                loss = model(**BATCHES[kind](self.seed + number)).loss
                loss.backward()
                losses.append(loss.item())
            if clip:
                torch.nn.utils.clip_grad_norm_(trained, 0.5)
        assert losses[:count] == pytest.approx(losses[count:], rel=1e-4)
        found, expected = ({n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m in self.models)
        assert found.keys() == expected.keys()
        errors = zoo.errors(found, expected, 1e-4)
        assert {name: error for name, error in errors.items() if not error < 1e-3} == {}
        with torch.no_grad():
            for model in self.models:
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.02 * parameter.grad
        self.seed += count

    @rule()
    def evaluate(self):
        logits = []
        for model in self.models:
            model.eval()
            with torch.no_grad():
                logits.append(model(**zoo.batch(256, 2, 7)).logits)
            model.train()
        torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-4)

    @rule()
    def generate(self):
        made = []
        for model in self.models:
            model.eval()
            made.append(model.generate(input_ids=zoo.batch(256, 1, 5)["input_ids"], max_new_tokens=3, do_sample=False))
            model.train()
        assert torch.equal(*made)

    @rule()
    def save_and_load(self):
        for model in self.models:
            file = io.BytesIO()
            torch.save(model.state_dict(), file)
            file.seek(0)
            model.load_state_dict(torch.load(file))

    @rule(layer=st.integers(0, 1), frozen=st.booleans())
    def freeze(self, layer, frozen):
        for model in self.models:
            base = model.get_base_model() if self.adapters else model
            for name, parameter in base.model.layers[layer].named_parameters():
                if not self.adapters or "lora_" in name:
                    parameter.requires_grad_(not frozen)

    @precondition(lambda self: self.adapters)
    @rule(ranks=st.sampled_from([2, 4]))
    def add_adapter(self, ranks):
        name = f"another{len(self.adapters)}"
        self.adapters.append(name)
        for model in self.models:
            torch.manual_seed(9)
            config = self._config()
            config.r = ranks
            model.add_adapter(name, config)
            self._fill(model)
            model.set_adapter(name)
            model.train()

    @precondition(lambda self: self.adapters)
    @rule(data=st.data())
    def switch_adapter(self, data):
        name = data.draw(st.sampled_from(self.adapters))
        for model in self.models:
            model.set_adapter(name)

    @precondition(lambda self: self.adapters)
    @rule()
    def merge_and_back(self):
        for model in self.models:
            model.merge_adapter()
            model.unmerge_adapter()

    @precondition(lambda self: self.adapters)
    @rule()
    def without_adapters(self):
        logits = []
        for model in self.models:
            with model.disable_adapter(), torch.no_grad():
                logits.append(model(**zoo.batch(256, 2, 7)).logits)
        torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-4)

    @rule()
    def replace_a_function(self):
        """Or put it back."""
        code = transformers.models.llama.modeling_llama
        if getattr(code.apply_rotary_pos_emb, "replaced", False):
            self.patched.close()
            return
        rotate = code.apply_rotary_pos_emb

        def by_half(q, k, cos, sin, *args, **kwargs):
            return rotate(q, k, cos, sin * 0.5, *args, **kwargs)

        by_half.replaced = True
        code.apply_rotary_pos_emb = by_half
        self.patched.callback(setattr, code, "apply_rotary_pos_emb", rotate)

    @rule(hooked=st.integers(0, 1))
    def add_a_hook(self, hooked):
        for model in self.models:
            base = model.get_base_model() if self.adapters else model
            base.model.layers[hooked].mlp.register_forward_hook(lambda module, args, out: out * 1.01)

    @rule()
    def copy_and_go_on(self):
        """With a copy of the plain model, and one of ours that is optimized anew."""
        self.models = [copy.deepcopy(model) for model in self.models]
        assert not [m for m in self.models[0].modules() if m._compiled_call_impl is not None]
        self.models[0] = tunecompile.optimize(self.models[0], executor="eager")

    @rule()
    def restore_and_optimize(self):
        tunecompile.restore(self.models[0])
        tunecompile.optimize(self.models[0], executor="eager")

    @invariant()
    def weights_are_the_same(self):
        if not hasattr(self, "models"):
            return
        for (name, p), (_, q) in zip(self.models[0].named_parameters(), self.models[1].named_parameters()):
            assert p.requires_grad == q.requires_grad and p.dtype == q.dtype, name
            torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    "sequences, acts", [(1, 6), pytest.param(200, 10, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_sequences_of_acts(sequences, acts):
    options = dict(max_examples=sequences, stateful_step_count=acts, deadline=None, derandomize=sequences < 100)
    health = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    run_state_machine_as_test(Training, settings=settings(**options, suppress_health_check=health, print_blob=True))
