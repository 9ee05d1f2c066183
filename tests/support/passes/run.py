"""Capture a function as Dynamo sees it, run recognise passes on it, and compare results and gradients."""

from __future__ import annotations

from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch.fx import Graph

from tests.support.passes.captured import captured_or_none
from tunecompile._torch.fake_tensors import copied
from tunecompile.compiler.backend import Backend
from tunecompile.compiler.pass_manager import Context, run_stage
from tunecompile.ir.canonicalize import canonicalize
from tunecompile.ir.nodes import is_barrier
from tunecompile.ir.op import OPS
from tunecompile.passes import PIPELINE

#: False in the further cases of a parametrised test of passes, but for `make test-all` (tests/passes/conftest.py)
whole_backend: ContextVar[bool] = ContextVar("whole_backend", default=True)


def family(*names: str):
    """The recognise passes by name, in the order of the pipeline."""
    return [p for p in PIPELINE if p.name in names]


@dataclass
class Seen:
    """What the passes made of the graphs of one function."""

    ops: Counter = field(default_factory=Counter)
    graphs: list[Graph] = field(default_factory=list)
    contexts: list[Context] = field(default_factory=list)

    @property
    def refused(self) -> list[str]:
        return [reason for c in self.contexts for t in c.tallies for reason in t.refused]


def count(graph: Graph) -> Counter:
    return Counter(OPS[node.target].name for node in graph.nodes if node.target in OPS)


def assert_told(context: Context) -> None:
    """Passes that changed a graph say so, and none rewrote more than it found."""
    for tally in context.tallies:
        assert 0 <= tally.rewritten <= tally.found, tally
    told = {tally.family for tally in context.tallies if tally.rewritten}
    changed = {change.name for change in context.changes}
    assert changed <= told, f"{changed - told} changed the graph and tell nothing"


def unread(graph: Graph) -> set[str]:
    """Calls whose results nothing reads, but for those that do more than compute."""
    calls = [node for node in graph.nodes if node.op in ("call_function", "call_method")]
    return {node.name for node in calls if not node.users and not is_barrier(node)}


def recognize(passes, gm, context: Context, tidy: bool = False) -> None:
    """Run recognise passes, which say what they did. `tidy`: they leave no call behind whose result nothing reads."""
    before = unread(gm.graph)
    run_stage(passes, "recognize", gm.graph, context)
    gm.graph.lint()
    assert_told(context)
    left = unread(gm.graph) - before
    assert not (tidy and left), f"{left} are left over"


class Recorder:
    """A backend that canonicalises, recognises, checks the graph, checks that a second run changes nothing, and interprets it."""

    def __init__(self, passes):
        self.passes, self.seen = passes, Seen()

    def __call__(self, gm, inputs):
        work = copied(gm)
        canonicalize(work)
        context = Context("test")
        recognize(self.passes, work, context)
        work.recompile()
        bare = [node.name for node in work.graph.nodes if node.target in OPS and "example_value" not in node.meta]
        assert not bare, f"guards of later passes find no value at {bare}"
        before = str(work.graph)
        canonicalize(work)
        run_stage(self.passes, "recognize", work.graph, Context("again"))
        assert str(work.graph) == before, "a second run changes the graph"
        self.seen.ops += count(work.graph)
        self.seen.graphs.append(work.graph)
        self.seen.contexts.append(context)
        return work.forward


def results(fn, args, parameters=(), rows=()):
    """Outputs, then gradients of all inputs that require one, of a loss in which every element has its own weight."""
    leaves = [a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in args]
    inputs = [a.view_as(a) if isinstance(a, torch.Tensor) and a.requires_grad else a for a in leaves]
    for dim in rows:
        torch._dynamo.mark_dynamic(inputs[0], dim)
    for p in parameters:
        p.grad = None
    out = fn(*inputs)
    outs = list(out) if isinstance(out, (tuple, list)) else [out]
    loss = sum(
        (o.double() * torch.cos(torch.arange(o.numel(), dtype=torch.float64)).reshape(o.shape)).sum()
        for o in outs
        if o.is_floating_point()
    )
    if loss.requires_grad:
        loss.backward()
    grads = [t.grad for t in leaves if isinstance(t, torch.Tensor)] + [p.grad for p in parameters]
    return [o.detach() for o in outs], grads


def assert_same(got, expected, tol):
    for i, (g, e) in enumerate(zip(got, expected, strict=True)):
        assert (g is None) == (e is None), f"{i}: one has a gradient, the other has none"
        if e is not None:
            assert (g.shape, g.dtype) == (e.shape, e.dtype), (
                f"{i}: {g.dtype} {tuple(g.shape)} instead of {e.dtype} {tuple(e.shape)}"
            )
            off = ((g.double() - e.double()).norm() / e.double().norm().clamp_min(1e-12)).item()
            assert off <= tol, f"{i}: relative error {off:.1e}"


def check(fn, *args, passes, expect=None, tol=1e-5, parameters=(), dynamic=None, rows=(), whole=None) -> Seen:
    """Run eagerly, through the passes alone, and through the whole backend; all must agree. `expect`: ops in the graph.
    `rows`: dims of the first argument that are symbols; `dynamic=True` makes all sizes and floats symbols.
    `whole`: whether it goes through the whole backend, AOTAutograd included; by default as `whole_backend` says,
    and where that says no, Dynamo captures what symbols do not tell, and nothing else."""
    by_dynamo = whole is not None or whole_backend.get() or bool(rows) or dynamic is not None
    whole = whole_backend.get() if whole is None else whole
    expected = results(fn, args, parameters)
    recorder = Recorder(passes)
    backends = [recorder]
    if whole:
        backends.append(Backend("test", PIPELINE, "eager"))
    running = 0
    torch._dynamo.reset()

    def by_turns(gm, inputs):  # Dynamo traces once for all of them
        compiled = [backend(gm, inputs) for backend in backends]
        return lambda *values: compiled[running](*values)

    gm = None if by_dynamo else captured_or_none(fn, args)
    compiled = torch.compile(fn, backend=by_turns, dynamic=dynamic) if gm is None else by_turns(gm, args)
    for running in range(len(backends)):
        got = results(compiled, args, parameters, rows)
        assert_same(got[0] + got[1], expected[0] + expected[1], tol)
    assert not whole or not backends[1].failures, backends[1].failures
    if expect is not None:
        assert dict(recorder.seen.ops) == expect, (dict(recorder.seen.ops), recorder.seen.refused)
    return recorder.seen


def random(*shape, dtype=torch.float32, grad=True, scale=1.0):
    return (torch.randn(shape) * scale).to(dtype).requires_grad_(grad)
