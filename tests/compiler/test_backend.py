"""A pass that fails costs speed, never the training."""

import dataclasses

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.compare import assert_close
from tests.support.notes import has
from tunecompile import passes
from tunecompile.compiler import backend as backend_module
from tunecompile.compiler.backend import Backend
from tunecompile.compiler.pass_manager import Context
from tunecompile.planner.solver import KEEP, Plan


def fail(graph, context):
    raise KeyError("planted")


def trained_as_before(**options) -> torch.nn.Module:
    """A model whose step is the same once it is optimized with these options."""
    model, inputs = zoo.make("llama"), zoo.batch()
    before = zoo.step(model, inputs)
    tunecompile.optimize(model, **options)
    assert_close(zoo.step(model, inputs), before, loss=1e-5, limit=1e-4)
    return model


@pytest.mark.parametrize("stage", ["recognize", "plan", "lower"])
def test_a_failing_pass_leaves_the_region_plain(monkeypatch, stage):
    broken = [dataclasses.replace(p, run=fail) if p.stage == stage else p for p in passes.PIPELINE]
    monkeypatch.setattr(passes, "PIPELINE", broken)
    model = trained_as_before(executor="eager")
    assert has(model, "compiled-without-rewrites", detail="planted")


def test_checkpointing_still_saves_memory_when_a_pass_fails(monkeypatch):
    broken = [dataclasses.replace(p, run=fail) if p.stage == "recognize" else p for p in passes.PIPELINE]
    monkeypatch.setattr(passes, "PIPELINE", broken)
    saved = []
    for checkpoint in (False, True):
        model = zoo.make("llama")
        if checkpoint:
            model.gradient_checkpointing_enable()
        tunecompile.optimize(model, executor="eager")
        saved.append(saved_bytes(model))
    assert saved[1] < 0.5 * saved[0]


def saved_bytes(model) -> int:
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        zoo.step(model, zoo.batch())
    return sum(size for pointer, size in storages.items() if pointer not in own)


def test_kernels_that_cannot_be_joined_are_left_apart(monkeypatch):
    """Where Inductor's scheduler fails on them. All rewrites stay."""
    from functorch.compile import make_boxed_func
    from torch._inductor import compile_fx, config
    from torch._inductor.exc import InductorError

    def fails(gm, inputs, **told):
        if config.combo_kernels:
            raise InductorError(KeyError("op45"), None)
        return make_boxed_func(gm.forward)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", fails)
    model = trained_as_before()
    report = tunecompile.report(model)
    assert has(report, "kernels-not-combined", detail="op45") and not has(report, "compiled-without-rewrites"), report
    assert {m.family: m.rewritten for m in report.matches}["swiglu"] == 1


def test_code_that_cannot_be_generated_for_a_backward_is_known_in_the_forward(monkeypatch):
    """Where the layer can run as it is. In the first backward pass it would be too late."""
    from functorch.compile import make_boxed_func
    from torch._inductor import compile_fx

    def fails(gm, inputs, **told):
        if told.get("is_backward"):
            raise RuntimeError("planted")
        return make_boxed_func(gm.forward)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", fails)
    model = trained_as_before()
    assert has(model, "compiled-without-rewrites", detail="planted") and has(model, "not-compiled")


def test_graphs_read_cached_weights_where_they_read_any(monkeypatch):
    class Kept:
        def forward(self, run, positions):
            return "forward", run, positions

        def backward(self, run, positions):
            return "backward", run, positions

    kept = Kept()
    monkeypatch.setattr(backend_module, "give_matrices", lambda gm, kept, inputs: inputs)
    keep = Backend("layer", (), "eager", kept=kept)._keep(Context("layer"))
    for kind in ("forward", "backward"):
        assert keep(None, [3], kind)("code") == (kind, "code", [3])
        assert keep(None, [], kind) is None
    assert Backend("layer", (), "eager")._keep(Context("layer")) is None


@pytest.mark.parametrize("change", [None, False, True])
def test_floats_of_the_host_are_constants_unless_they_change(monkeypatch, change):
    """Patterns bind scales and epsilons; one that changes from batch to batch stays a symbol."""
    fixed = []
    monkeypatch.setattr(backend_module, "specialize_floats", fixed.append)
    monkeypatch.setattr(backend_module, "compile_eager", lambda work, *given, **options: work.forward)
    graph = torch.fx.symbolic_trace(torch.nn.Identity())
    Backend("test", (), "eager")(graph, [], *[change] * (change is not None))
    assert fixed == [graph] * (not change)


@pytest.mark.parametrize("unread", [None, False, True])
def test_whether_attention_weights_are_read_is_told_with_the_graph(monkeypatch, unread):
    """They are, where nobody says more: a layer may return them."""
    monkeypatch.setattr(backend_module, "compile_eager", lambda work, *given, **options: work.forward)
    graph, backend = torch.fx.symbolic_trace(torch.nn.Identity()), Backend("test", (), "eager")
    if unread is not None:
        graph.meta[backend_module.WEIGHTS_UNREAD] = unread
    backend(graph, [])
    assert backend.contexts[0].weights_unread is bool(unread)


@pytest.mark.parametrize(
    "options, cached",
    [
        ({}, True),
        ({"plan": Plan(None)}, True),
        ({"plan": Plan(weights=True)}, False),
        ({"look": lambda joint: None}, False),
    ],
)
def test_which_code_may_come_from_a_cache(monkeypatch, options, cached):
    """None that reads matrices of this model's weights, or whose joint graph somebody waits to see."""
    asked = []

    def compiled(work, *args, cached, **others):
        asked.append(cached)
        return work.forward

    monkeypatch.setattr(backend_module, "compile_eager", compiled)
    graph = torch.fx.symbolic_trace(torch.nn.Identity())
    backend = Backend("test", (), "eager", **options)
    assert backend(graph, [])(1) == 1 and not backend.failures
    assert asked == [cached]


def test_a_forward_for_scores_has_no_code_for_a_backward():
    """It is that of training, which saves for one. A score whose gradient is asked for all the same must not get another's."""
    x, made = torch.randn(4, 8, requires_grad=True), []
    for backward in (True, False):
        backend = Backend("layer", passes.PIPELINE, "eager", backward=backward)
        torch._dynamo.reset()
        made.append(torch.compile(lambda x: torch.sin(x).exp() * x, backend=backend)(x))
        assert not backend.failures and len(backend.contexts) == 1
    assert torch.equal(*made) and torch.autograd.grad(made[0].sum(), x)[0].isfinite().all()
    with pytest.raises(RuntimeError, match="have no backward"):
        made[1].sum().backward()


def test_backends_that_compile_alike_are_one_key():
    """Dynamo keeps what they compiled by backend: those of one region under one plan find each other's."""

    class Owner:
        def compile(self, gm, inputs):
            return gm.forward

    owner, region, setting = Owner(), object(), object()
    of = [
        (region, setting, KEEP), (region, setting, KEEP), (region, setting, Plan(None)), (region, setting, None),
        (region, setting, None), (region, object(), KEEP), (object(), setting, KEEP),
    ]  # fmt: skip
    made = [backend_module.WeakBackend(owner.compile, backend_module.CompiledAs(*each)) for each in of]
    made += [backend_module.WeakBackend(owner.compile) for _ in range(2)]
    assert made[0] == made[1] and hash(made[0]) == hash(made[1]) and made[0] != "another"
    assert len(set(made)) == len(made) - 1, "without a plan, or without a region, each is one of its own"


def test_bfloat16_where_it_is_lacking(monkeypatch):
    """Inductor would refuse it behind all passes; what is no tensor, or lies elsewhere, is no reason."""
    monkeypatch.setattr(backend_module, "has_bfloat16", lambda device: device.type != "meta")
    half, full = torch.empty(2, dtype=torch.bfloat16), torch.empty(2)
    assert not backend_module.without_bfloat16([half, full.to("meta"), 3, None])
    assert backend_module.without_bfloat16([3, full, half, half.to("meta")])
