"""The torch.compile backend of one region: recognize, then compile with plan and lowering hooked in."""

from __future__ import annotations

import contextlib
import logging
import types
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, Protocol

import torch
from torch.fx import GraphModule

from tunecompile._torch import known_bugs
from tunecompile._torch.cuda import attention_order
from tunecompile._torch.dynamo import TensorifyScalarRestartAnalysis, current_frame, specialize_floats
from tunecompile._torch.inductor import Keep, Wrap, compile_eager, compile_inductor
from tunecompile._torch.triton_analysis import analyses_answered_by
from tunecompile.compiler import attention_backend
from tunecompile.compiler.compile_cache import in_turn
from tunecompile.compiler.graph_dump import GraphDump
from tunecompile.compiler.graph_snapshot import replacements, snapshot
from tunecompile.compiler.kernel_access_cache import AccessCache
from tunecompile.compiler.partitioner import Decide, Lowering, Partitioner, copied
from tunecompile.compiler.pass_manager import Context, Pass, live, run_stage
from tunecompile.compiler.weight_layout import FusedWeightSlots, give_matrices
from tunecompile.errors import summary
from tunecompile.ir.canonicalize import canonicalize
from tunecompile.planner.solver import KEEP, Plan

log = logging.getLogger("tunecompile")
Executor = Literal["inductor", "eager"]


class GraphRecorder(Protocol):
    """What records launch-bound graphs and replays them: `runtime.cuda_graphs` has it."""

    @property
    def device(self) -> str:
        """The type of device whose graphs are recorded."""
        ...

    def forward(self, run: Callable, outputs: int, parameters: Sequence[int]) -> Callable:
        """What to run in place of a compiled forward. parameters: positions of its inputs that are parameters."""
        ...

    def backward(self, run: Callable) -> Callable:
        """The same of its backward."""
        ...


class WeightProvider(Protocol):
    """What hands weights to graphs in the layout that their products read: `runtime.memory.weight_cache` has it."""

    moves: bool | None  #: whether dense weights may move into one matrix; None before that is decided

    def forward(self, run: Callable, positions: Sequence[FusedWeightSlots]) -> Callable:
        """What to run in place of a compiled forward that reads such weights."""
        ...

    def backward(self, run: Callable, positions: Sequence[FusedWeightSlots]) -> Callable:
        """The same of its backward."""
        ...


class Backend:
    """Compiles every graph Dynamo makes of one region under one plan, and remembers what it did in `contexts`.

    A `plan` that is None is made by `decide` from the first graph that has a backward, and kept. `executor` "eager" runs the final graphs
    op by op instead of compiling them: the same passes without code generation.
    """

    def __init__(
        self,
        region: str,
        passes: Sequence[Pass],
        executor: Executor = "inductor",
        plan: Plan | None = KEEP,
        replays: GraphRecorder | None = None,
        precision: str | None = None,
        decide: Decide | None = None,
        kept: WeightProvider | None = None,
    ):
        self.region, self.passes, self.executor, self.plan = region, tuple(passes), executor, plan
        self.replays, self.precision, self.decide, self.kept = replays, precision, decide, kept
        self.contexts: list[Context] = []
        self.failures: list[str] = []
        self.accesses = AccessCache()

    def __call__(self, gm: GraphModule, inputs: list) -> Callable:
        specialize_floats(gm)  # patterns bind scales and epsilons as constants
        try:
            return self._attempt(gm, inputs)
        except TensorifyScalarRestartAnalysis:  # a request to Dynamo, not a failure
            raise
        except Exception as error:  # the user's training goes on, without us
            if (compiled := self._without_packages(gm, inputs, error)) is not None:
                return compiled
            self._note("is compiled without rewrites", error)
            try:
                return self._compile_plain(gm, inputs)
            except Exception as second:
                self._note("runs eagerly", second)
                return gm.forward

    def _attempt(self, gm: GraphModule, inputs: list) -> Callable:
        moves = self.kept is not None and bool(self.kept.moves)
        context = Context(
            self.region,
            self.plan or KEEP,
            self.precision,
            dump=GraphDump.begin(self.region),
            frame=current_frame(),
            moves=moves,
        )
        compiled = self._compile(gm, inputs, context)
        self.contexts.append(context)
        if self.plan is None and context.outputs:
            self.plan, self.decide = context.plan, None  # Dynamo keeps backends for good, and `decide` knows the model
        return compiled

    def _without_packages(self, gm: GraphModule, inputs: list, error: Exception) -> Callable | None:
        """What another package's pass left may fail long after it. The first without which the region compiles is switched off, else all of them."""
        guests = [p for p in live(self.passes) if p.package is not None]
        for suspects in [*([p] for p in guests), *([guests] if len(guests) > 1 else [])]:
            for p in suspects:
                p.package.failed[p.name] = f"{self.region} does not compile with it: {summary(error)}"
            try:
                compiled = self._attempt(gm, inputs)
            except Exception:
                for p in suspects:
                    p.package.failed.pop(p.name)
                continue
            for p in suspects:
                log.warning("tunecompile: %s", p.package.said(p.name))
            return compiled
        return None

    def _note(self, what: str, error: Exception) -> None:
        log.debug("compiling %s failed", self.region, exc_info=True)
        self.failures.append(f"{self.region} {what}: {summary(error)}")
        log.warning("tunecompile: %s", self.failures[-1])

    def _compile_plain(self, gm: GraphModule, inputs: list) -> Callable:
        """As torch.compile would; with checkpointing, the plan still recomputes."""
        plan = (
            [p for p in self.passes if p.stage == "plan" and p.package is None] if self.plan not in (None, KEEP) else []
        )
        context = Context(self.region, self.plan or KEEP)
        compiler = compile_inductor if self.executor == "inductor" else compile_eager
        return compiler(copied(gm), inputs, Lowering((), context), Partitioner(plan, context))

    def _compile(self, gm: GraphModule, inputs: list, context: Context) -> Callable:
        work = copied(gm)  # the original stays whole, to fall back on
        before = context.look("recognize", work.graph)
        canonicalize(work)
        context.look("recognize", work.graph, "canonicalize", before)
        context.before = snapshot(work.graph)
        with replacements(work) as took:
            run_stage(self.passes, "recognize", work.graph, context)
        context.after = snapshot(work.graph, took)
        work.graph.lint()
        work.recompile()
        lower, partition = (
            Lowering(self.passes, context),
            Partitioner(self.passes, context, self.decide if self.plan is None else None),
        )
        compiler = compile_inductor if self.executor == "inductor" else compile_eager
        if self.executor == "inductor" and _device_type(inputs) == "cuda" and known_bugs.MIX_ORDER_REDUCTION.present:
            context.notes.append(str(known_bugs.MIX_ORDER_REDUCTION))
        with self._attention(gm, inputs, context), analyses_answered_by(self.accesses.answer):
            return compiler(
                work,
                inputs,
                lower,
                partition,
                self._replay(context, _device_type(inputs)),
                self._keep(context),
                cached=self.plan is not None and not self.plan.weights and not context.moves and context.cached,
                turn=partial(in_turn, lower.uuid),
            )

    def _attention(self, gm: GraphModule, inputs: list, context: Context) -> contextlib.AbstractContextManager:
        """Under which attention's kernel is chosen, while the graph is traced."""
        choice = attention_backend.choose(gm, _device_type(inputs))
        if choice is None:
            return contextlib.nullcontext()
        context.attention, context.attention_ms, context.attention_rate = choice.order, dict(choice.times), choice.rate
        if choice.why:
            context.notes += [f"attention of {self.region}: {choice.why}", *attention_backend.notes()]
        return attention_order(choice.order)

    def _keep(self, context: Context) -> Keep | None:
        """Graphs under a plan that keeps weights read them from elsewhere."""
        if self.kept is None:
            return None
        kept = weakref.ref(self.kept)

        def keep(gm: GraphModule, inputs: list, kind: str) -> Callable | None:
            if not (positions := give_matrices(gm, context.kept, inputs)):
                return None
            return lambda run: kept().forward(run, positions) if kind == "forward" else kept().backward(run, positions)

        return keep

    def _replay(self, context: Context, device: str) -> Wrap | None:
        """Launch-bound graphs are recorded once they run."""
        replays = self.replays
        if replays is None or replays.device != device:
            return None

        def wrap(run: Callable, kind: str, parameters: Sequence[int]) -> Callable:
            return replays.forward(run, context.outputs, parameters) if kind == "forward" else replays.backward(run)

        return wrap


def own_code(function: Callable, name: str) -> Callable:
    """A copy of a function with its own code object: Dynamo's cache, and its limit of eight graphs, sits on the code object."""
    return types.FunctionType(function.__code__.replace(co_name=name), function.__globals__, name)


class WeakBackend:
    """A backend that Dynamo may hold for ever, as it does with every backend it was given, without holding the model."""

    def __init__(self, method: Callable):
        self.method = weakref.WeakMethod(method)

    def __call__(self, gm: GraphModule, inputs: list) -> Callable:
        method = self.method()
        return gm.forward if method is None else method(gm, inputs)


def _device_type(inputs: list) -> str:
    return next((value.device.type for value in inputs if isinstance(value, torch.Tensor)), "cpu")
