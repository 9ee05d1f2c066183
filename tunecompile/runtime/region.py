"""What is compiled: the repeated layers of a model, each in place, with one compiled variant serving all of them.

A region is compiled through the module's own `_compiled_call_impl` slot (what `module.compile()` fills), so that the model object,
its class, parameters and state dict stay what they were, and hooks, PEFT, Trainer and DDP see the module they know.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Callable, Sequence

import torch
from torch import nn
from torch.fx import GraphModule
from torch.utils.hooks import RemovableHandle

from tunecompile._torch.dynamo import TorchRuntimeError, call_whole, is_compiling, is_full, recompile_reason
from tunecompile._torch.modules import global_hooks, is_of
from tunecompile.compiler.backend import Backend, Executor, Forgotten, own_code
from tunecompile.compiler.partitioner import Decide
from tunecompile.compiler.pass_manager import Context, Pass
from tunecompile.errors import summary
from tunecompile.integrations import context_parallel
from tunecompile.integrations.accelerate import Placement, place
from tunecompile.integrations.bitsandbytes import put_states_back
from tunecompile.integrations.deepspeed import Gathered, gathered
from tunecompile.integrations.fsdp import Unit, unit
from tunecompile.planner.solver import KEEP, RECOMPUTE, Plan
from tunecompile.runtime.cuda_graphs.replay import Replays
from tunecompile.runtime.dynamic_shapes import Sizes, mark_flat, tensors_in
from tunecompile.runtime.force_grad import ask, unasked
from tunecompile.runtime.memory.oom_recovery import sharded
from tunecompile.runtime.memory.weight_cache import Kept
from tunecompile.runtime.module_watch import Inside
from tunecompile.runtime.unpad.unpad import OFFSETS, CannotFlatten, Padding, attends


def _region(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if not torch.compiler.is_dynamo_compiling():  # a constant where Dynamo traces, so this runs only where Dynamo has given up
        layer._compiled_call_impl.note_eager()
    return layer._call_impl(*args, **kwargs)


class Variant:
    """A region under one plan, for one kind of call, with a code object of its own: so that a few kinds of calls (with a mask,
    without a gradient, of one row) and a few adapters do not add up to Dynamo's limit, beyond which layers run eagerly."""

    def __init__(self, name: str, backend: Backend):
        self.backend, self.graphs, self.eager, self.breaks = backend, 0, 0, []
        self.recompiles: list[str] = []
        self.contexts: list[Context] = []
        self.attends = False  #: whether its attention is ours, which knows of offsets
        self.refused = ""  #: why it cannot be traced
        self.full = ""  #: code of the layer's that Dynamo makes no more graphs of, where it made none
        self._compiled = torch.compile(own_code(_region, name), backend=Forgotten(self.compile))

    def call(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The layer's output. Where an op refuses fake tensors, and would take real ones (known_bugs.GROUPED_MM_IN_FP32), by the layer's own code."""
        refused = self.refused
        if not refused:
            try:
                output = call_whole(self._compiled, layer, *args, **kwargs)
                if not self.graphs and (code := getattr(type(layer).forward, "__code__", None)) is not None and is_full(code):
                    self.full = code.co_name
                return output
            except TorchRuntimeError as error:
                refused = str(error).partition(": got ")[2].partition("\n")[0][:200] or summary(error)
        output = layer._call_impl(*args, **kwargs)  # a mistake of the caller's raises here as well, and is forgotten
        layer._compiled_call_impl.note_eager()
        self.refused = refused
        return output

    def compile(self, gm: GraphModule, inputs: list) -> Callable:
        self.graphs += 1
        self.attends = self.attends or attends(gm)
        if (why := recompile_reason()) is not None:
            self.recompiles.append(why.strip().splitlines()[0].partition(": ")[2][:200])  # without the number of the graph
        reason = getattr(gm, "compile_subgraph_reason", None)
        if getattr(reason, "graph_break", False):
            self.breaks.append(_one_line(reason))
        with torch.autograd.graph.saved_tensors_hooks(_same, _same):
            # Passes evaluate what they rewrite. A checkpoint around the layer would count what that saves, and then miss it in
            # the recomputation, which compiles nothing.
            before = len(self.backend.contexts)
            compiled = self.backend(gm, inputs)
            self.contexts += self.backend.contexts[before:]
            return compiled


def _same(value: Any) -> Any:
    return value


def _one_line(reason: Any) -> str:
    """A graph break's reason and the user's line."""
    frame = reason.user_stack[-1] if reason.user_stack else None
    text = str(reason.reason).strip().splitlines()[0][:200]
    return f"{text} at {frame.filename}:{frame.lineno}" if frame else text


SCORING = "without_gradient"  #: in place of a plan
_ENGINES = ("tunecompile.", "torch.distributed.", "accelerate.", "deepspeed.")


@dataclass
class Region:
    """One compiled function for all layers of one structure; a few variants for each plan."""

    name: str
    passes: Sequence[Pass]
    executor: Executor
    replays: Replays | None = None
    precision: str | None = None
    kept: Kept | None = None
    backends: dict[Plan | str | None, Backend] = field(default_factory=dict)
    variants: dict[tuple, Variant] = field(default_factory=dict)
    sizes: Sizes = field(default_factory=Sizes)
    bypassed: bool = False
    refused: Counter[str] = field(default_factory=Counter)  #: why layers have to run as they are -> calls

    def variant(self, plan: Plan | None, kind: tuple, decide: Decide | None = None) -> Variant:
        """The variant for this plan and this kind of call. Where there is no plan yet, `decide` makes it from the graph."""
        found = self._variant(plan, kind, self.name + _suffix(plan), lambda name: Backend(name, self.passes, self.executor, plan, self.replays, self.precision, decide, self.kept))
        if found.backend.plan is None:  # what stands there may be of another device's layers, none of which is trained
            found.backend.decide = decide
        return found

    def scoring(self, kind: tuple) -> Variant:
        """The variant of a forward without gradients: it saves nothing, so no plan, and no recording, is about it."""
        return self._variant(SCORING, kind, f"{self.name}_{SCORING}", lambda name: Backend(name, self.passes, self.executor, precision=self.precision))

    def _variant(self, way: Plan | str | None, kind: tuple, name: str, make: Callable[[str], Backend]) -> Variant:
        key = (way, *kind)
        if key not in self.variants:
            if way not in self.backends:
                self.backends[way] = make(name)
            self.variants[key] = Variant(name, self.backends[way])
        return self.variants[key]

    def settle(self, kind: tuple) -> None:
        """What was compiled before there was a plan goes under the plan that was made of it."""
        backend = self.variants[(None, *kind)].backend
        if backend.plan is None:  # nothing in that layer is trained: no graph of it has shown a backward
            return
        variant = self.variants.pop((None, *kind))
        if self.backends.get(None) is backend:  # another kind of call may have settled it
            del self.backends[None]
        self.backends.setdefault(backend.plan, backend)
        self.variants.setdefault((backend.plan, *kind), variant)

    def notes(self) -> list[str]:
        """What did not run as compiled, or not in one piece."""
        said = [failure for backend in self.backends.values() for failure in backend.failures]
        said += [f"{self.name} is compiled in pieces: {reason}" for variant in self.variants.values() for reason in variant.breaks]
        for variant in self.variants.values():
            if not variant.graphs and not variant.eager:  # its own function ran under Dynamo, but nothing in it could be traced
                why = f"Dynamo's limit of {torch._dynamo.config.recompile_limit} graphs is reached by {variant.full}, which other layers share" if variant.full else \
                    "it is kept from Dynamo (torch.compiler.disable?), or holds nothing to compile"
                said.append(f"{self.name} ran eagerly: {why}")
            if variant.eager:
                why = f"Dynamo could not trace it{variant.refused and f' ({variant.refused})'}" if variant.graphs < torch._dynamo.config.recompile_limit else \
                    f"Dynamo's limit of {torch._dynamo.config.recompile_limit} graphs is reached (layers, adapters or arguments differ too much)"
                said.append(f"{self.name} ran eagerly {variant.eager} times: {why}")
        said += [f"{self.name} ran eagerly {calls} times: {why}" for why, calls in self.refused.items()]
        if self.bypassed:
            said.append(f"{self.name} ran eagerly: its layers were called without the module that owns them, which begins a training step")
        return said


def _suffix(plan: Plan | None) -> str:
    """What tells a plan's variants from those that keep all."""
    if plan is None:
        return ""
    again = "_checkpointed" if plan.recompute is None else f"_recomputes_{'_'.join(map(str, sorted(plan.recompute)))}" if plan.recompute else ""
    return again + (f"_in_{plan.tiles}" if plan.tiles > 1 else "") + ("_keeps_weights" if plan.weights else "") + ("_attention" if plan.attention else "")


class Slot:
    """What stands in a layer's `_compiled_call_impl`: compiled in a training step, the layer as it was otherwise."""

    def __init__(self, step: "Any", layer: nn.Module, region: Region):
        self.step, self.layer, self.region = step, layer, region
        self.place = 0  #: among all layers
        self.checkpoint = False  #: whether the user asks for it
        self.checkpointed_by: Callable | None = None  #: a function of the user's, called with the layer and its arguments by position
        self.padding: Padding | None = None
        self.variant: Variant | None = None
        self.inside: Inside | None = None
        self.placement: Placement | Gathered | Unit | None = None  #: where accelerate put the layer, or what DeepSpeed or FSDP2 gathers for it
        self.states: RemovableHandle | None = None  #: of the hook that gives gathered weights their quantisation state

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or not (scores := self._scores()) and not self._trains() or self._refused():  # the user compiles the whole model: stay out
            return self.layer._call_impl(*args, **kwargs)
        if scores:
            return self._gathered(self._scored, args, kwargs)
        args, kwargs, asking = self.differentiable(args, kwargs)
        output = self._gathered(self._trained, args, kwargs)
        return output if asking is None else unasked(output, asking)

    @property
    def gathers(self) -> bool:
        """Whether FSDP2 gathers the layer, and all that is sent is sent around its call."""
        if self.inside is None:
            self._look_around()
        return isinstance(self.placement, Unit) and self.placement.alone

    def _gathered(self, run: Callable[[tuple, dict], Any], args: tuple, kwargs: dict) -> Any:
        """`run`, between the hooks of FSDP2 if the layer is a unit of its own: whatever has to be repeated there is repeated with gathered weights."""
        return self.placement.around(run, args, kwargs) if isinstance(self.placement, Unit) else run(args, kwargs)

    def _trained(self, args: tuple, kwargs: dict) -> Any:
        if self.checkpointed_by is not None:
            return self.checkpointed_by(lambda *args: self.compiled(args, kwargs), *args)
        recovery = self.step.recovery
        return self.compiled(args, kwargs) if recovery is None else recovery.layer(self, args, kwargs)

    def _scored(self, args: tuple, kwargs: dict) -> Any:
        return self._score(args, kwargs) if self.placement is None else self.placement.call(self._score, args, kwargs)

    def _refused(self) -> bool:
        """Whether accelerate's hooks, or shared attention, do what cannot be compiled."""
        if self.inside is None:
            self._look_around()
        why = self.placement.refused if self.placement is not None else ""
        if not why and context_parallel.is_shared() and (self.padding is None or not context_parallel.can_run_outside(self.padding.owner)):
            why = context_parallel.REFUSED
        self.region.refused.update([why] if why else [])
        return bool(why)

    def _look_around(self) -> None:
        """At the first step, when adapters are in place and devices are chosen."""
        self.placement = place(self.layer) or gathered(self.layer) or unit(self.layer)
        self.states = put_states_back(self.layer)
        if self.region.replays is not None and any(map(sharded, self.layer.parameters())):
            # what is gathered lies elsewhere at every call, and where another layer's weights were; a recorded collective waits for all ranks
            self.region.replays.leave_out(next(self.layer.parameters()).device)
            self.region.replays = None
        self.inside = Inside(self.layer)

    def follow_modules(self) -> None:
        """Adapters may have come into the layer, and hooks with them."""
        if self.inside is not None and self.inside.changed:
            self.inside = Inside(self.layer)

    @property
    def stays(self) -> bool:
        """Whether the layer's weights are its own (FSDP1 takes them away), are where they are, and this process's alone."""
        if self.inside is None:
            self._look_around()
        parameters = list(self.layer.parameters())
        return bool(parameters) and not isinstance(self.placement, (Gathered, Unit)) and not any(map(sharded, parameters))

    def let_go(self) -> None:
        """Undo that."""
        if isinstance(self.placement, Gathered):
            self.placement.let_go()
        if self.states is not None:
            self.states.remove()

    @property
    def budget(self) -> Any:
        """What gives the layer its plan, if anything does."""
        return self.step.budget_of(self)

    @property
    def device(self) -> torch.device | None:
        """Where the layer's weights are; None where accelerate keeps them elsewhere between calls."""
        return next((parameter.device for parameter in self.layer.parameters() if not parameter.is_meta), None)

    def compiled(self, args: tuple, kwargs: dict, finish: Callable = _same) -> Any:
        """The layer's call; `finish` sees its output while what the layer saves is still looked after."""
        if self.placement is not None:
            return self.placement.call(lambda args, kwargs: self._compiled(args, kwargs, finish), args, kwargs)
        return self._compiled(args, kwargs, finish)

    def _compiled(self, args: tuple, kwargs: dict, finish: Callable) -> Any:
        return self._marked(kwargs, lambda mark: self._run(args, kwargs, mark, finish))

    def _marked(self, kwargs: dict, run: Callable[[Callable], Any]) -> Any:
        """`run`, given what marks the sizes that may change: others where the batch comes without its padding."""
        return self._flattened(run) if OFFSETS in kwargs else run(self.region.sizes.mark)

    def _run(self, args: tuple, kwargs: dict, mark: Callable, finish: Callable) -> Any:
        kind, sizes = self._kind(args, kwargs, mark)
        budget = self.budget
        if self.region.kept is not None:
            self.region.kept.enter(self.place)
        if budget is None:
            self.variant = self.region.variant(RECOMPUTE if self.checkpoint else KEEP, kind)
            return self.step.telling(lambda: self._call(args, kwargs))
        option = budget.option(self, math.prod(sizes))
        self.variant = self.region.variant(option and option.plan, kind, budget.decide)
        try:
            with budget.around(self):
                output = self._call(args, kwargs)
                budget.ran(self, output)
                return finish(output)
        finally:
            if option is None:
                self.region.settle(kind)

    def _kind(self, args: tuple, kwargs: dict, mark: Callable) -> tuple[tuple, tuple[int, ...]]:
        """What calls of one variant share, and the batch's sizes, which are marked as what may change."""
        tensors = list(tensors_in(args, kwargs))
        sizes = Sizes.of(tensors)
        mark(tensors, sizes)
        return (torch.is_grad_enabled(), context_parallel.is_shared(), self._hooked(), *(size == 1 for size in sizes), *((where, t.dtype, t.requires_grad) for where, t in tensors)), sizes

    def _score(self, args: tuple, kwargs: dict) -> Any:
        """A forward without gradients."""
        def run(mark: Callable) -> Any:
            self.variant = self.region.scoring(self._kind(args, kwargs, mark)[0])
            return self._call(args, kwargs)

        return self._marked(kwargs, run)

    def _call(self, args: tuple, kwargs: dict) -> Any:
        with context_parallel.outside(self.padding):
            return self.variant.call(self.layer, *args, **kwargs)

    def differentiable(self, args: tuple, kwargs: dict) -> tuple[tuple, dict, Any]:
        """The arguments, with hidden states that require a gradient, and the node that was made for that."""
        return ask(self.layer, args, kwargs)

    def _flattened(self, run: Callable[[Callable], Any]) -> Any:
        """Of a batch without its padding. Nothing but attention may mix tokens, so what is compiled has to contain it."""
        try:
            with self.padding.attention():  # a checkpoint around the layer recomputes it when the owner's call is long over
                output = run(lambda tensors, sizes: mark_flat(tensors, sizes[1]))
            if not self.variant.attends:
                raise CannotFlatten("its layers do not call attention by transformers' attention interface")
            return output
        except CannotFlatten:
            self.region.variants = {key: variant for key, variant in self.region.variants.items() if variant is not self.variant}
            raise

    def _hooked(self) -> tuple:
        """The code of all hooks that are called inside. Dynamo traces those it finds, and has no guard against others that come later."""
        of_all = global_hooks()
        if not of_all and not any(self.inside.hooks):
            return ()
        return tuple(getattr(hook, "__code__", type(hook)) for hooks in (*of_all, *self.inside.hooks) for hook in hooks.values())

    @property
    def watched(self) -> bool:
        """Whether a hook sees what is inside, and may keep it: others than those of engines, which put the layer's weights in place."""
        return self.inside.collected or any(not is_of(hook, _ENGINES) for hooks in (*global_hooks(), *self.inside.hooks) for hook in hooks.values())

    def _trains(self) -> bool:
        if torch._C._current_graph_task_id() != -1:
            # A checkpoint around the layer recomputes it. Other forwards (evaluation, a reference model) may have run since the
            # one it repeats, so the step's flag says nothing here.
            return self.layer.training and torch.is_grad_enabled()
        if not self.step.active and not self.step.entered and self.layer.training and torch.is_grad_enabled():
            self.region.bypassed = True
        return self.step.active

    def _scores(self) -> bool:
        return self.step.scoring and self.layer.training and not torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1

    def note_eager(self) -> None:
        if self.variant is not None:
            self.variant.eager += 1


LARGE = 256 << 20  #: bytes of hidden states in fp32, from which on a norm outside the layers is compiled: eager code holds several such copies


class NormSlot(Slot):
    """What stands in the `_compiled_call_impl` of a norm outside the layers: of a long batch it is compiled in a training step. It has no plan."""

    budget = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden = next((tensor for _, tensor in tensors_in(args, kwargs)), None)
        if is_compiling() or not self.step.active or not torch.is_grad_enabled() or hidden is None or 4 * hidden.numel() < LARGE \
                or self._refused():
            return self.layer._call_impl(*args, **kwargs)
        return self._gathered(self.compiled, args, kwargs)
