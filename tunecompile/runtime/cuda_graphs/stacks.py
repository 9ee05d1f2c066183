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
from collections.abc import Callable, Iterator, Sequence
from sys import getrefcount
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from tunecompile._torch.autograd import no_autocast
from tunecompile.runtime.cuda_graphs.chain import Call, Chain, Link, itself, key_of, result_of, shape_of
from tunecompile.runtime.cuda_graphs.recorded_chains import MAX_BROKEN, RecordedChains
from tunecompile.runtime.cuda_graphs.recorded_graph import Replays, recordable, unrecorded
from tunecompile.runtime.cuda_graphs.stack_pass import Pass, Replayed, settle, versions


class Watcher:
    """Watches passes call by call, of which chains are learnt."""

    def __init__(self, chains: RecordedChains):
        self.chains = chains
        self.watched: Pass | None = None
        self.starts: set[tuple] = set()  #: calls that differ from pass to pass in what they are given
        #: whether layers are not recorded one by one yet: they may be together soon
        self.learns = False
        #: Python's, to the result of the last call that is compared: by its outputs, a variable and the question
        self.references = 0

    @property
    def learnt(self) -> Tensor | None:
        """The result of the call that ran last, where it is compared with those of other passes."""
        return self.watched.previous() if self.watched is not None and self.watched.learns else None

    def refuse(self) -> None:
        """The layer that ran last does more than return its result: it is no part of a stack."""
        if self.watched is not None:
            self.watched.apart.add(self.watched.calls[-1].key)

    def begin(self, link: Link, inputs: Sequence[Any], beside: Sequence[Any], known: bool) -> Any:
        """Run the first call of a pass.

        Args:
            link, inputs: of the call.
            beside: arguments of its layer that its graph does not read, and sizes.
            known: whether its chain is, so that nothing is compared.
        """
        key = key_of(link, inputs)
        self.learns = not known and not self.chains.settled(key)
        outputs, wrote = (link.run(*inputs), False) if known else self._run(link, inputs)
        call, result = Call.first(link, inputs, beside), result_of(outputs)
        self.watched = Pass(call, [*inputs, *beside], result, self.chains.shared.clock)
        self.watched.learns, self.watched.apart = not known, {key} if wrote else set()
        return outputs

    def goes_on(self, inputs: Sequence[Any], key: tuple) -> Pass | None:
        """The pass whose next call this is, if it is one."""
        watched = self.watched
        return watched if watched is not None and key not in self.starts and watched.goes_on(inputs) else None

    def add(self, watched: Pass, link: Link, inputs: Sequence[Any], key: tuple) -> Any:
        """Run the next call of a pass."""
        outputs, wrote = self._run(link, inputs) if watched.learns else (link.run(*inputs), False)
        watched.add(link, inputs, result_of(outputs))
        watched.apart |= {key} if wrote else set()
        return outputs

    def _run(self, link: Link, inputs: Sequence[Any]) -> tuple[Any, bool]:
        """A call by itself, and whether it wrote into its inputs: then no other is recorded with it."""
        before = versions(inputs)
        outputs = link.run(*inputs)
        result = result_of(outputs)
        self.references = getrefcount(result)
        return outputs, versions(inputs) != before

    def finish(self) -> None:
        """A pass is over: compare it with those before."""
        seen, self.watched = self.watched, None
        if seen is not None:
            self.starts |= {call.key for call in self.chains.learn(seen)}


class Stacks:
    """The stacks of one model's layers: the pass that is replayed, and what its calls are given and return."""

    def __init__(self, shared: Replays):
        self.shared, self.chains = shared, RecordedChains(shared)
        self.watcher = Watcher(self.chains)
        self.replayed: Replayed | None = None  #: the pass under way
        self.ended: tuple[Any, Replayed] | None = None  #: what was passed in a pass that ended early, and that pass
        self.joins = False  #: whether the layer that runs may be part of a stack
        self.thread = 0  #: whose layers are watched: that of the first
        self.arguments: Sequence[Tensor] = ()  #: of that layer

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
            self.watcher.finish()
            self.watcher.learns = False
            return link.run(*inputs)
        key = key_of(link, inputs)
        if (watched := self.watcher.goes_on(inputs, key)) is not None:
            return self.watcher.add(watched, link, inputs, key)
        self.watcher.finish()
        return self._begin(link, inputs, key)

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
        self.replayed, self.watcher.watched, self.ended, self.thread = None, None, None, 0
        self.chains.forget()

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
        self.chains.broken[under_way.key] += 1  # the owner keeps results: the loss goes through them
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
        if self.chains.chains.get(key) is chain:
            self.chains.drop(chain)
            if link is None or not chain.narrow(under_way.done, link, inputs, under_way.inputs, output):
                del self.chains.chains[key]  # other code runs from now on
        self.chains.broken[key] += 1
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
        self.chains.broken[under_way.key] += MAX_BROKEN // 2 if under_way.waits else 1
        if under_way.waits and self.chains.broken[under_way.key] >= MAX_BROKEN:
            self.watcher.starts |= {call.key for call in under_way.chain.calls[1:]}

    def _begin(self, link: Link, inputs: Sequence[Any], key: tuple) -> Any:
        """The first call of a pass."""
        read = {id(value) for value in inputs}
        sizes = [size for value in self.arguments for size in value.shape]
        beside = [value for value in self.arguments if id(value) not in read] + sizes
        chain = self.chains.begun(link, [*inputs, *beside], key)
        if chain is not None and len(chain.calls) > 1 and self.chains.broken[key] < MAX_BROKEN:
            output = self._replay(chain, [*inputs, *beside])
            if output is not None:
                return [output]
        return self.watcher.begin(link, inputs, beside, known=chain is not None)

    def _replay(self, chain: Chain, inputs: Sequence[Any]) -> Tensor | None:
        """The result of all of the chain; None where it is not replayed."""
        found = self.chains.replayable(chain, inputs)
        if found is None:
            return None
        shape, flight = found
        self.shared.clock = shape.clock
        under_way = self.replayed = Replayed(chain, inputs, shape, flight)
        if under_way.waits:
            under_way.wait()
        else:
            under_way.start()
        return under_way.output

    def _start(self, under_way: Replayed) -> bool:
        """Whether all of a pass was replayed, which has its inputs now."""
        chain, inputs = under_way.chain, under_way.inputs
        brought = inputs[len(chain.calls[0].sources) :]
        if not recordable(brought, self.shared.recorder.device):
            return False
        recording = self.chains.record(chain, under_way.shape, under_way.flight, inputs)
        if recording is None or recording.brought != shape_of(brought):
            return False
        under_way.start()
        return True
