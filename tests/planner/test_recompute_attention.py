"""Attention without dropout is recomputed: the same bits for fewer saved bytes; with dropout never."""

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import tunecompile
from tests.support import zoo
from tests.support.compare import assert_equal
from tests.support.memory.budgets import step
from tunecompile.cli.compare.meters import count_saved_bytes
from tunecompile.planner import candidates
from tunecompile.planner.recompute_attention import is_recomputable

pytest.importorskip("transformers")
pytest.importorskip("peft")
LAYERS = 16  # enough for what each holds to count more than what one needs


def deep(memory, **config):
    return tunecompile.optimize(
        zoo.adapt(zoo.make("llama", num_hidden_layers=LAYERS, **config)).train(), memory=memory, executor="eager"
    )


def follows(model):
    """What the first layers recompute; the last one may need less."""
    return tuple(tunecompile.report(model).memory["plans"][0]["recompute"])


def saved_bytes(model):
    return count_saved_bytes(model, lambda: model(**zoo.batch()).loss)


@pytest.mark.slow
def test_the_same_bits_for_fewer_bytes(monkeypatch):
    model = deep("1KiB")
    reference = step(deep(None))
    assert_equal(step(model), reference)
    assert follows(model) == ("everything", "attention")
    monkeypatch.setattr(candidates, "is_recomputable", lambda node: False)
    without = deep("1KiB")
    assert_equal(step(without), reference)
    assert follows(without) == ("everything",)
    assert saved_bytes(model) < 0.85 * saved_bytes(without)


@pytest.mark.slow
def test_other_lengths():
    model, reference = deep("1KiB"), deep(None)
    for length in (24, 17, 24):
        assert_equal(step(model, length=length), step(reference, length=length))
    assert follows(model) == ("everything", "attention")


@pytest.mark.slow
def test_dropout_in_attention_is_never_drawn_twice():
    model, reference = deep("1KiB", attention_dropout=0.3), deep(None, attention_dropout=0.3)
    assert_equal(step(model), step(reference))
    assert "attention" not in follows(model)


def test_which_calls_are_recomputable():
    q = torch.randn(1, 2, 8, 16)
    graph = make_fx(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True))(q).graph
    assert len([node for node in graph.nodes if is_recomputable(node)]) == 1
    assert not any(map(is_recomputable, make_fx(lambda q: (q @ q.mT).softmax(-1))(q).graph.nodes))
