"""One compiled function of a region: under one plan, for one kind of call."""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from tunecompile._torch import known_bugs
from tunecompile._torch.dynamo import (
    TorchRuntimeError,
    call_whole,
    current_frame,
    forget_specialized,
    forget_with,
    integers_may_change,
    is_full,
    recompile_reason,
    remainders_as_constants,
    running,
    specialize_floats,
    tell_of_traces,
)
from tunecompile._torch.modules import call_original, slot_of
from tunecompile._torch.stored_tensors import stores_tensors
from tunecompile.compiler.backend import WEIGHTS_UNREAD, Backend, CompiledAs, WeakBackend, own_code
from tunecompile.compiler.pass_manager import Context
from tunecompile.compiler.token_wise.graph import (
    IMAGE_OFFSETS,
    ROW_OFFSETS,
    ROWS,
    is_told_of_images,
    why_not_token_wise,
)
from tunecompile.errors import summary
from tunecompile.integrations.kernel_functions import BOUNDARIES, BOUNDS, DOCUMENTS
from tunecompile.notes import Note, note
from tunecompile.runtime.compile_limits import Bound, CompileEffort, History, uncollected
from tunecompile.runtime.layers.replaced_weights import given_views_of_replaced
from tunecompile.runtime.layers.unused_results import UnreadKeys, without_gradients_of_unused, without_unread_keys
from tunecompile.runtime.step.rows_refused import RowsRefused, refusing
from tunecompile.runtime.unpad.flat_batch import BOUNDS_BESIDE, IMAGE_BOUNDS, LONGEST_IMAGE, OFFSETS, is_filled_up
from tunecompile.runtime.unpad.image_bounds import without_bounds
from tunecompile.runtime.unpad.traced_mask import with_document_mask
from tunecompile.runtime.watch.traced_graph import TracedGraph, also_watching, meet


def layer_call(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The layer's output, by its own code: what Dynamo traces."""
    told = kwargs
    if LONGEST_IMAGE in told or BOUNDS_BESIDE in told:
        kwargs = without_bounds(told)
    if (
        not torch.compiler.is_dynamo_compiling()
    ):  # a constant where Dynamo traces, so this runs only behind Dynamo's limit
        if OFFSETS in kwargs or is_filled_up(told):
            raise RowsRefused(note("runs-eagerly"))
        meet(None)
        slot_of(layer).note_eager()
    offsets = kwargs.get(ROW_OFFSETS, kwargs.get(OFFSETS))
    rows = tuple(kwargs[name] for name in ROWS) if ROW_OFFSETS in kwargs else None
    args, kwargs = with_document_mask(args, kwargs)
    if LONGEST_IMAGE in told:
        return _by_bounds(layer, told, args, kwargs)
    if offsets is None:
        offsets = _given_bounds(args, told)
    if offsets is None:
        return call_original(layer, *args, **kwargs)
    DOCUMENTS.offsets, DOCUMENTS.rows = offsets, rows
    try:
        return call_original(layer, *args, **kwargs)
    finally:
        DOCUMENTS.offsets = DOCUMENTS.rows = None


def _given_bounds(args: tuple, kwargs: dict) -> torch.Tensor | None:
    """Where documents of a packed row begin, as a collator says. Few models hand it on to all that needs it."""
    hidden = args[0] if args else kwargs.get("hidden_states")
    bounds = kwargs.get(BOUNDARIES, kwargs.get(BOUNDS_BESIDE))
    if isinstance(hidden, torch.Tensor) and isinstance(bounds, torch.Tensor) and hidden.shape[0] == 1:
        return bounds
    return None


def _by_bounds(layer: nn.Module, told: dict, args: tuple, kwargs: dict) -> Any:
    BOUNDS.given, BOUNDS.offsets, BOUNDS.longest = told[IMAGE_BOUNDS], told[IMAGE_OFFSETS], told[LONGEST_IMAGE].shape[0]
    try:
        return call_original(layer, *args, **kwargs)
    finally:
        BOUNDS.given = BOUNDS.offsets = BOUNDS.longest = None


class Variant:
    """A region under one plan, for one kind of call, with a code object of its own.

    So a few kinds of calls (with a mask, without a gradient, of one row) and a few adapters do not add up to Dynamo's
    limit of graphs for a code object, beyond which layers run eagerly.
    """

    def __init__(
        self,
        name: str,
        backend: Backend,
        effort: CompileEffort,
        compiled_as: CompiledAs,
        flat: bool = False,
        guards: Callable[[Sequence[Any]], list[bool]] | None = None,
        unread: bool = False,
        keys: UnreadKeys | None = None,
    ):
        """
        compiled_as: pieces that a variant with an equal one has compiled serve this one, too.
        guards: which of Dynamo's guards count, as torch.compile's option `guard_filter_fn`; None for all.
        """
        self.flat = flat  #: whether it runs on rows of documents
        self.unread = unread  #: whether attention weights that it returns are not read
        self.keys = keys  #: where its layers keep keys
        self.compiled_as = compiled_as
        self.integers_change = (
            False  #: whether a module's integer made a second graph: from the third on it is a symbol
        )
        self.ran = False  #: whether any compiled graph ran in it, which may be another variant's
        self.backend, self.graphs, self.eager, self.breaks = backend, 0, 0, []
        self.effort, self.histories = effort, defaultdict(History)  #: by the number of the function
        self.collects = 0  #: how many values of modules inside the call that runs has collected
        self.shares = False  #: whether rows share tokens in the call that runs
        self.own: Collection[int] = ()  #: ids of containers that the call that runs may put rows into
        self.batch = 0  #: the number of the batch that runs
        self.recompiles: list[str] = []
        self.contexts: list[Context] = []
        self.refused = ""  #: why it cannot be traced
        self.full = ""  #: code of the layer's that Dynamo makes no more graphs of, where it made none
        self.bound: Bound | None = None  #: of the trace under way
        tell_of_traces(_begin_trace, _end_trace)
        function = own_code(layer_call, name)
        self._traced = forget_with(self, function.__code__)
        options = None if guards is None else {"guard_filter_fn": guards}
        self._compiled = torch.compile(function, backend=WeakBackend(self.compile, compiled_as), options=options)

    @property
    def is_one_graph(self) -> bool:
        """Whether its calls run one graph each, as far as is known."""
        return not (self.breaks or self.refused)

    def call(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The layer's output. By the layer's own code, where an op refuses fake tensors that it would take real
        (known_bugs.GROUPED_MM_IN_FP32)."""
        refused = self.refused
        if not refused:
            try:
                output = self._run(layer, *args, **kwargs)
                if (
                    not (self.graphs or self.ran)
                    and (code := getattr(type(layer).forward, "__code__", None)) is not None
                    and is_full(code)
                ):
                    self.full = code.co_name
                return output
            except TorchRuntimeError as error:
                refused = str(error).partition(": got ")[2].partition("\n")[0][:200] or summary(error)
            finally:
                self.end_trace()
        if self.flat or is_filled_up(kwargs):
            raise RowsRefused(note("runs-eagerly"))
        meet(None)
        output = call_original(
            layer, *args, **without_bounds(kwargs)
        )  # a mistake of the caller's raises here as well, and is forgotten
        slot_of(layer).note_eager()
        self.refused = refused
        return output

    def _run(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.ran and not self.integers_change:  # nearly always: contexts would take longer than the rest
            return call_whole(self._compiled, layer, *args, **kwargs)
        with (
            contextlib.nullcontext() if self.ran else also_watching(self._met),
            contextlib.nullcontext() if self.ran else uncollected(),
            integers_may_change() if self.integers_change else contextlib.nullcontext(),
        ):
            return call_whole(self._compiled, layer, *args, **kwargs)

    def _met(self, graph: TracedGraph | None) -> None:
        self.ran |= graph is not None

    def end_trace(self) -> None:
        """Dynamo has traced the call, or ended early: what comes now may take its time."""
        if self.bound is not None:
            self.bound.end()
            self.bound = None

    def compile(self, gm: GraphModule, inputs: list) -> Callable:
        self.end_trace()
        self._traced()
        if self.flat and stores_tensors(self.own):  # rows, where the model would look for batches
            return refusing(note("output-holds-more"))
        self.graphs += 1
        why = recompile_reason()
        guard = why.strip().splitlines()[0].partition(": ")[2][:200] if why is not None else ""
        history = self.histories[current_frame()]
        refused = self.effort.refuse(gm, history, self.batch, guard, len(self.histories))
        if refused is not None:
            if self.flat:
                return refusing(note("runs-eagerly"))
            return _told(gm, refused, note("runs-eagerly"))
        reason = getattr(gm, "compile_subgraph_reason", None)
        if getattr(reason, "graph_break", False):
            self.breaks.append(_one_line(reason))
        mixes = None
        if self.integers_change and known_bugs.REMAINDERS_OF_SYMBOLS.present:
            remainders_as_constants(gm)
        if self.flat:
            specialize_floats(gm)  # may restart Dynamo's analysis, which comes back here
        if self.flat or is_told_of_images(gm):
            why_not = functools.partial(why_not_token_wise, gm, self.unread, self.collects, self.shares)
            mixes = note("has-graph-breaks") if self.breaks else why_not()
        if self.flat and mixes is not None:
            return refusing(mixes)
        gm.meta[WEIGHTS_UNREAD] = self.unread and not self.breaks  # which the next piece may read
        with _saving_here():
            before = len(self.backend.contexts)
            with self.effort.timed() as course, self.effort.bounded():
                compiled = self.backend(gm, inputs, history.goes_on)
                made = self.backend.contexts[before:]
                course.cached = bool(made) and not any("lower" in context.ran for context in made)
            forget_specialized()
        if why is not None:
            self.recompiles.append(guard)  # without the number of the graph
            history.add(guard)
            self.integers_change |= history.integers > 0
        self.contexts += self.backend.contexts[before:]
        compiled = with_copies(without_unread_keys(self.keys, gm, compiled), inputs)
        return _told(gm, compiled, mixes, alone=not self.breaks)


def _begin_trace(_: Any) -> None:
    """The stack says of which variant: a step pays nothing for it."""
    if (traced := running(Variant._run)) is not None:
        traced.bound = traced.effort.trace_bound()


def _end_trace(_: Any) -> None:
    if (traced := running(Variant._run)) is not None:
        traced.end_trace()


def _told(gm: GraphModule, compiled: Callable, mixes: Note | None = None, alone: bool = True) -> Callable:
    """`compiled`, before whose calls `meet` is called."""
    graph, compiled = TracedGraph.of(gm, mixes, alone), without_gradients_of_unused(gm, compiled)
    if not alone:
        compiled = given_views_of_replaced(compiled)

    def run(*args: Any) -> Any:
        meet(graph)
        return compiled(*args)

    return run


def with_copies(compiled: Callable, inputs: list) -> Callable:
    """`compiled`, which gets copies of inference tensors where gradients are computed.

    Autograd refuses to save these. Eager code saves what it computes from them, a compiled graph may save the inputs.
    Zero points of HQQ are inference tensors. (Dynamo guards a tensor's dispatch keys, and so whether it is one.)
    """
    places = {i for i, value in enumerate(inputs) if isinstance(value, torch.Tensor) and value.is_inference()}
    if not places or not torch.is_grad_enabled():
        return compiled
    return lambda *args: compiled(*(value.clone() if i in places else value for i, value in enumerate(args)))


@contextlib.contextmanager
def _saving_here() -> Iterator[None]:
    """Tensors that autograd saves inside are kept here, and dropped at the end.

    Passes evaluate what they rewrite, and AOTAutograd traces. A checkpoint around the layer would count the tensors
    saved meanwhile, and miss them in the recomputation, which compiles nothing. A hook that handed the tensors back to
    autograd would never let go of outputs: they hold the node that saves them.
    """
    kept: list[torch.Tensor] = []

    def pack(value: torch.Tensor) -> int:
        kept.append(value)
        return len(kept) - 1

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, kept.__getitem__):
            yield
    finally:
        kept.clear()


def unchanged(value: Any) -> Any:
    """The value itself: a layer's output where nothing has to be done with it."""
    return value


def _one_line(reason: Any) -> str:
    """A graph break's reason and the user's line."""
    frame = reason.user_stack[-1] if reason.user_stack else None
    text = str(reason.reason).strip().splitlines()[0][:200]
    return f"{text} at {frame.filename}:{frame.lineno}" if frame else text
