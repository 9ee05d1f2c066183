"""Layers that follow each other are replayed as one forward and one backward, while nobody looks in between.

A layer's own recording (`recorded_graph`) still costs the host a walk through autograd, a launch and copies for each
layer. So the calls of layers are watched: where the same ones follow each other in pass after pass (`chain`), they are
recorded together. The first call of a pass then replays all of them. Those that follow are compared with what was
replayed, and return at once, a tensor without values in place of a result that was never written
(`tunecompile.runtime.layers.between`). Where a call is another one, or somebody looks, the layers before it run again,
one by one, and the pass goes on as if nothing had been replayed.

(8B QLoRA under TRL on an H200: one by one, layers took the host 80 to 130 ms of a batch of 400 tokens.)
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from sys import getrefcount
from threading import get_ident
from typing import Any, Protocol

import torch
from torch import Tensor

from tunecompile._torch.autograd import no_autocast
from tunecompile.errors import summary
from tunecompile.notes import Note, note
from tunecompile.runtime.cuda_graphs.chain import DIFFERED, Call, Chain, Link, itself, key_of, result_of, shape_of
from tunecompile.runtime.cuda_graphs.launch_bound import Clock
from tunecompile.runtime.cuda_graphs.recorded_graph import MAX_SHAPES, Replays, recordable, unrecorded
from tunecompile.runtime.cuda_graphs.recording import device_of
from tunecompile.runtime.cuda_graphs.stack_pass import Pass, Replayed, ShapeOfChain, settle, versions
from tunecompile.runtime.cuda_graphs.stack_recording import StackRecording

AGREED = 1  #: passes like the first one, from which on a chain is recorded
UNUSED = 200  #: passes of other chains, after which one is forgotten
#: of the device's memory that a chain's recordings may take beside blocks that are too small for the largest. Each time
#: these are given back, all its shapes are recorded anew: 18 of 31 recordings in 60 steps of short rows
IN_BLOCKS = 0.125
MAX_BROKEN = 8  #: passes that were replayed in vain, from which on a chain is left alone


class Owner(Replays, Protocol):
    """What recordings of one model share: `replay.GraphReplays`."""

    failures: list[Note]

    def room(self, inputs: Sequence[Any], needed: int = 0, layers: int = 0) -> bool:
        """Whether recordings of so many layers may take so many bytes more, as far as is known."""
        ...

    def buffer(self, graph: Any, position: int, like: Tensor) -> Tensor:
        """A buffer for an input."""
        ...

    def forget_buffers(self, graph: Any) -> None:
        """Drop those of a graph."""
        ...


class Stacks:
    """The chains of one model's layers, and their recordings."""

    def __init__(self, shared: Owner):
        self.shared = shared
        self.chains: dict[tuple, Chain] = {}
        self.starts: set[tuple] = set()  #: calls that differ from pass to pass in what they are given
        self.broken: Counter[tuple] = Counter()  #: passes that were replayed in vain, by their first call
        self.watched: Pass | None = None
        self.replayed: Replayed | None = None  #: the pass under way
        self.ended: tuple[Any, Replayed] | None = None  #: what was passed in a pass that ended early, and that pass
        self.joins = False  #: whether the layer that runs may be part of a stack
        self.thread = 0  #: whose layers are watched: that of the first
        self.arguments: Sequence[Tensor] = ()  #: of that layer
        #: whether layers are not recorded one by one yet: they may be together soon
        self.learns = False
        self.apart: set[tuple] = set()  #: calls that do more than return a result, and are in no stack
        self.recorded = self.passes = 0
        #: Python's, to the result of the last call that is compared: by its outputs, a variable and the question
        self.references = 0

    @contextlib.contextmanager
    def joining(self, arguments: Sequence[Tensor] = ()) -> Iterator[None]:
        """Inside, a layer runs between which and the next one nothing is hidden; with these tensors among its
        arguments.
        """
        self.joins, self.arguments = True, arguments
        try:
            yield
        finally:
            self.joins, self.arguments = False, ()

    def link(self, run: Callable[..., Any]) -> Link:
        """A compiled graph of layers, as it is called from now on."""
        return Link(run, self.call)

    def call(self, link: Link, inputs: Sequence[Any]) -> Any:
        """The outputs of a link's call."""
        if self.thread != get_ident():
            return link.run(*inputs)
        if self.replayed is not None:
            if self.joins and self.replayed.follows(link, inputs):
                return [self._go_on(self.replayed)]
            inputs = self._leave(self.replayed, inputs, link)
        if not self.joins or self.shared.paused or not torch.is_grad_enabled():
            self._finish()
            self.learns = False
            return link.run(*inputs)
        key = key_of(link, inputs)
        if self.watched is None or key in self.starts or not self.watched.goes_on(inputs):
            self._finish()
            return self._begin(link, inputs, key)
        outputs, wrote = self._run(link, inputs) if self.watched.learns else (link.run(*inputs), False)
        self.watched.add(link, inputs, result_of(outputs))
        self.watched.apart |= {key} if wrote else set()
        return outputs

    @property
    def learnt(self) -> Tensor | None:
        """The result of the call that ran last, where it is compared with those of other passes."""
        return self.watched.previous() if self.watched is not None and self.watched.learns else None

    def refuse(self) -> None:
        """The layer that ran last does more than return its result: it is no part of a stack."""
        if self.watched is not None:
            self.watched.apart.add(self.watched.calls[-1].key)

    def result(self, under_way: Replayed, calls: int, leave: Callable[[Tensor], Tensor] = itself) -> Tensor:
        """What so many calls of a pass give, at which somebody looks: it goes on layer by layer.

        leave: what is returned of it.
        """
        is_first = self.replayed is under_way
        if is_first:
            self._break(under_way)
        with self._as_layers_run():
            made = leave(under_way.result(calls))
        if is_first:  # no backward of this pass will
            settle([late for late in under_way.late if (held := late()) is not None and held.calls != calls])
        return made

    def begin(self, arguments: Sequence[Any]) -> bool:
        """Before a layer's call: let go of a pass that was left, by an error, say, where this is none of its layers.

        Returns:
            Whether the call is one of the thread whose layers are watched.
        """
        self.thread = self.thread or get_ident()
        if self.thread != get_ident():
            return False
        if self.replayed is not None and not any(value is self.replayed.output for value in arguments):
            self._end(self.replayed)
        return True

    def left(self, values: Sequence[Any]) -> list[Any]:
        """A layer's arguments; in place of what was replayed or waits, the real result of the layers before it."""
        if self.replayed is not None and any(value is self.replayed.output for value in values):
            values = self._leave(self.replayed, values)
        ended, self.ended = self.ended, None
        if ended is None:
            return list(values)
        output, under_way = ended
        return [self.result(under_way, under_way.done) if value is output else value for value in values]

    def forget(self) -> None:
        """Drop all recordings."""
        self.replayed, self.watched, self.ended, self.thread = None, None, None, 0
        for chain in self.chains.values():
            self._drop(chain)

    @property
    def layers(self) -> int:
        """How many calls of layers are recorded, each shape counted."""
        found = ((chain, shape) for chain in self.chains.values() for shape in chain.shapes.values())
        return sum(len(chain.calls) for chain, shape in found if shape.recording is not None)

    @contextlib.contextmanager
    def _as_layers_run(self) -> Iterator[None]:
        """Inside, whoever reads has no say in how layers run: under `no_grad`, autocast or a checkpoint, perhaps."""
        hooks = torch.autograd.graph.saved_tensors_hooks(Tensor.detach, itself)
        with unrecorded(self.shared), torch.inference_mode(False), torch.enable_grad(), no_autocast(), hooks:
            yield

    def _go_on(self, under_way: Replayed) -> Tensor:
        under_way.done += 1
        if under_way.ready and not self._start(under_way):
            self._break(under_way)
            settle(under_way.late)
            return self.result(under_way, under_way.done)
        output = under_way.output
        assert output is not None
        if not under_way.over:
            return output
        self._end(under_way)
        if not under_way.held():
            return output
        self.broken[under_way.key] += 1  # the owner keeps results: the loss goes through them
        for each in [*under_way.held(), under_way.late[-1]()]:
            if each is not None:
                each.real()
        return self.result(under_way, len(under_way.chain.calls))

    def _leave(self, under_way: Replayed, inputs: Sequence[Any], link: Link | None = None) -> list[Any]:
        """The inputs of a call that is not the next one: without what was replayed."""
        output = self._end(under_way)
        if not any(value is output for value in inputs):
            return list(inputs)
        chain, key = under_way.chain, under_way.key
        if self.chains.get(key) is chain:
            self._drop(chain)
            if link is None or not chain.narrow(under_way.done, link, inputs, under_way.inputs, output):
                del self.chains[key]  # other code runs from now on
        self.broken[key] += 1
        settle(under_way.late)
        return [self.result(under_way, under_way.done) if value is output else value for value in inputs]

    def _end(self, under_way: Replayed) -> Tensor | None:
        """Let go of a pass, whose result leads to it by its graph."""
        self.replayed = None
        output, under_way.output = under_way.output, None
        return output

    def _break(self, under_way: Replayed) -> None:
        """Let go of a pass that was replayed in vain, or waits for inputs that follow from what it gives."""
        self.ended = self._end(under_way), under_way
        self.broken[under_way.key] += MAX_BROKEN // 2 if under_way.waits else 1
        if under_way.waits and self.broken[under_way.key] >= MAX_BROKEN:
            self.starts |= {call.key for call in under_way.chain.calls[1:]}

    def _drop(self, chain: Chain) -> None:
        """Drop the recordings of a chain. A backward that is still to come holds its own."""
        for shape in chain.shapes.values():
            shape.recording = None
        self.shared.bytes -= chain.bytes
        chain.bytes = chain.largest = 0
        self.shared.forget_buffers(chain)

    def _begin(self, link: Link, inputs: Sequence[Any], key: tuple) -> Any:
        """The first call of a pass."""
        read = {id(value) for value in inputs}
        sizes = [size for value in self.arguments for size in value.shape]
        beside = [value for value in self.arguments if id(value) not in read] + sizes
        first = [*inputs, *beside]
        chain = self._known(link, first, key)
        self.passes += 1
        if chain is not None:
            chain.used_at = self.passes
        if chain is not None and len(chain.calls) > 1 and self.broken[key] < MAX_BROKEN:
            output = self._replay(chain, first)
            if output is not None:
                return [output]
        self.learns = chain is None and self._differed(key) <= DIFFERED
        outputs, wrote = self._run(link, inputs) if chain is None else (link.run(*inputs), False)
        self.watched = Pass(Call.first(link, inputs, beside), first, result_of(outputs), self.shared.clock)
        self.watched.learns, self.watched.apart = chain is None, {key} if wrote else set()
        return outputs

    def _differed(self, key: tuple) -> int:
        chain = self.chains.get(key)
        return 0 if chain is None else chain.differed

    def _known(self, link: Link, inputs: Sequence[Any], key: tuple) -> Chain | None:
        """The chain that this call begins, if its passes agreed."""
        chain = self.chains.get(key)
        if chain is None or chain.agreed < AGREED:
            return None
        if chain.begins_with(link, inputs):
            return chain
        self._drop(chain)  # what stayed has changed: learn anew
        del self.chains[key]
        return None

    def _run(self, link: Link, inputs: Sequence[Any]) -> tuple[Any, bool]:
        """A call by itself, and whether it wrote into its inputs: then no other is recorded with it."""
        before = versions(inputs)
        outputs = link.run(*inputs)
        result = result_of(outputs)
        self.references = getrefcount(result)
        return outputs, versions(inputs) != before

    def _finish(self) -> None:
        """A pass is over: compare it with those before."""
        seen, self.watched = self.watched, None
        if seen is None:
            return
        if seen.learns:  # the last pass counts: the first compiles, and tunes kernels
            self.apart = (self.apart - {call.key for call in seen.calls}) | seen.apart
        key = seen.calls[0].key
        chain = self.chains.get(key)
        if chain is None:
            if not seen.learns:
                return
            self._clean()
            chain = self.chains[key] = Chain(seen.calls, used_at=self.passes)
        elif seen.learns:
            begin = [*chain.learn(seen.calls), *(chain.cut(self.apart) if chain.agreed else ())]
            self.starts |= {call.key for call in begin}
        shape = chain.shapes.setdefault(seen.shape, ShapeOfChain())
        shape.clock, shape.kind = shape.clock or seen.clock, seen.kind

    def _clean(self) -> None:
        """Forget chains whose layers are gone, or are called otherwise: they hold weights."""
        for key, chain in [*self.chains.items()]:
            if self.passes - chain.used_at > UNUSED:
                self._drop(chain)
                del self.chains[key]

    def _replay(self, chain: Chain, inputs: Sequence[Any]) -> Tensor | None:
        """The result of all of the chain; None where it is not replayed."""
        shape = chain.shapes.get(shape_of(inputs))
        if shape is None or not all(each.recording is None or each.recording.free() for each in chain.shapes.values()):
            return None
        if shape.recording is not None and not shape.recording.fits():
            self._drop(chain)
            self.broken[chain.calls[0].key] += 1
        if shape.recording is None and not self._pays(chain, shape, inputs):
            return None
        if not chain.ready:
            shape.recording = shape.recording or self._record(chain, shape, inputs)
            if shape.recording is None:
                return None
        self.shared.clock = shape.clock
        under_way = self.replayed = Replayed(chain, inputs, shape)
        if under_way.waits:
            under_way.wait()
        else:
            under_way.start()
        return under_way.output

    def _start(self, under_way: Replayed) -> bool:
        """Whether all of a pass was replayed, which has its inputs now."""
        chain, inputs, shape = under_way.chain, under_way.inputs, under_way.shape
        brought = inputs[len(chain.calls[0].sources) :]
        if not recordable(brought, self.shared.recorder.device):
            return False
        shape.recording = shape.recording or self._record(chain, shape, inputs)
        if shape.recording is None or shape.recording.brought != shape_of(brought):
            return False
        under_way.start()
        return True

    def _pays(self, chain: Chain, shape: ShapeOfChain, inputs: Sequence[Any]) -> bool:
        """Whether layers are launch-bound, and can be recorded."""
        if shape.refused or shape.clock is None or not shape.clock.decide():
            return False
        if sum(each.recording is not None for each in chain.shapes.values()) >= MAX_SHAPES:
            return False
        if any(call.key in self.apart for call in chain.calls):
            return False
        read = [inputs[position] for position in chain.read() if position < len(inputs)]
        return recordable(read, self.shared.recorder.device) and self._room(chain, shape.clock, inputs)

    def _room(self, chain: Chain, clock: Clock, inputs: Sequence[Any]) -> bool:
        """Whether all layers of the chain can be recorded, if need be without other shapes."""
        layers = len(chain.calls)
        needed = clock.saved * layers
        grows = chain.largest < needed  # blocks of smaller shapes cannot be joined
        _, total = self.shared.recorder.memory(device_of(inputs))
        if grows and needed < chain.bytes and chain.bytes + needed > IN_BLOCKS * total:
            self._drop(chain)
            self.shared.recorder.release()
        chain.largest = max(chain.largest, needed)
        if self.shared.room(inputs, needed if grows else max(0, needed - chain.bytes), layers):
            return True
        if not chain.bytes:
            return False
        self._drop(chain)
        self.shared.recorder.release()
        return self.shared.room(inputs, needed, layers)

    def _record(self, chain: Chain, shape: ShapeOfChain, inputs: Sequence[Any]) -> StackRecording | None:
        """A recording; None where it cannot be made. The reason is kept."""
        shared, device = self.shared, device_of(inputs)
        before, _ = shared.recorder.memory(device)
        made = StackRecording(chain, inputs, lambda position, like: shared.buffer(chain, position, like))
        try:
            made.record(chain, inputs, shared.recorder, partial(unrecorded, shared))
        except Exception as error:  # layers are recorded one by one, or run as they did
            shared.failures.append(note("no-stack-recorded", detail=summary(error)))
            shape.refused = True
            return None
        taken = max(0, shared.recorder.memory(device)[0] - before)
        shared.bytes += taken
        chain.bytes += taken
        self.recorded += 1
        return made
