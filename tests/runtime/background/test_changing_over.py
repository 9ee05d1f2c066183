"""Regions run op by op until their code is there: steps are right before, while they change over, and after."""

import copy
import types

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import tunecompile
from tests.runtime.background.later import Generated, batch, stack, step, warming
from tests.support.compare import assert_close
from tests.support.notes import find, has
from tunecompile._torch.background import deferral
from tunecompile.compiler import backend
from tunecompile.compiler.background import process
from tunecompile.compiler.background.orders import Answer
from tunecompile.errors import UnknownWarmup
from tunecompile.runtime import model_state
from tunecompile.runtime.background import part

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """No code of another test's."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    counters.clear()


def hits() -> int:
    return counters["inductor"]["fxgraph_cache_hit"]


def test_a_region_changes_over(monkeypatch):
    """Catches code that is made here, other numbers, and code of another key than this process looks for."""
    model, made = stack(), Generated(monkeypatch)
    reference = copy.deepcopy(model)
    code = warming(model, monkeypatch)
    for seed in range(2):
        assert_close(step(model, batch(seed=seed)), step(reference, batch(seed=seed)))
    assert (made.graphs, len(code.orders), hits()) == (0, 1, 0)
    assert has(model, "waits-for-code")
    code.deliver()
    generated = made.graphs
    for seed in range(2, 4):
        assert_close(step(model, batch(seed=seed)), step(reference, batch(seed=seed)))
    assert (made.graphs, len(code.orders), hits()) == (generated, 1, 2)
    (note,) = find(model, "changed-over")
    assert note.fields["step"] == 3
    (region,) = tunecompile.report(model).to_dict()["regions"]
    (change,) = region["changed_over"]
    assert (change["step"], change["error"]) == (3, "")
    assert not has(model, "waits-for-code")


def test_a_forward_that_waits_runs_its_own_backward(monkeypatch):
    """Its region changes over in between. Catches a backward of code on numbers that were drawn op by op."""
    model = stack(layers=1, dropout=0.5)
    code, bias = warming(model, monkeypatch), model.layers[0].inner.bias
    given, found = batch(), []
    for turn in range(3):
        model(given)
        found.append(model.last)
        if turn == 0:
            code.deliver()
    assert hits() == 2
    assert not torch.equal(found[0], found[1])
    for made in reversed(found):
        (gradient,) = torch.autograd.grad(made.sum(), bias)
        kept = (made != given).sum((0, 1)).float()
        assert torch.equal(gradient, 2 * kept)


def test_other_sizes_come_while_code_is_made(monkeypatch):
    """Catches code for symbols under another key, and a region that forgets one of its orders."""
    model, made = stack(), Generated(monkeypatch)
    reference = copy.deepcopy(model)
    code = warming(model, monkeypatch)
    for rows in (4, 3, 6):
        assert_close(step(model, batch(rows)), step(reference, batch(rows)))
    assert (made.graphs, len(code.orders)) == (0, 2)
    code.deliver()
    generated = made.graphs
    for rows in (5, 4, 3):
        assert_close(step(model, batch(rows)), step(reference, batch(rows)))
    assert (made.graphs, len(code.orders), hits()) == (generated, 2, 4)


def test_other_sizes_come_when_code_is_there(monkeypatch):
    """Their code is waited for as well, and that of the first size goes on."""
    model = stack()
    reference = copy.deepcopy(model)
    code = warming(model, monkeypatch)
    for rows in (4, 4, 3, 4, 3):
        assert_close(step(model, batch(rows)), step(reference, batch(rows)))
        code.deliver()
    assert len(code.orders) == 2
    assert [note.fields["step"] for note in find(model, "changed-over")] == [2, 4]


def test_other_sizes_of_another_model(monkeypatch):
    """Catches a first size that becomes a symbol meanwhile, since a model of the same kind was called with others."""
    model = stack()
    reference = tunecompile.optimize(copy.deepcopy(model), executor="eager")
    code = warming(model, monkeypatch)
    step(model, batch(4))
    for rows in (4, 3):
        step(reference, batch(rows))
    code.deliver()
    assert_close(step(model, batch(4)), step(reference, batch(4)))
    assert (len(code.orders), hits()) == (1, 2)


def test_layers_in_pieces(monkeypatch):
    """Catches pieces that go on op by op, which Dynamo finds by a backend that equals the new one."""
    model = stack()
    for layer in model.layers:
        layer.forward = types.MethodType(_with_a_break, layer)
    reference = copy.deepcopy(model)
    code = warming(model, monkeypatch)
    assert_close(step(model, batch()), step(reference, batch()))
    assert (len(code.orders), hits()) == (2, 0)
    code.deliver()
    assert_close(step(model, batch()), step(reference, batch()))
    assert (len(code.orders), hits()) == (2, 4)


def _with_a_break(layer, hidden):
    inner = layer.inner(hidden)
    torch._dynamo.graph_break()
    return hidden + inner.square()


def test_copies_and_restored_models_leave_the_process(monkeypatch):
    model = stack()
    warming(model, monkeypatch)
    step(model, batch())
    model.last = None
    copied = copy.deepcopy(model)
    assert not hasattr(copied, "_tunecompile") or copied._tunecompile is None
    assert_close(step(copied, batch()), step(stack(), batch()))
    tunecompile.restore(model)
    assert_close(step(model, batch()), step(stack(), batch()))


def test_code_that_cannot_be_made_elsewhere(monkeypatch):
    """Catches a training that waits for ever, or asks again and again."""
    model, made = stack(), Generated(monkeypatch)
    reference = copy.deepcopy(model)
    code = warming(model, monkeypatch)
    step(model, batch())
    code.deliver("ImportError: no such module")
    for seed in range(2):
        assert_close(step(model, batch(seed=seed)), step(reference, batch(seed=seed)))
    assert (made.graphs, len(code.orders)) == (2, 1)
    assert has(model, "not-from-background", detail="no such module")


def test_code_of_another_key(monkeypatch):
    """Catches a report that is silent where a step stalled, and a region that orders again and again."""
    model, made = stack(), Generated(monkeypatch)
    code = warming(model, monkeypatch)
    step(model, batch())
    code.jobs[0].answer = Answer(0.1)  # and nothing in the cache
    step(model, batch())
    step(model, batch())
    assert (made.graphs, len(code.orders)) == (2, 1)
    assert has(model, "compiled-at-once", reason="other-key")


def test_two_regions_with_the_same_graph(monkeypatch):
    """Both wait. Catches one that generates the code that the other one has ordered."""
    made, reference = Generated(monkeypatch), stack()
    model = stack()
    model.layers[1].more = torch.nn.Identity()  # another structure
    code = warming(model, monkeypatch)
    assert len(model._tunecompile.regions) == 2
    assert_close(step(model, batch()), step(reference, batch()))
    assert made.graphs == 0
    code.deliver()
    generated = made.graphs
    assert_close(step(model, batch()), step(reference, batch()))
    assert made.graphs == generated
    assert not find(model, "compiled-at-once", "waits-for-code")


def test_a_backward_that_is_run_twice(monkeypatch):
    """Catches saved tensors that a graph op by op takes away."""
    model = stack()
    warming(model, monkeypatch)
    loss = model(batch())
    first, second = (torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_code_that_is_there_runs_at_once(monkeypatch):
    """A warm start waits for nothing."""
    first = stack()
    code = warming(first, monkeypatch)
    step(first, batch())
    code.deliver()
    step(first, batch())
    torch._dynamo.reset()
    second, made = stack(), Generated(monkeypatch)
    code = warming(second, monkeypatch)
    step(second, batch())
    assert (made.graphs, len(code.orders)) == (0, 0)
    assert not find(second, "waits-for-code", "changed-over")


def test_a_graph_that_cannot_be_sent(monkeypatch):
    """It is compiled where it is, with all rewrites, and the report says why."""

    def pack(*_):
        raise ValueError("the kernel somewhere.it cannot be imported")

    model, made = stack(), Generated(monkeypatch)
    monkeypatch.setattr(deferral, "pack", pack)
    reference = copy.deepcopy(model)
    code = warming(model, monkeypatch)
    assert_close(step(model, batch()), step(reference, batch()))
    assert (made.graphs, len(code.orders)) == (2, 0)
    assert has(model, "compiled-at-once", detail="the kernel somewhere.it")
    assert not find(model, "compiled-without-rewrites", "not-compiled")


def test_inside_a_checkpoint_code_comes_first(monkeypatch):
    """What is computed again in the backward has to be computed in the same way."""
    model, made = stack(layers=1, dropout=0.5), Generated(monkeypatch)
    code = warming(model, monkeypatch)
    checkpoint(model, batch(), use_reentrant=False).backward()
    assert (made.graphs, len(code.orders)) == (2, 0)


def test_inside_a_checkpoint_that_comes_later_nothing_waits(monkeypatch):
    """Catches a mask of dropout that is drawn op by op in the forward, and by code when the backward repeats it."""
    model, made = stack(layers=1, dropout=0.5), Generated(monkeypatch)
    code, bias = warming(model, monkeypatch), model.layers[0].inner.bias
    step(model, batch())
    assert (made.graphs, len(code.orders)) == (0, 1)
    checkpoint(model, batch(), use_reentrant=False)
    assert made.graphs == 2
    made = model.last
    model(batch())  # a step between the two, in which regions may change over
    (gradient,) = torch.autograd.grad(made.sum(), bias)
    assert torch.equal(gradient, 2 * (made != batch()).sum((0, 1)).float())


def test_a_budget_that_comes_later(monkeypatch):
    """Catches a plan for code under which graphs run op by op."""
    model = stack()
    code = warming(model, monkeypatch)
    step(model, batch())
    assert len(code.orders) == 1
    model._tunecompile.memory = "1GiB"
    step(model, batch())
    assert has(model, "compiled-first", reason="memory-is-planned")
    assert has(model, "not-from-background")
    assert not has(model, "waits-for-code")


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"memory": "1GiB"}, "memory-is-planned"),
        ({"executor": "eager"}, "no-code-at-all"),
        ({"verify": True}, "code-is-verified"),
    ],
    ids=["memory", "executor", "verify"],
)
def test_where_code_comes_first(options, reason, monkeypatch):
    model = stack()
    code = warming(model, monkeypatch, **options)
    assert not hasattr(code, "orders")  # it was not started
    assert has(model, "compiled-first", reason=reason)


def test_several_ranks_compile_together(monkeypatch):
    monkeypatch.setattr(part, "several", lambda: True)
    model = stack()
    warming(model, monkeypatch)
    assert has(model, "compiled-first", reason="ranks-compile-together")


def test_without_caches_code_comes_first(monkeypatch):
    model = stack()
    with torch._inductor.config.patch(force_disable_caches=True):
        warming(model, monkeypatch)
        assert has(model, "compiled-first", reason="no-code-cache")


def test_it_is_off_by_default(monkeypatch):
    """No process, no trial of the cache, no other way of compiling."""

    def refuse(*_, **__):
        raise AssertionError

    for place, name in ((process.BackgroundCompiler, "__init__"), (backend, "Deferral"), (model_state, "Background")):
        monkeypatch.setattr(place, name, refuse)
    model = stack()
    reference = copy.deepcopy(model)
    tunecompile.optimize(model)
    assert_close(step(model, batch()), step(reference, batch()))
    assert model._tunecompile.background is None


def test_other_words_are_refused():
    with pytest.raises(UnknownWarmup):
        tunecompile.optimize(stack(), warmup="forground")
