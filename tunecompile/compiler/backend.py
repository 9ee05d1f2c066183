"""The torch.compile backend of one region: recognize, then compile with the plan and lower stages hooked in."""

from __future__ import annotations

import contextlib
import logging
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol, TypeVar

import torch
from torch.fx import GraphModule

from tunecompile._torch import known_bugs
from tunecompile._torch.card import has_bfloat16
from tunecompile._torch.cuda import attention_order
from tunecompile._torch.dynamo import TensorifyScalarRestartAnalysis, current_frame, specialize_floats
from tunecompile._torch.fake_tensors import copied
from tunecompile._torch.generation.late_kernels import InductorError
from tunecompile._torch.inductor import Keep, Wrap, compile_eager, compile_inductor
from tunecompile._torch.triton_analysis import analyses_answered_by
from tunecompile.compiler import attention_backend
from tunecompile.compiler.compile_cache import in_turn
from tunecompile.compiler.graph_dump import GraphDump
from tunecompile.compiler.graph_snapshot import replacements, snapshot
from tunecompile.compiler.kernel_access_cache import ACCESSES
from tunecompile.compiler.partitioner import Look, Lowering, Partitioner
from tunecompile.compiler.pass_manager import Context, Pass, live, run_stage
from tunecompile.compiler.weight_layout import FusedWeightSlots, give_matrices
from tunecompile.errors import summary
from tunecompile.ir.canonicalize import canonicalize
from tunecompile.ir.streams import return_contiguous
from tunecompile.notes import Note, note
from tunecompile.planner.solver import KEEP, Plan

log = logging.getLogger("tunecompile")
Executor = Literal["inductor", "eager"]
WEIGHTS_UNREAD = "tunecompile.weights_unread"  #: in the metadata of a graph, for `Context.weights_unread`


class GraphRecorder(Protocol):
    """Records launch-bound graphs and replays them; `runtime.cuda_graphs` implements it."""

    @property
    def device(self) -> str:
        """The type of device whose graphs are recorded."""
        ...

    def forward(self, run: Callable, outputs: int, parameters: Sequence[int]) -> Callable:
        """The callable to run in place of a compiled forward.

        Args:
            run: the compiled forward.
            outputs: its results without those saved for the backward.
            parameters: positions of its inputs that are parameters.
        """
        ...

    def backward(self, run: Callable) -> Callable:
        """The callable to run in place of the compiled backward of the last forward."""
        ...

    def link(self, run: Callable) -> Callable:
        """The callable to run in place of a compiled graph of layers, with both."""
        ...


class WeightProvider(Protocol):
    """Gives weights to graphs in the layout that their products read; `runtime.memory.weight_cache` implements it."""

    def forward(self, run: Callable, positions: Sequence[FusedWeightSlots]) -> Callable:
        """The callable to run in place of a compiled forward that reads weights at these positions."""
        ...

    def backward(self, run: Callable, positions: Sequence[FusedWeightSlots]) -> Callable:
        """The callable to run in place of a compiled backward that reads weights at these positions."""
        ...


class Backend:
    """Compiles every graph that Dynamo makes of one region under one plan, and reports into `contexts`.

    Args:
        region: its name.
        passes: a pipeline.
        executor: "eager" runs the final graphs op by op: the same passes without code generation.
        plan: of the layer, until `look` makes one.
        replays: records and replays graphs, if any are.
        precision: a lower precision that the user allows.
        kept: gives weights to graphs, if any are cached.
        look: sees the first joint graph that is made, and may make the plan.
        backward: whether code is generated for backwards; without, forwards are those of training all the same.
    """

    def __init__(
        self,
        region: str,
        passes: Sequence[Pass],
        executor: Executor = "inductor",
        plan: Plan = KEEP,
        replays: GraphRecorder | None = None,
        precision: str | None = None,
        kept: WeightProvider | None = None,
        look: Look | None = None,
        backward: bool = True,
    ):
        self.region, self.passes, self.executor, self.plan = region, tuple(passes), executor, plan
        self.replays, self.precision, self.kept = replays, precision, kept
        self.look, self.backward = look, backward
        self.contexts: list[Context] = []
        self.failures: list[Note] = []

    def __call__(self, gm: GraphModule, inputs: list, floats_change: bool = False) -> Callable:
        """Compile one graph.

        Args:
            gm: of Dynamo.
            inputs: its fake inputs.
            floats_change: whether floats of the host change from batch to batch. They stay symbols, and patterns that
                bind them do not match.
        """
        if without_bfloat16(inputs):
            self.failures.append(note("not-compiled", self.region, note("gpu-without-bfloat16")))
            return gm.forward
        if not floats_change:
            specialize_floats(gm)  # patterns bind scales and epsilons as constants
        try:
            return self._attempt(gm, inputs)
        except TensorifyScalarRestartAnalysis:  # a request to Dynamo, not a failure
            raise
        except Exception as error:  # the user's training goes on without these passes
            attempt = partial(self._attempt, gm, inputs)
            if isinstance(error, InductorError) and (compiled := self._uncombined(gm, inputs, error)) is not None:
                return compiled
            if (compiled := without_packages(self.region, self.passes, error, attempt)) is not None:
                return compiled
            self._note("compiled-without-rewrites", error)
            try:
                return self._compile_plain(gm, inputs)
            except Exception as second:
                self._note("not-compiled", second)
                return gm.forward

    def _uncombined(self, gm: GraphModule, inputs: list, error: Exception) -> Callable | None:
        """Compile with all passes, and no kernels joined: Inductor's scheduler has had faults there.

        Returns:
            None if that fails, too.
        """
        try:
            compiled = self._attempt(gm, inputs, combine=False)
        except TensorifyScalarRestartAnalysis:
            raise
        except Exception:
            return None
        self._note("kernels-not-combined", error)
        return compiled

    def _attempt(self, gm: GraphModule, inputs: list, combine: bool = True) -> Callable:
        """Compile with all passes.

        Raises:
            Exception: any, of a pass or of torch's compiler.
        """
        context = Context(
            self.region,
            self.plan,
            self.precision,
            dump=GraphDump.begin(self.region),
            frame=current_frame(),
            weights_unread=gm.meta.get(WEIGHTS_UNREAD, False),
        )
        compiled = self._compile(gm, inputs, context, combine)
        context.traced.clear()  # they hold fake values
        self.contexts.append(context)
        if context.outputs:
            self.look = None
        replays = self.replays
        return compiled if replays is None or replays.device != _device_type(inputs) else replays.link(compiled)

    def _note(self, code: str, error: Exception) -> None:
        """Log a failure, and keep it for the report."""
        log.debug("compiling %s failed", self.region, exc_info=True)
        self.failures.append(note(code, self.region, summary(error)))
        log.warning("tunecompile: %s", self.failures[-1])

    def _compile_plain(self, gm: GraphModule, inputs: list) -> Callable:
        """Compile as torch.compile does. The plan still recomputes where the model's own checkpointing does."""
        plan = [p for p in self.passes if p.stage == "plan" and p.package is None] if self.plan != KEEP else []
        context = Context(self.region, self.plan)
        compiler = compile_inductor if self.executor == "inductor" else compile_eager
        return compiler(copied(gm), inputs, Lowering((), context), Partitioner(plan, context))

    def _compile(self, gm: GraphModule, inputs: list, context: Context, combine: bool) -> Callable:
        """Run the recognize stage on a copy, then compile it with the other stages hooked in."""
        work = copied(gm)  # the original stays as it is, to fall back on
        before = context.record("recognize", work.graph)
        canonicalize(work)
        context.record("recognize", work.graph, "canonicalize", before)
        context.before = snapshot(work.graph)
        with replacements(work) as took:
            run_stage(self.passes, "recognize", work.graph, context)
        return_contiguous(work.graph)
        context.after = snapshot(work.graph, took)
        work.graph.lint()
        work.recompile()
        lower, partition = Lowering(self.passes, context), Partitioner(self.passes, context, self.look)
        compiler = compile_inductor if self.executor == "inductor" else compile_eager
        if self.executor == "inductor" and _device_type(inputs) == "cuda" and known_bugs.MIX_ORDER_REDUCTION.present:
            fault = known_bugs.MIX_ORDER_REDUCTION
            context.notes.append(note("known-bug", fault.package, str(fault)))
        with choosing_attention(gm, inputs, context), analyses_answered_by(ACCESSES.answer):
            return compiler(
                work,
                inputs,
                lower,
                partition,
                self._replay(context, _device_type(inputs)),
                self._keep(context),
                cached=self.look is None and not self.plan.weights and context.cached,
                turn=partial(in_turn, lower.uuid),
                combine=combine,
                backward=self.backward,
            )

    def _keep(self, context: Context) -> Keep | None:
        """The hook by which graphs read cached weights in place of their inputs; None without a cache."""
        if self.kept is None:
            return None
        kept = weakref.ref(self.kept)

        def keep(gm: GraphModule, inputs: list, kind: str) -> Callable | None:
            if not (positions := give_matrices(gm, context.kept, inputs)):
                return None
            provider = kept()
            assert provider is not None  # it belongs to the model that is being compiled
            method = provider.forward if kind == "forward" else provider.backward
            return lambda run: method(run, positions)

        return keep

    def _replay(self, context: Context, device: str) -> Wrap | None:
        """The hook that puts the recorder around compiled graphs; None where none is recorded."""
        replays = self.replays
        if replays is None or replays.device != device:
            return None

        def wrap(run: Callable, kind: str, parameters: Sequence[int]) -> Callable:
            return replays.forward(run, context.outputs, parameters) if kind == "forward" else replays.backward(run)

        return wrap


def choosing_attention(gm: GraphModule, inputs: list, context: Context) -> contextlib.AbstractContextManager:
    """A context that sets the order of attention kernels while the graph is traced."""
    choice = attention_backend.choose(gm, _device_type(inputs))
    if choice is None:
        return contextlib.nullcontext()
    context.attention, context.attention_ms, context.attention_rate = choice.order, dict(choice.times), choice.rate
    if choice.why:
        context.notes += [note("attention-kernel", context.region, choice.why), *attention_backend.notes()]
    return attention_order(choice.order)


T = TypeVar("T")


def without_packages(region: str, passes: Sequence[Pass], error: Exception, attempt: Callable[[], T]) -> T | None:
    """`attempt`, which ended in `error`, without the other package's pass at fault: its graph may fail long after it.

    The first pass without which the attempt succeeds is switched off, else all of them. None where that does not help.
    """
    guests = [(p.package, p.name) for p in live(passes) if p.package is not None]
    for suspects in [*([guest] for guest in guests), *([guests] if len(guests) > 1 else [])]:
        for package, name in suspects:
            package.failed[name] = note("does-not-compile-with-it", region, summary(error))
        try:
            result = attempt()
        except Exception:
            for package, name in suspects:
                package.failed.pop(name)
            continue
        for package, name in suspects:
            log.warning("tunecompile: %s", package.describe_failure(name))
        return result
    return None


def own_code(function: Callable, name: str) -> Callable:
    """A copy of a function with a code object of its own, since Dynamo caches by code object, eight graphs at most."""
    return types.FunctionType(function.__code__.replace(co_name=name), function.__globals__, name)


@dataclass
class CompiledAs:
    """What code depends on beside the code that it is compiled of and what Dynamo guards.

    It knows no model: Dynamo holds every backend for ever.
    """

    region: object  #: an object of its own
    setting: object  #: an object for what a call's kind has that Dynamo has no guard for
    plan: Plan | str | None = None  #: None until it is made


class WeakBackend:
    """A backend without a strong reference to the model, since Dynamo holds every backend for ever.

    Where a layer breaks into pieces, these are functions that several variants of its region call. Dynamo runs a piece
    as an equal backend compiled it, and so compiles it once for all variants that are compiled alike. (It compares
    backends by `==`: `_TorchCompileWrapper` and torch/csrc/dynamo/extra_state.cpp.)
    """

    def __init__(self, method: Callable, compiled_as: CompiledAs | None = None):
        self.method, self.compiled_as = weakref.WeakMethod(method), compiled_as

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, WeakBackend):
            return self is other
        mine, theirs = self.compiled_as, other.compiled_as
        return mine is not None and mine.plan is not None and mine == theirs

    def __hash__(self) -> int:
        return hash(WeakBackend if self.compiled_as is None else id(self.compiled_as.region))

    def __call__(self, gm: GraphModule, inputs: list) -> Callable:
        method = self.method()
        return gm.forward if method is None else method(gm, inputs)


def without_bfloat16(inputs: list) -> bool:
    """Whether there are bfloat16 tensors on a GPU that lacks it: Inductor refuses these only behind all passes."""
    half = (each for each in inputs if isinstance(each, torch.Tensor) and each.dtype == torch.bfloat16)
    return any(not has_bfloat16(each.device) for each in half)


def _device_type(inputs: list) -> str:
    """The type of device of the first tensor."""
    return next((value.device.type for value in inputs if isinstance(value, torch.Tensor)), "cpu")
