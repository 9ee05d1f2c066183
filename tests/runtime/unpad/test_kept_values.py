"""What layers hand out beside their results, for a loss of the user's: it has a row and a column for each token, padding too."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import tunecompile
from tests.support import zoo
from tests.support.batches import padded
from tests.support.models.pairs import attending, pair
from tests.support.notes import has
from tunecompile.runtime.layers import norm_slot
from tunecompile.runtime.layers.norm_slot import NormSlot
from tunecompile.runtime.step.mode import Mode
from tunecompile.runtime.step.state import Step

modeling = pytest.importorskip("transformers.models.llama.modeling_llama")


class Kept(modeling.LlamaDecoderLayer):
    """A layer that keeps a gate of each token, or its own result."""

    of_result = False

    def forward(self, hidden_states, **kwargs):
        out = super().forward(hidden_states, **kwargs)
        self.keep(out if self.of_result else torch.sigmoid(out[..., :1]))
        return out


class InAttribute(Kept):
    def keep(self, value):
        self.kept = value


class InSharedList(Kept):
    def keep(self, value):
        self.shared.values.append(value)


class Shared:
    """Of all layers; no attribute of a module leads to its values."""

    def __init__(self):
        self.values = []


def build(kind: type, of_result: bool) -> torch.nn.Module:
    model, shared = attending(), Shared()
    for layer in model.model.layers:
        layer.__class__, layer.of_result, layer.shared = kind, of_result, shared
    return model


def step(model: torch.nn.Module, inputs: dict) -> tuple[float, dict]:
    """(loss, gradients), where the loss has a term of what layers kept."""
    model.zero_grad()
    layers = model.model.layers
    layers[0].shared.values.clear()
    loss = model(**inputs).loss
    values = layers[0].shared.values or [layer.kept for layer in layers]
    assert len(values) == 2
    loss = loss + sum(value.square().mean() for value in values)
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kind, of_result", [(InAttribute, True), (InSharedList, False)])
def test_padding_counts_in_a_mean_over_what_layers_keep(kind, of_result):
    """A row of real tokens in its place was another mean: gradients 15 % off, without a word."""
    model, reference = pair(lambda: build(kind, of_result))
    for seed in range(2):
        inputs = padded(3, 24, "right", seed=seed)
        (loss, gradients), (expected, exact) = step(model, inputs), step(reference, inputs)
        assert loss == pytest.approx(expected, rel=1e-5)
        assert max(zoo.errors(gradients, exact).values()) < 1e-4
    assert has(tunecompile.report(model), "padding-kept", reason="output-holds-more")


def test_a_norm_reads_the_row_of_its_one_argument():
    """What else it is given, or by name, is as it comes: nothing says what it is for."""
    unpadded = SimpleNamespace(row_of=lambda tensor: ("flat", tensor))
    slot, x = SimpleNamespace(before=(unpadded, None), layer=nn.Identity(), step=Step()), torch.ones(2)
    assert NormSlot._row(slot, (x,), {}) == ("flat", x)
    for args, kwargs in (((x, x), {}), ((), {"hidden_states": x}), ((x,), {"gate": x}), ((), {})):
        assert NormSlot._row(slot, args, kwargs) is None
    slot.before = None
    assert NormSlot._row(slot, (x,), {}) is None


@pytest.mark.parametrize(
    "options", [{}, {"active": False}, {"grad": False}, {"tokens": 5}, {"refused": True}, {"compiling": True}], ids=str
)
def test_a_norm_is_compiled_for_many_tokens_of_a_step(options, monkeypatch):
    """Anywhere else it is the module's own code, whose rounding others know."""
    told = {"active": True, "grad": True, "tokens": 6, "refused": False, "compiling": False, **options}
    monkeypatch.setattr(norm_slot, "LARGE", 24)
    monkeypatch.setattr(norm_slot, "is_compiling", lambda: told["compiling"])
    slot = SimpleNamespace(
        step=Step(mode=Mode.TRAIN if told["active"] else Mode.EAGER), layer=nn.Identity(), compiled=None
    )
    slot._refused, slot._gathered = lambda: told["refused"], lambda compiled, args, kwargs: "compiled"
    with torch.set_grad_enabled(told["grad"]):
        found = NormSlot._norm(slot, (torch.ones(1, told["tokens"]),), {})
    assert isinstance(found, torch.Tensor) if options else found == "compiled"
