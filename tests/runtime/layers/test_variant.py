"""What a variant notes of a graph as it is compiled; nothing is compiled."""

import contextlib
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from torch import fx

from tests.support.notes import has
from tunecompile.compiler.backend import WEIGHTS_UNREAD
from tunecompile.notes import note
from tunecompile.runtime.compile_limits import CompileEffort, History
from tunecompile.runtime.layers import variant
from tunecompile.runtime.step.rows_refused import RowsRefused
from tunecompile.runtime.watch.traced_graph import also_watching


@pytest.fixture
def compile_once(monkeypatch):
    """Compile a graph as a variant does, whose backend makes contexts that ran these passes.

    broken: why Dynamo ended the graph; refused: whether the region may compile no more.
    """

    met = []

    def run(*ran, before=(), reason=None, broken=None, refused=False, **state):
        courses, unread, traced, contexts = [], [], [], [SimpleNamespace(ran=each) for each in before]
        timed = CompileEffort.timed

        @contextlib.contextmanager
        def noted(effort):
            with timed(effort) as course:
                courses.append(course)
                yield course

        def compiled(gm, inputs, goes_on):
            assert inputs == [] and goes_on is False and traced == [1]
            contexts.extend(SimpleNamespace(ran=each) for each in ran)
            unread.append(gm.meta[WEIGHTS_UNREAD])
            return gm.forward

        monkeypatch.setattr(CompileEffort, "timed", noted)
        monkeypatch.setattr(variant, "recompile_reason", lambda: reason)
        monkeypatch.setattr(variant, "current_frame", lambda: 0)
        monkeypatch.setattr(variant, "stores_tensors", lambda own: False)
        monkeypatch.setattr(variant, "forget_specialized", lambda: traced.append("forgotten"))
        effort = CompileEffort("layers", nodes=0 if refused else 100)
        backend = type("Backend", (), {"contexts": contexts, "__call__": staticmethod(compiled)})()
        made = SimpleNamespace(
            **dict(graphs=0, batch=0, breaks=[], recompiles=[], contexts=[], integers_change=False),
            **dict(histories=defaultdict(History), effort=effort, backend=backend, _traced=lambda: traced.append(1)),
            end_trace=lambda: None,
            **{"flat": False, "unread": False, "collects": 0, "shares": False, "own": (), "keys": None, **state},
        )
        gm = fx.symbolic_trace(torch.nn.Tanh())
        if broken is not None:
            gm.compile_subgraph_reason = SimpleNamespace(graph_break=broken[1], reason=broken[0], user_stack=[])
        with also_watching(met.append):
            assert torch.equal(variant.Variant.compile(made, gm, [])(torch.ones(2)), torch.ones(2).tanh())
        assert traced == ([1] if refused else [1, "forgotten"])
        return made, courses[0] if courses else None, unread

    return run


CASES = {
    "planned": ([["plan"]], True),
    "in two pieces": ([["plan"], []], True),
    "lowered": ([["plan", "lower"]], False),
    "one piece lowered": ([["lower"], ["plan"]], False),
    "by no pass": ([], False),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("before", [[], [["lower"]], [["plan"]]])
def test_code_that_was_not_lowered_is_of_a_cache(compile_once, name, before):
    """Of a graph that no pass saw, nothing is known. Earlier graphs of the backend's do not count."""
    ran, cached = CASES[name]
    made, course, _ = compile_once(*ran, before=before)
    assert course.cached is cached and [context.ran for context in made.contexts] == ran and made.graphs == 1


@pytest.mark.parametrize(
    "reason, guard",
    [
        ("0/1: flag is False", "flag is False"),
        ("0/1: scale == 2  # a line\n0/0: x == 3", "scale == 2  # a line"),
        (None, ""),
    ],
)
def test_why_a_graph_is_compiled_again(compile_once, reason, guard):
    made, _, _ = compile_once(["plan"], reason=reason)
    assert made.recompiles == [guard] * bool(reason) and made.integers_change is ("==" in guard)
    assert made.histories[0].integers == ("==" in guard)


def test_a_long_guard_is_cut(compile_once):
    made, _, _ = compile_once(["plan"], reason="0/1: " + "x" * 300)
    assert made.recompiles == ["x" * 200]


def test_a_graph_that_is_refused_runs_as_it_was_traced(compile_once):
    """But not on rows of documents: the batch begins anew, with its padding."""
    made, course, unread = compile_once(["plan"], refused=True)
    assert course is None and unread == [] and made.contexts == [] and made.graphs == 1
    with pytest.raises(RowsRefused) as caught:
        compile_once(["plan"], refused=True, flat=True)
    assert has([caught.value.reason], "runs-eagerly")


@pytest.mark.parametrize("unread", [False, True])
@pytest.mark.parametrize(
    "reason, breaks", [(None, []), (("a return", False), []), (("a print\nand more", True), ["a print"])]
)
def test_attention_weights_are_read_by_the_next_piece(compile_once, unread, reason, breaks):
    """Nothing is known of what comes behind a break of the graph."""
    made, _, found = compile_once(["plan"], broken=reason, unread=unread)
    assert made.breaks == breaks and found == [unread and not breaks]


def test_rows_of_documents_are_compiled_whole_and_by_tokens(compile_once, monkeypatch):
    told, asked = [None, note("mixes-tokens", "a sum")], []
    monkeypatch.setattr(
        variant, "why_not_token_wise", lambda gm, unread, collected, shares: asked.append(unread) or told.pop(0)
    )
    monkeypatch.setattr(variant, "specialize_floats", lambda gm: asked.append("floats"))
    compile_once(["plan"], flat=True, unread=True)
    assert asked == ["floats", True]
    with pytest.raises(RowsRefused) as caught:
        compile_once(["plan"], flat=True)
    assert has([caught.value.reason], "mixes-tokens") and told == []
    with pytest.raises(RowsRefused) as caught:
        compile_once(["plan"], flat=True, broken=("a print", True))
    assert has([caught.value.reason], "has-graph-breaks")
