"""The torch.compile backend of one region: recognize, then compile with plan and lowering hooked in."""

from __future__ import annotations

import logging
from typing import Callable, Literal, Sequence

import torch
from torch.fx import GraphModule

from tunecompile import _torch
from tunecompile.canonical import canonicalize
from tunecompile.graphs import Replays
from tunecompile.partition import Lowering, Partitioner
from tunecompile.pipeline import Context, Pass, run_stage

log = logging.getLogger("tunecompile")
Executor = Literal["inductor", "eager"]


class Backend:
    """Compiles every graph Dynamo makes of one region under one plan, and remembers what it did in `contexts`.

    `executor` "eager" runs the final graphs op by op instead of compiling them: the same passes without code generation.
    """

    def __init__(self, region: str, passes: Sequence[Pass], executor: Executor = "inductor", checkpoint: bool = False,
                 replays: Replays | None = None, precision: str | None = None):
        self.region, self.passes, self.executor, self.checkpoint = region, tuple(passes), executor, checkpoint
        self.replays, self.precision = replays, precision
        self.contexts: list[Context] = []
        self.failures: list[str] = []

    def __call__(self, gm: GraphModule, inputs: list) -> Callable:
        context = Context(self.region, checkpoint=self.checkpoint, precision=self.precision)
        _torch.specialize_floats(gm)  # patterns bind scales and epsilons as constants
        try:
            compiled = self._compile(gm, inputs, context)
        except _torch.TensorifyScalarRestartAnalysis:  # a request to Dynamo, not a failure
            raise
        except Exception as error:  # the user's training goes on, without us
            self._note("is compiled without rewrites", error)
            try:
                return self._compile_plain(gm, inputs)
            except Exception as second:
                self._note("runs eagerly", second)
                return gm.forward
        self.contexts.append(context)
        return compiled

    def _note(self, what: str, error: Exception) -> None:
        log.debug("compiling %s failed", self.region, exc_info=True)
        lines = str(error).strip().splitlines() or [""]
        self.failures.append(f"{self.region} {what}: {type(error).__name__}: {lines[0][:300]}")
        log.warning("tunecompile: %s", self.failures[-1])

    def _compile_plain(self, gm: GraphModule, inputs: list) -> Callable:
        """As torch.compile would; with checkpointing, the plan still recomputes."""
        plan = [p for p in self.passes if p.stage == "plan"] if self.checkpoint else []
        context = Context(self.region, checkpoint=self.checkpoint)
        compiler = _torch.compile_inductor if self.executor == "inductor" else _torch.compile_eager
        return compiler(_copy(gm), inputs, Lowering((), context), Partitioner(plan, context))

    def _compile(self, gm: GraphModule, inputs: list, context: Context) -> Callable:
        work = _copy(gm)  # the original stays whole, to fall back on
        canonicalize(work)
        run_stage(self.passes, "recognize", work.graph, context)
        work.graph.lint()
        work.recompile()
        lower, partition = Lowering(self.passes, context), Partitioner(self.passes, context)
        compiler = _torch.compile_inductor if self.executor == "inductor" else _torch.compile_eager
        with _torch.preferred_attention(_device_type(inputs)):
            return compiler(work, inputs, lower, partition, self._replay(context, _device_type(inputs)))

    def _replay(self, context: Context, device: str) -> _torch.Wrap | None:
        """Launch-bound graphs are recorded once they run."""
        replays = self.replays
        if replays is None or replays.recorder.device != device:
            return None

        def wrap(run: Callable, kind: str, parameters: Sequence[int]) -> Callable:
            return replays.forward(run, context.outputs, parameters) if kind == "forward" else replays.backward(run)

        return wrap


def _copy(gm: GraphModule) -> GraphModule:
    """Nodes and their metadata anew; fake values are shared. (`deepcopy` would give every copy a fake mode of its own.)"""
    graph = torch.fx.Graph()
    returned = graph.graph_copy(gm.graph, {})
    graph.output(returned)
    work = GraphModule(gm, graph)
    work.meta = dict(gm.meta)
    return work


def _device_type(inputs: list) -> str:
    return next((value.device.type for value in inputs if isinstance(value, torch.Tensor)), "cpu")
