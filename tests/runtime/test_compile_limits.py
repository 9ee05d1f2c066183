"""What is compiled again and again, is too large or takes too long, goes on operation by operation, and the report says why."""

import contextlib
import copy
import gc
import io
import logging
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tunecompile
from tests.support.models.pairs import pair
from tests.support.notes import find, has
from tunecompile.compiler.backend import Backend
from tunecompile.runtime import compile_limits
from tunecompile.runtime.compile_limits import CompileEffort, History, uncollected
from tunecompile.runtime.layers import variant

pytestmark = pytest.mark.filterwarnings("ignore")


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), 1

    def forward(self, x):
        return x + self.linear(x).tanh() * self.scale


class Repeated(Layer):
    """An integer that no symbol takes the place of."""

    def forward(self, x):
        for _ in range(self.scale):
            x = x + self.linear(x).tanh() / 8
        return x


class Chunked(nn.Module):
    """Cuts a batch in chunks, as many as its data says."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, sizes):
        parts = torch.split(x, sizes.tolist(), dim=1)
        return torch.cat([part + self.linear(part).softmax(1) for part in parts], 1)


class Long(nn.Module):
    """A loop over time steps that is not known for one (tests/integrations/test_token_loops.py has those that are)."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        state, out = x[:, 0], []
        while len(out) < x.shape[1]:
            state = (state + self.linear(x[:, len(out)])).tanh()
            out.append(state)
        return torch.stack(out, 1)


class CutOnce(Layer):
    """A graph break."""

    def forward(self, x):
        x = x + self.linear(x).sin()
        torch._dynamo.graph_break()
        return x + self.linear(x).tanh()


class Cut(CutOnce):
    """One in each call of a function."""

    def forward(self, x):
        x = self.piece(x) / 2
        x = self.piece(x) / 4
        x = self.piece(x) / 8
        return self.piece(x) + x

    def piece(self, x):
        return super().forward(x).cos()


class Endless(Layer):
    """Its second graph, of any size, is traced for minutes."""

    def forward(self, x):
        steps = 1 if x.shape[1] == 12 else 200_000
        while steps > 0:
            steps -= 1
        return x + self.linear(x).tanh()


class Named(nn.Module):
    """Looks its linear up by a name of its own, as adapters do that share some vectors."""

    def __init__(self):
        super().__init__()
        self.linears, self.name = nn.ModuleDict({name: nn.Linear(8, 8) for name in "abcd"}), "a"

    def forward(self, x):
        return x + self.linears[self.name](x).tanh()


class Stack(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(kind() for _ in range(2))

    def forward(self, x, *others):
        for layer in self.layers:
            x = layer(x, *others)
        return x


def assert_same(models, *inputs):
    grads = []
    for model in models:
        model.zero_grad()
        loss = model(*inputs).square().mean()
        loss.backward()
        grads.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def data(length: int = 12, seed: int = 0) -> torch.Tensor:
    return torch.randn(2, length, 8, generator=torch.Generator().manual_seed(seed))


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    "level, rank, shown", [(logging.WARNING, "0", True), (logging.INFO, "0", False), (logging.WARNING, "1", False)]
)
def test_a_terminal_shows_what_is_compiled(level, rank, shown, monkeypatch, caplog):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("LOCAL_RANK", rank)
    with caplog.at_level(level, "tunecompile"), CompileEffort("layers", (1, 2)).timed() as course:
        course.cached = True
    lines = terminal.getvalue().splitlines() if shown else [record.getMessage() for record in caplog.records]
    if level == logging.INFO or shown:
        assert lines[0] == "tunecompile: compiling layers (region 1 of 2)"
        assert lines[1].startswith("tunecompile: layers (region 1 of 2) compiled in 0.")
        assert lines[1].endswith("s, code from Inductor's cache")
    assert shown or not terminal.getvalue()
    with caplog.at_level(logging.ERROR, "tunecompile"), CompileEffort("layers").timed():
        pass
    assert len(terminal.getvalue().splitlines()) == (2 if shown else 0)


@pytest.mark.parametrize("wanted", [True, False])
def test_the_collector_waits_while_layers_compile(wanted, monkeypatch):
    seen, compile = [], Backend.__call__
    monkeypatch.setattr(Backend, "__call__", lambda *args: seen.append(gc.isenabled()) or compile(*args))
    model = tunecompile.optimize(Stack(Layer), executor="eager")
    before = gc.isenabled()
    try:
        gc.enable() if wanted else gc.disable()
        for length in (12, 10):  # traced in a call of its own; again, in a call of compiled code
            model(data(length)).sum().backward()
            assert gc.isenabled() is wanted
        with pytest.raises(ZeroDivisionError), uncollected():
            1 / 0
        assert gc.isenabled() is wanted
    finally:
        gc.enable() if before else gc.disable()
    assert seen == [False, False]


@pytest.mark.parametrize("frozen, long", [(False, True), (True, True), (False, False)])
def test_what_a_long_compilation_makes_is_old_at_its_end(frozen, long, monkeypatch):
    """No collection of young objects goes through it. Objects that the user froze stay frozen."""
    monkeypatch.setattr(compile_limits, "LEAVES", 0.0 if long else 1e9)
    before = gc.isenabled()
    try:
        gc.enable()
        gc.freeze() if frozen else gc.unfreeze()
        with uncollected():
            made = [[]]
        assert bool(gc.get_freeze_count()) is frozen
        assert any(each is made for each in gc.get_objects(2)) is (long and not frozen)
    finally:
        gc.unfreeze()
        gc.enable() if before else gc.disable()


@pytest.mark.parametrize("enabled", [False, True])
def test_leftovers_of_compilations_are_collected_before_the_next_batch(enabled, monkeypatch):
    """Once, and not where the user keeps the collector off."""
    collected = []

    def watch(phase, about):
        if phase == "start" and about["generation"] == 2:
            collected.append(about)

    monkeypatch.setattr(compile_limits, "LEAVES", 1e-9)
    model, before = tunecompile.optimize(Stack(Layer), executor="eager"), gc.isenabled()
    counts = []
    try:
        gc.collect()  # nothing is due by itself
        gc.enable() if enabled else gc.disable()
        gc.callbacks.append(watch)
        for _ in range(4):
            model(data()).sum().backward()
            counts.append(len(collected))
    finally:
        gc.callbacks.remove(watch)
        gc.enable() if before else gc.disable()
    assert counts == [0, enabled, enabled, enabled]


@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize("change", [False, True])
def test_integers_of_modules_are_symbols_where_they_change(ran, change, monkeypatch):
    """And until a variant ran, what is compiled is watched, and the collector waits."""
    entered = []

    def context(name):
        return lambda *given: contextlib.nullcontext(entered.append(name))

    for name in ("integers_may_change", "also_watching", "uncollected"):
        monkeypatch.setattr(variant, name, context(name))
    monkeypatch.setattr(variant, "call_whole", lambda compiled, layer, *args, **kwargs: (compiled, layer, args, kwargs))
    made = SimpleNamespace(ran=ran, integers_change=change, _compiled="code", _met=None)
    assert variant.Variant._run(made, "layer", 1, a=2) == ("code", "layer", (1,), {"a": 2})
    assert sorted(entered) == ["also_watching"] * (not ran) + ["integers_may_change"] * change + ["uncollected"] * (
        not ran
    )


def test_a_number_of_the_host_that_changes_with_each_batch():
    models = pair(lambda: Stack(Repeated))
    for batch in range(5):
        for model in models:
            for layer in model.layers:
                layer.scale = 2 + batch
        assert_same(models, data(seed=batch))
    report = tunecompile.report(models[0])
    assert report.compiles <= 3 and has(report, "given-up"), report
    assert len(find(report, "given-up")) == 1 and has(report, "compiled-too-often", limit=3), report


@pytest.mark.parametrize("step", [0.1, 1])
def test_a_number_that_changes_becomes_a_symbol(step):
    models = pair(lambda: Stack(Layer))
    for batch in range(5):
        for model in models:
            for layer in model.layers:
                layer.scale = (batch + 2) * step
        assert_same(models, data(seed=batch))
    report = tunecompile.report(models[0])
    assert report.compiles == 3 and not find(report, "given-up", "ran-eagerly"), report


def test_each_layer_may_have_a_number_of_its_own():
    """More of them than Dynamo makes graphs, where they become symbols."""
    models = [Stack(Layer).double() for _ in range(2)]
    for model in models:
        model.layers.extend(copy.deepcopy(model.layers[0]) for _ in range(9))
        for number, layer in enumerate(model.layers):
            layer.scale = 2 + number
    tunecompile.optimize(models[0], executor="eager")
    for length, expected in ((12, 3), (15, 4)):
        assert_same(models, data(length).double())
        report = tunecompile.report(models[0])
        assert report.compiles == expected and not find(report, "given-up", "ran-eagerly"), report


def test_a_loop_over_chunks_is_no_graph_for_each_of_their_numbers():
    models = pair(lambda: Stack(Chunked))
    for batch, sizes in enumerate(([12], [6, 6], [4, 4, 4], [3, 3, 3, 3], [2] * 6)):
        assert_same(models, data(seed=batch), torch.tensor(sizes))
    report = tunecompile.report(models[0])
    assert report.compiles <= 3 and has(report, "given-up", reason="loop-over-list"), report


@pytest.mark.parametrize("kind, few", [(Cut, False), (CutOnce, True)])
def test_a_layer_that_is_cut_into_many_pieces_runs_eagerly(kind, few):
    """From the first forward behind a backward pass on: until then a repetition may come, which is as its forward was."""
    models = pair(lambda: Stack(kind))
    for batch in range(4):
        for model in models:
            model.zero_grad()
            inputs = [data(12 + batch, seed).requires_grad_() for seed in range(2)]
            losses = [checkpoint(model, x, use_reentrant=False).square().mean() for x in inputs]
            assert batch or not find(models[0], "ran-eagerly")
            sum(losses).backward()
        for ours, theirs in zip(*(model.parameters() for model in models)):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)
    report = tunecompile.report(models[0])
    eager = find(report, "ran-eagerly", reason="too-many-pieces")
    assert few or (
        report.compiles <= compile_limits.PIECES and [note.fields["times"] for note in eager] == [" 12 times"]
    )
    assert not few or (report.compiles == 4 and not find(report, "ran-eagerly", "given-up")), report


@pytest.mark.parametrize("names, few", [("abab", True), ("abcd", False)])
def test_layers_that_differ_by_a_text(names, few):
    """Two of them are two graphs, and two more for changing sizes."""
    models = [Stack(Named) for _ in range(2)]
    for model in models:
        model.layers.extend(copy.deepcopy(model.layers[0]) for _ in range(2))
        for layer, name in zip(model.layers, names):
            layer.name = name
            layer.linears = model.layers[0].linears
    tunecompile.optimize(models[0], executor="eager")
    for batch in range(3):
        assert_same(models, data(12 + batch))
    report = tunecompile.report(models[0])
    assert report.compiles == (4 if few else 3) and few is not has(report, "ran-eagerly", reason="texts-differ"), report


@pytest.mark.parametrize(
    "guard, batches",
    [
        ("layer.scale == 0.5  # forward", 3),
        ("layer.count == -2", 3),
        ("KeyError on layer.scaling['other']", 6),
        ("not G['kept']", 6),
        ("len(___stack0[0]) == 2", 1),
        ("len(kwargs) == 4", 6),
        ("len(layer.adapters) == 4", 6),
        ("tensor 'args[0]' size mismatch at index 0. expected 4, actual 3", 6),
        ("(511 + s0*s1) // 512 != 1", 6),
        ("___stack0 >= self.chance", 6),
    ],
)
def test_at_how_many_batches_a_guard_may_fail(guard, batches):
    history = History()
    assert [history.too_often(batch, guard if batch else "") is None for batch in range(6)] == [
        batch < batches for batch in range(6)
    ]
    assert history.too_often(0, guard) is None  # of another layer, at a batch at which it was compiled


def test_a_graph_of_too_many_operations(monkeypatch):
    monkeypatch.setenv("TUNECOMPILE_NODES", "60")
    models = pair(lambda: Stack(Long))
    assert_same(models, data(6))
    assert tunecompile.report(models[0]).compiles == 1 and not find(models[0], "given-up")
    assert_same(models, data(40))
    assert tunecompile.report(models[0]).compiles == 1 and has(models[0], "too-many-nodes", limit=60)


def test_a_compilation_that_takes_too_long(monkeypatch):
    monkeypatch.setenv("TUNECOMPILE_SECONDS", "0.0001")
    models = pair(lambda: Stack(Layer))
    for length in (12, 20):
        assert_same(models, data(length))
    assert tunecompile.report(models[0]).compiles == 1 and has(models[0], "given-up", reason="too-slow-to-compile")


def test_a_trace_that_takes_too_long(monkeypatch):
    monkeypatch.setattr(compile_limits, "TRACE", 0.5)
    models = pair(lambda: Stack(Endless))
    assert_same(models, data(12))
    begin = time.perf_counter()
    assert_same(models, data(20))
    took = time.perf_counter() - begin
    assert took < 6, took
    assert has(models[0], "not-traceable", detail="it came to no end in time")
    begin = time.perf_counter()
    assert_same(models, data(20))
    assert time.perf_counter() - begin < took / 4  # it is not traced once more


def test_a_compilation_without_an_end(monkeypatch):
    monkeypatch.setattr(compile_limits, "TRACE", 0.5)
    monkeypatch.setattr(compile_limits, "AGAIN", 0.2)
    monkeypatch.setenv("TUNECOMPILE_SECONDS", "0.0001")
    for way in ("_attempt", "_compile_plain"):
        monkeypatch.setattr(Backend, way, lambda *_: [time.sleep(0.01) for _ in range(10_000)])
    models = pair(lambda: Stack(Layer))
    assert_same(models, data())
    assert has(models[0], "not-compiled", detail="it came to no end in time")


def test_the_bound_of_a_trace_that_ended():
    """Errors are raised in the middle of whatever a thread does: none may come later."""
    for _ in range(20):
        bound = compile_limits.Bound(0.05)
        with contextlib.suppress(compile_limits.TooLong):
            time.sleep(0.05)
            bound.end()
        bound.end()
    time.sleep(0.05)


def test_progress_is_logged(caplog):
    models = pair(lambda: Stack(Layer))
    with caplog.at_level(logging.INFO, logger="tunecompile"):
        assert_same(models, data())
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 and all("layers_Layer (region 1 of 1)" in line for line in told), told
    report = tunecompile.report(models[0])
    assert report.regions[0].seconds > 0 and report.to_dict()["regions"][0]["seconds"] > 0
