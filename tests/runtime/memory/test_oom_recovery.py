"""Out of memory under a budget: the step goes on, and losses and gradients are bit for bit those of a step that nothing disturbed."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tunecompile
from tests.support import zoo
from tests.support.batches import padded
from tests.support.compare import assert_equal
from tests.support.memory.budgets import LAYERS
from tests.support.memory.full_device import (
    FULL,
    WHERE,
    Full,
    Tiny,
    build,
    gradients,
    graphs,
    guarded,
    ids,
    loss,
    needed,
    peak,
    plain,
    step,
)
from tests.support.notes import has, logged
from tunecompile.planner import candidates
from tunecompile.planner.solver import KEEP, RECOMPUTE
from tunecompile.runtime.loss_head import Head, losses

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")


# -- the step goes on -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("layer", [1, pytest.param(LAYERS - 1, marks=pytest.mark.slow)])
def test_the_step_goes_on_with_the_same_bits(where, layer, caplog):
    model = guarded()
    before, full = peak(model), Full(model, layer, where)
    with caplog.at_level(logging.WARNING, "tunecompile"):
        assert_equal(step(model), plain())
        assert_equal(step(model), plain())
    assert full.raised == 1 and peak(model) < before and not graphs(model)
    (record,) = [record for record in caplog.records if record.name == "tunecompile"]
    assert has(record.args, "ran-out-of-memory", subject="the step", before="4 layers keep")
    assert has(model, "ran-out-of-memory", before="4 layers keep")


@pytest.mark.parametrize("where", [WHERE[0], *(pytest.param(where, marks=pytest.mark.slow) for where in WHERE[1:])])
def test_in_the_very_first_step(where):
    model = build(int(1.2 * needed()))
    full = Full(model, 2, where)
    assert_equal(step(model), plain())
    assert full.raised == 1 and any(plan["recompute"] for plan in tunecompile.report(model).memory["plans"])


@pytest.mark.parametrize(
    "where",
    [
        "in the model",
        *(pytest.param(where, marks=pytest.mark.slow) for where in ("in the loop", "in logits that are read")),
    ],
)
def test_in_head_and_loss(where, monkeypatch):
    def run(model):
        torch.manual_seed(3)
        if where == "in the model":
            found = loss(model)
        else:
            logits = model(ids())
            found = (
                F.cross_entropy(logits.float().flatten(0, 1), ids().flatten())
                if where == "in the loop"
                else logits.square().mean()
            )
        found.backward()
        return found.detach(), gradients(model)

    model, raised, seen = guarded(), [], []
    whole, logits = losses.linear_cross_entropy, Head.logits
    reference = run(build(None))

    def full(inner):
        def run(*args):
            seen.append(graphs(model))
            if not raised:
                raised.append(1)
                raise torch.OutOfMemoryError(FULL)
            return inner(*args)

        return run

    monkeypatch.setattr(losses, "linear_cross_entropy", full(whole))
    monkeypatch.setattr(Head, "logits", full(logits))
    assert_equal(run(model), reference)
    assert raised and seen == [LAYERS, 0]


def test_in_the_final_norm():
    model, left = guarded(), [1]

    def full(*_):
        if left and left.pop():
            raise torch.OutOfMemoryError(FULL)

    model.backbone.norm.register_forward_hook(full)
    assert_equal(step(model), plain())
    assert not left


def test_a_head_that_is_no_linear_is_none_of_the_plans():
    model = Tiny().train()
    model.head = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32))
    tunecompile.optimize(model, memory=int(0.7 * needed()), executor="eager")
    for _ in range(2):
        step(model)
    assert any(plan["recompute"] for plan in tunecompile.report(model).memory["plans"])


@pytest.mark.parametrize("where", ["layer", "loss"])
def test_without_a_budget_the_user_hears_what_makes_room(where, monkeypatch, caplog):
    model = build(None)

    def full(*_):
        raise torch.OutOfMemoryError(FULL)

    if where == "layer":
        model.backbone.layers[1].down.register_forward_hook(full)
    else:
        monkeypatch.setattr(losses, "linear_cross_entropy", full)
    for _ in range(2):
        with caplog.at_level(logging.WARNING, "tunecompile"), pytest.raises(torch.OutOfMemoryError, match="2.00 KiB"):
            step(model)
    assert logged(caplog.records) == ["no-budget"]


# -- gradients that are there already, and those who watch them ---------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("where", WHERE)
def test_accumulated_gradients_are_kept(where):
    model, reference = guarded(), build(None)
    for m in (model, reference):
        torch.manual_seed(5)
        for rows in (4, 5, 4):
            if m is model and rows == 5:
                before = {name: p.grad for name, p in m.named_parameters()}
                full = Full(m, 1, where)
            loss(m, rows).backward()
    assert full.raised == 1 and all(p.grad is before[name] for name, p in model.named_parameters())
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), reference.parameters()))


@pytest.mark.slow
def test_a_graph_that_is_retained():
    model, reference = guarded(), build(None)
    full = Full(model, 2, "before the backward")
    torch.manual_seed(5)
    kept = loss(model)
    kept.backward(retain_graph=True)
    kept.backward()
    with pytest.raises(RuntimeError, match="second time"):
        kept.backward()
    for _ in range(2):
        torch.manual_seed(5)
        loss(reference).backward()
    ours, theirs = gradients(model), gradients(reference)
    assert full.raised == 1 and all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["layer", "mlp"])
def test_weights_that_layers_share(part):
    """A layer that the list holds twice, or a part of two."""

    def make(memory=None):
        model = zoo.make("llama", num_hidden_layers=3).train()
        layers = model.model.layers
        if part == "layer":
            layers[2] = layers[0]
        else:
            layers[2].mlp = layers[0].mlp
        return model if memory is None else tunecompile.optimize(model, memory=memory, executor="eager")

    batch = zoo.batch() | {
        "use_cache": False
    }  # the layer's second call would attend to what its first put into the cache
    _, reference = zoo.step(make(), batch)
    whole = make("1TiB")
    zoo.step(whole, batch)
    model = make(int(1.2 * tunecompile.report(whole).memory["predicted_peak"]))  # with more, layers are left alone
    for _ in range(2):
        _, gradients = zoo.step(model, batch)
        assert max(zoo.errors(gradients, reference).values()) < 1e-5
    full = Full(model, 1, "before the backward")
    _, gradients = zoo.step(model, batch)
    assert max(zoo.errors(gradients, reference).values()) < 1e-5 and full.raised == 1


# -- models and loops -----------------------------------------------------------------------------------------------------------


def llama(memory):
    model = zoo.adapt(zoo.make("llama", num_hidden_layers=2), lora_dropout=0.2, target_modules=["q_proj", "down_proj"])
    return tunecompile.optimize(model.train(), memory=memory, executor="eager")


@pytest.fixture
def few_plans(monkeypatch):
    """To survey a whole layer of transformers takes its time."""
    monkeypatch.setattr(candidates, "plans", lambda graph: [KEEP, RECOMPUTE])


@pytest.mark.slow
def test_adapters_and_batches_without_their_padding(few_plans):
    def run(model):
        torch.manual_seed(3)
        found = model(**padded()).loss
        found.backward()
        return found.detach(), gradients(model)

    reference = run(llama(None))
    model = llama("1MiB")
    assert_equal(run(model), reference)
    for where in WHERE:
        full = Full(model, 1, where)
        assert_equal(run(model), reference)
        assert full.raised == 1
    assert has(model, "padding-removed")


@pytest.mark.parametrize("where", [WHERE[0], *(pytest.param(where, marks=pytest.mark.slow) for where in WHERE[1:])])
def test_what_waits_on_the_host(to_the_host, where):
    model = build(int(0.7 * needed()))
    assert_equal(step(model), plain())
    assert any(plan["offload"] for plan in tunecompile.report(model).memory["plans"])
    full = Full(model, 1, where)
    for _ in range(3):
        assert_equal(step(model), plain())
    assert full.raised == 1 and to_the_host[-1].report()["host_bytes"] == 0


@pytest.mark.parametrize("where", [WHERE[0], pytest.param(WHERE[1], marks=pytest.mark.slow)])
def test_a_model_without_layers(where):
    def make(memory):
        torch.manual_seed(0)
        return tunecompile.optimize(
            nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Dropout(0.3), nn.Linear(64, 8)),
            memory=memory,
            executor="eager",
        )

    def run(model):
        torch.manual_seed(3)
        found = model(torch.randn(16, 8)).square().mean()
        found.backward()
        return found.detach(), gradients(model)

    model = make("64KiB")
    full = Full(model, 0, where)
    assert_equal(run(model), run(make(None)))
    assert full.raised == 1
