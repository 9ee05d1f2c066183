"""How much may be compiled for one region: batches that a function is compiled at, the size of a graph, and time."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from threading import Event, Lock, Thread, get_ident
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from tunecompile._torch import dynamo
from tunecompile.notes import Note, note

log = logging.getLogger("tunecompile")

BATCHES = 3  #: at which one function is compiled: at the first, for changing sizes, and once more
PIECES = 5  #: functions that a layer with graph breaks is cut into; a loop over a list of experts makes so many
TEXTS = 2  #: that may differ from layer to layer: two graphs for each, one of which takes any size
NUMBERS = 4  #: compilations for numbers that differ from layer to layer, behind which floats are symbols
NODES = 5000  #: of a graph; the layer of a mixture of experts has a few hundred
SECONDS = 600.0  #: that one compilation may take: it ends, and further ones of its region are not begun
LEAVES = 5.0  #: seconds of compilation whose leftovers are worth a collection
SLOW = 60.0  #: seconds from which on a compilation is worth a warning
TRACE = 60.0  #: seconds that Dynamo may take to trace one graph
AGAIN = 10.0  #: seconds until what went on is ended once more

#: a guard on the length of a local list: its reader is a loop that Dynamo unrolls. (Arguments of a call are no such
#: list, and neither are modules.)
_LIST = re.compile(r"len\((?!kwargs|args)[^().]*\) == \d+")
#: a guard on a number of the host's, for which there is no symbol. (Others part calls in few kinds, with a graph for
#: each: ranges of sizes, adapters that are switched, flags.)
_NUMBER = re.compile(r"^(?!len\().* == -?[\d.]+(e[+-]?\d+)?$")
#: a guard on a text, for which there is no symbol either
_TEXT = re.compile(r"^.* == '[^']*'$")
_INTEGER = re.compile(r"^(?!len\().* == -?\d+$")


def _expression(guard: str) -> str:
    """A guard without the line that it is of."""
    return guard.partition("  ")[0].strip()


def _setting(name: str, default: float) -> float:
    return float(os.environ.get(name) or default)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Inside, Python's cycle collector does not run by itself, and Dynamo does not run it.

    Compilation makes objects by the million that live until it ends: the collector would go through all of them, and
    through those of imported packages, again and again. That was a seventh of the first step. `Leftovers` goes once:
    behind a long one they are old objects, since the collector would go through young ones at the next object.
    """
    if not gc.isenabled():  # inside another one, or the user's choice
        yield
        return
    begun = time.monotonic()
    gc.disable()
    try:
        with dynamo.uncollected():
            yield
    finally:
        if time.monotonic() - begun >= LEAVES and gc.get_freeze_count() == 0:  # else the user's would be thawed
            gc.freeze()
            gc.unfreeze()
        gc.enable()


@dataclass
class Leftovers:
    """What compilations leave behind. Python's collector goes through all objects there are once these are many more
    than at its last time: that was a step of three times the others (0.5 s, 1B under TRL). It may as well do so
    in a step that compiled.
    """

    seconds: float = 0.0  #: of the compilations whose leftovers are gone

    def collect(self, seconds: float) -> None:
        """Between two batches, where compilations have taken so many seconds by now."""
        if seconds - self.seconds < LEAVES:
            return
        self.seconds = seconds
        if gc.isenabled():
            gc.collect()


@dataclass
class Course:
    """Of one compilation."""

    cached: bool = False  #: whether no code was generated


class TooLong(dynamo.TorchRuntimeError):
    """A graph was traced or compiled for longer than it may. Sympy takes minutes over some comparisons of sizes."""

    def __init__(self) -> None:
        super().__init__("it came to no end in time")


class Bound:
    """Raises `TooLong` in the thread that it was made in, after so many seconds, unless that ends it before.

    No other thread or process could go on with the work, whose end may be minutes away in one call of Python code.
    """

    def __init__(self, seconds: float):
        self.thread, self.lock, self.ended = ctypes.c_ulong(get_ident()), Lock(), Event()
        Thread(target=self._watch, args=(seconds,), daemon=True).start()

    def _watch(self, seconds: float) -> None:
        while not self.ended.wait(seconds):  # some code goes on behind any error
            with self.lock:
                if not self.ended.is_set():
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(self.thread, ctypes.py_object(TooLong))
            seconds = AGAIN

    def end(self) -> None:
        """The work has ended: an error that was not raised yet is not raised any more."""
        while True:
            try:
                with self.lock:
                    self.ended.set()
                # An error that waits is raised at a jump, so here. Taking it back would leave its flag: calls under a
                # debugger would look for it without end (Python 3.11).
                for _ in range(2):
                    pass
                return
            except TooLong:
                pass


@dataclass
class CompileEffort:
    """The compilations of one region: what they took, and whether a further one is allowed."""

    region: str
    number: tuple[int, int] = (1, 1)  #: of the region, and how many there are
    nodes: int = field(default_factory=lambda: int(_setting("TUNECOMPILE_NODES", NODES)))
    limit: float = field(default_factory=lambda: _setting("TUNECOMPILE_SECONDS", SECONDS))
    seconds: float = 0.0  #: of all compilations
    longest: float = 0.0  #: seconds of one
    refused: dict[str, Note] = field(default_factory=dict)  #: one note for each reason's code
    #: why all calls would be more graphs than they are worth, once a backward pass of one came: they run eagerly
    eager: Note | None = None

    def refuse(self, gm: GraphModule, history: History, batch: int, guard: str, pieces: int = 1) -> Callable | None:
        """What runs a graph operation by operation; None where it is to be compiled.

        Args:
            gm: the graph.
            history: of the function that it is of.
            batch: the number of the batch.
            guard: the one whose failure led to this compilation; empty the first time.
            pieces: functions that the layer is cut into, as far as is known.
        """
        many = note("too-many-pieces", limit=PIECES) if pieces > PIECES else history.too_many_texts(batch, guard)
        why = many or self._too_large(gm) or self._too_slow() or history.too_often(batch, guard)
        if why is None:
            return None
        self.refused.setdefault(why.code, note("given-up", self.region, why))
        return gm.forward if many is None else self._until_backward(gm.forward, many)

    def _until_backward(self, forward: Callable, why: Note) -> Callable:
        """`forward`. Once a backward pass comes, calls of the region run by the layer's own code.

        Not before: a checkpoint may repeat an earlier call, and its repetition has to run as that did.
        """

        def stop(_: Any) -> None:
            self.eager = why

        def run(*args: Any) -> Any:
            outputs = forward(*args)
            for output in pytree.tree_leaves(outputs):
                if isinstance(output, torch.Tensor) and output.requires_grad and self.eager is None:
                    output.register_hook(stop)
            return outputs

        return run

    def _too_large(self, gm: GraphModule) -> Note | None:
        count = sum(len(module.graph.nodes) for module in gm.modules() if isinstance(module, GraphModule))
        return note("too-many-nodes", count=count, limit=self.nodes) if count > self.nodes else None

    def _too_slow(self) -> Note | None:
        if self.longest <= self.limit:
            return None
        return note("too-slow-to-compile", seconds=round(self.longest), limit=round(self.limit))

    def trace_bound(self) -> Bound:
        """Of a trace that begins now. Who allows more seconds to compilations allows more to their traces, too."""
        return Bound(max(TRACE, self.limit * TRACE / SECONDS))

    @contextlib.contextmanager
    def bounded(self) -> Iterator[None]:
        """Around one compilation, which ends in `TooLong` behind its limit: its graph runs operation by operation."""
        bound = Bound(max(TRACE, self.limit))
        try:
            yield
        finally:
            bound.end()

    @contextlib.contextmanager
    def timed(self) -> Iterator[Course]:
        """Around one compilation: it is told as it begins and ends."""
        place, begin, course = "region {} of {}".format(*self.number), time.perf_counter(), Course()
        tell(logging.INFO, f"compiling {self.region} ({place})")
        try:
            with uncollected():
                yield course
        finally:
            took = time.perf_counter() - begin
            self.seconds, self.longest = self.seconds + took, max(self.longest, took)
            code = ", code from Inductor's cache" if course.cached else ""
            level = logging.WARNING if took > SLOW else logging.INFO
            tell(level, f"{self.region} ({place}) compiled in {took:.1f} s{code}")


def tell(level: int, text: str) -> None:
    """Log a line, and show it in a terminal whose user would otherwise wait without knowing what for.

    A logger that shows no warnings shows none of these. Of several ranks of a machine the first one tells.
    """
    log.log(level, "tunecompile: %s", text)
    waits = not log.isEnabledFor(level) and log.isEnabledFor(logging.WARNING)
    if waits and sys.stderr.isatty() and os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"tunecompile: {text}", file=sys.stderr, flush=True)


@dataclass
class History:
    """At which batches one function was compiled."""

    batches: set[int] = field(default_factory=set)
    numbers: int = 0  #: compilations for numbers of the host's that earlier graphs have as constants
    integers: int = 0  #: those among them for integers
    #: guards on texts that failed, by the batch
    texts: defaultdict[int, set[str]] = field(default_factory=lambda: defaultdict(set))

    @property
    def goes_on(self) -> bool:
        """Whether floats of the host's are symbols from now on.

        Changing sizes are not the reason why it is compiled, which are symbols from the second batch on; or more layers
        have a number of their own than Dynamo makes graphs.
        """
        return len(self.batches) >= BATCHES or self.numbers >= NUMBERS

    def too_often(self, batch: int, guard: str) -> Note | None:
        """Why it is not compiled at this batch.

        A model compiles once for each kind of its layers at the first batch, and as often at the second, where sizes
        become symbols. What goes on compiling for numbers of the host's would do so for ever. (Of other kinds there may
        be more, up to Dynamo's limit.)
        """
        known, guard = batch in self.batches or not self.batches, _expression(guard)
        if not known and _LIST.match(guard):
            return note("loop-over-list", detail=guard)
        if not known and len(self.batches) >= BATCHES and _NUMBER.match(guard):
            return note("compiled-too-often", detail=guard, limit=BATCHES)
        self.batches.add(batch)
        return None

    def too_many_texts(self, batch: int, guard: str) -> Note | None:
        """Whether layers differ by a text, so that each would be a graph of its own. (Of adapters that are switched,
        a batch has one.)
        """
        if _TEXT.match(guard := _expression(guard)):
            self.texts[batch].add(guard)  # once: Dynamo may trace anew for the same
        return note("texts-differ", detail=guard) if len(self.texts[batch]) > TEXTS else None

    def add(self, guard: str) -> None:
        """It was compiled, since this guard failed."""
        self.numbers += _NUMBER.match(_expression(guard)) is not None
        self.integers += _INTEGER.match(_expression(guard)) is not None
