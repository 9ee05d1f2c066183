"""Adapters over what is no linear: the experts of a mixture and their router, which PEFT parametrises at every call."""

import copy
import io

import pytest
import torch
from torch import nn

import tunecompile
from tests.support import zoo
from tests.support.notes import BROKEN, EAGER, find, has
from tunecompile.integrations.peft import experts

pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")
EXPERTS = {
    "target_modules": ["q_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}


def wrappers(model):
    return [module for module in model.modules() if hasattr(type(module), "_activate_lora")]


def compare(model, reference, **options):
    _, expected = zoo.step(reference, zoo.batch(**options))
    _, got = zoo.step(model, zoo.batch(**options))
    assert max(zoo.errors(got, expected).values()) < 1e-5


def is_whole(model):
    report = tunecompile.report(model)
    return not find(report, *EAGER, *BROKEN, "compiled-without-rewrites")


def test_layers_are_compiled_once_and_for_all_steps():
    reference = zoo.adapt(zoo.make("mixtral"))
    model = tunecompile.optimize(copy.deepcopy(reference), executor="eager")
    compiles = []
    for seed in range(3):
        compare(model, reference, seed=seed)
        compiles.append(tunecompile.report(model).compiles)
    assert compiles == [1, 1, 1] and is_whole(model), tunecompile.report(model)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_in_every_state(family):
    """One wrapper a parameter, the one inside the other; adapters of two ranks and scales, alone, together, off, merged."""
    from peft import LoraConfig

    pattern = {"rank_pattern": {"mlp.experts.down_proj": 3}} if family == "qwen3_moe" else {}
    reference = zoo.adapt(zoo.make(family, num_hidden_layers=2), **EXPERTS, **pattern)
    reference.add_adapter("other", LoraConfig(r=5, lora_alpha=7, use_rslora=True, **EXPERTS))
    for name, parameter in reference.named_parameters():
        if "lora_B.other" in name:
            nn.init.normal_(parameter, std=0.02)
    assert all(isinstance(w.base_layer, type(w)) for w in wrappers(reference)[::2])
    model = tunecompile.optimize(copy.deepcopy(reference), executor="eager")
    compare(model, reference)
    assert is_whole(model), tunecompile.report(model)
    for active in ("other", ["default", "other"]):
        for each in (model, reference):
            each.base_model.set_adapter(active)
        compare(model, reference)
    for each in (model, reference):
        each.set_adapter("default")
    with model.disable_adapter(), reference.disable_adapter():
        for each in (model, reference):
            each.get_input_embeddings().weight.requires_grad_()
        compare(model, reference)
    for each in (model, reference):
        each.get_input_embeddings().weight.requires_grad_(False)
    for each in (model, reference):
        each.merge_adapter()
        each.get_input_embeddings().weight.requires_grad_()
    compare(model, reference)
    with model.disable_adapter(), reference.disable_adapter():  # PEFT takes them out of the weights, in eager layers
        compare(model, reference)
    compare(model, reference)  # and they are compiled again
    assert "grouped_lora_linear" in str(tunecompile.report(model))


def test_they_are_given_back_and_a_copy_has_its_own():
    model = tunecompile.optimize(zoo.adapt(zoo.make("mixtral")), executor="eager")
    inner = [module for module in wrappers(model) if "forward" in vars(module)]
    assert inner and all(module.forward.__self__ is module for module in inner)
    other = copy.deepcopy(model)
    assert all(module.forward.__self__ is module for module in wrappers(other) if "forward" in vars(module))
    stored = io.BytesIO()
    torch.save(inner[0], stored)
    stored.seek(0)
    loaded = torch.load(stored, weights_only=False)
    assert loaded.forward.__self__ is loaded and loaded.forward.__func__ is type(loaded).forward
    tunecompile.restore(model)
    assert not any("forward" in vars(module) for module in wrappers(model))


@pytest.mark.slow
def test_a_loop_over_experts_runs_as_it_is():
    reference = zoo.make("qwen3_moe", num_hidden_layers=2)
    reference.set_experts_implementation("eager")
    reference = zoo.adapt(reference, **EXPERTS)
    model = tunecompile.optimize(copy.deepcopy(reference), executor="eager")
    compare(model, reference)
    assert has(model, "parametrizing-modules") and "loops over its experts" in str(tunecompile.report(model))


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.stack = nn.Parameter(torch.randn(3, 4, 4))


class Plain(Base):
    def forward(self, x):
        return self.through(x) + self.training

    def through(self, x):
        return torch.einsum("ti,eoi->to", x, self.stack)


class Remembers(Plain):
    def through(self, x):
        self.last = x
        return x


class CallsSuper(Plain):
    def through(self, x):
        return super().through(x)


class Property(Plain):
    @property
    def first(self):
        return self.stack[0]


class Loops(Plain):
    def forward(self, x):
        return sum(x @ weight for weight in self.stack)


@pytest.mark.parametrize(
    "kind, reason",
    [
        (Plain, None),
        (Remembers, "reads-itself"),
        (CallsSuper, "reads-itself"),
        (Property, "reads-itself"),
        (Loops, "loops-over-experts"),
    ],
)
def test_code_that_would_notice_is_refused(kind, reason):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        nn.ModuleDict({"inner": kind()}), LoraConfig(r=2, target_modules=[], target_parameters=["inner.stack"])
    )
    (wrapper,) = wrappers(model)
    found = experts.refusal(wrapper)
    assert (None if found is None else found.code) == reason
    if reason is None:
        nn.init.normal_(wrapper.lora_B["default"].weight)
        bound = experts.traced(wrapper)
        x = torch.randn(5, 4)
        torch.testing.assert_close(torch.compile(bound, backend="eager", fullgraph=True)(x), wrapper(x))


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(16, 2, batch_first=True), nn.LayerNorm(16)
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        h = self.norm(x)
        return x + self.attention(h, h, h, need_weights=False)[0] + self.linear(h)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Attending() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.slow
def test_attention_whose_weights_are_replaced_at_every_call():
    """The report says what runs eagerly; no error of a compiler stands there."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["attention", "linear"], init_lora_weights=False)
    reference = peft.get_peft_model(Stack(), config).train()
    model = tunecompile.optimize(copy.deepcopy(reference), executor="eager")
    for length in (5, 6, 7):
        grads = []
        for m in (model, reference):
            m.zero_grad()
            m(torch.randn(2, length, 16, generator=torch.Generator().manual_seed(length))).square().mean().backward()
            grads.append({name: p.grad for name, p in m.named_parameters() if p.grad is not None})
        assert grads[1] and max(zoo.errors(*grads).values()) < 1e-5
    report = tunecompile.report(model)
    assert has(report, "merging-modules", count=2, subject="MultiheadAttention") and not has(report, "not-compiled"), (
        report
    )
    assert report.compiles <= 4 and not has(report, "compiled-without-rewrites"), report
