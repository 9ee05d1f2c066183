"""Passes of chains: one that is watched, call by call, and one that was replayed at its first call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from tunecompile._torch.autograd import plain_tensors
from tunecompile.runtime.cuda_graphs.chain import Call, Chain, Held, Link, shape_of
from tunecompile.runtime.cuda_graphs.launch_bound import Clock
from tunecompile.runtime.cuda_graphs.pool import next_pool
from tunecompile.runtime.cuda_graphs.recording import device_of
from tunecompile.runtime.cuda_graphs.stack_recording import StackRecording


class Pass:
    """A pass that is watched, call by call. It keeps no tensor alive."""

    def __init__(self, call: Call, inputs: Sequence[Any], result: Tensor | None, clock: Clock | None):
        self.calls, self.shape, self.clock = [call], shape_of(inputs), clock
        self.first = [weakref.ref(value) if isinstance(value, Tensor) else value for value in inputs]
        self.versions = versions(inputs)
        self.held: dict[int, Held] = {}  #: what later calls are given, by its id
        self.previous, self.kind = _weakly(result), _kind_of(result)
        self.learns = True  #: whether calls are compared with those of other passes
        self.apart: set[tuple] = set()  #: calls that did more than return a result

    def goes_on(self, inputs: Sequence[Any]) -> bool:
        """Whether a call is given what the last one returned."""
        previous = self.previous()
        return previous is not None and any(value is previous for value in inputs)

    def add(self, link: Link, inputs: Sequence[Any], result: Tensor | None) -> None:
        """The next call. It is in no recording with those before if its result is of another kind, or if somebody has
        written to their arguments since.
        """
        previous, self.previous = self.previous(), _weakly(result)
        if not self.learns:
            return
        first = [value() if isinstance(value, weakref.ref) else value for value in self.first]
        self._hold(inputs, {id(value) for value in (*first, previous)})
        self.calls.append(Call.after(link, inputs, first, previous, self.held))
        present = [*first, *(each.tensor() for each in self.held.values())]
        written = any(self.versions.setdefault(at, now) != now for at, now in versions(present).items())
        if written or _kind_of(result) != self.kind:
            self.apart.add(self.calls[-1].key)

    def _hold(self, inputs: Sequence[Any], known: Collection[int]) -> None:
        """Remember the tensors that a call is the first to be given. known: ids of others."""
        for place, value in enumerate(inputs):
            if not isinstance(value, Tensor) or id(value) in known:
                continue
            before = self.held.get(id(value))
            if before is None or before.tensor() is not value:
                self.held[id(value)] = Held(weakref.ref(value), len(self.calls), place)
                self.versions.pop(id(value), None)  # of another one, that was there before


def versions(values: Sequence[Any]) -> dict[int, int]:
    """How often each tensor was written to, by its id. (4-bit parameters would answer each question in Python.)"""
    with plain_tensors():
        return {id(v): 0 if v.is_inference() else v._version for v in values if isinstance(v, Tensor)}


def _kind_of(value: Tensor | None) -> tuple:
    return () if value is None else (value.shape, value.stride(), value.dtype, value.requires_grad)


def _weakly(value: Tensor | None) -> Callable[[], Tensor | None]:
    return _nothing if value is None else weakref.ref(value)


def _nothing() -> None:
    return None


@dataclass(eq=False)
class ShapeOfChain:
    """What is known of a chain's passes of one shape."""

    clock: Clock | None = None  #: of the last graph that ran
    kind: tuple = ()  #: shape, strides, dtype and whether it requires a gradient, of what calls return
    refused: bool = False


@dataclass(eq=False)
class Flight:
    """Memory for a chain's passes, one at a time: another one is begun before a backward that is still to come where a
    loss compares several batches.
    """

    recordings: dict[ShapeOfChain, StackRecording] = field(default_factory=dict)
    pool: int = field(default_factory=next_pool)  #: whose memory they share
    bytes: int = 0  #: that they made the process take from the device
    largest: int = 0  #: bytes that the largest of them saves

    def free(self) -> bool:
        """Whether no backward that needs what was saved here is still to come."""
        return all(recording.free() for recording in self.recordings.values())


class Replayed:
    """A pass that is replayed at its first call, or at the one that brings the last of its inputs. Those that follow
    are compared with it.

    Args:
        chain: of its calls.
        inputs: of the first call.
        shape: of the pass. It is recorded, if the pass need not wait.
        flight: where the pass has its memory.
    """

    def __init__(self, chain: Chain, inputs: Sequence[Any], shape: ShapeOfChain, flight: Flight):
        self.chain, self.inputs, self.shape, self.flight = chain, list(inputs), shape, flight
        recording = self.recording
        if recording is not None:
            fixed = [tensor for tensor, _ in recording.fixed]
        else:
            fixed = [tensor for call in chain.calls for tensor in call.fixed()]
        self.waits = chain.ready > 0  #: for a call that brings inputs
        self.copied = [] if self.waits or recording is None else recording.copied
        self.read = [value for at in chain.read() if at < len(inputs) and isinstance(value := inputs[at], Tensor)]
        self.versions = versions([*fixed, *self.read])
        self.output: Tensor | None = None  #: of all calls, in place of those between
        self.done = 1  #: calls
        #: where the gradients of inputs go that somebody may write to
        self.edges: dict[int, GradientEdge] = {}
        if recording is not None and not self.waits:
            self.edges = {at: get_gradient_edge(inputs[at]) for at in recording.differentiable}
        self.results: dict[int, Tensor] = {}  #: that somebody looked at, by the number of calls before
        self.late: list[weakref.ref] = []  #: tensors in place of results that were not written
        self.given: Any = None  #: the arguments of the layer that began it

    def follows(self, link: Link, inputs: Sequence[Any]) -> bool:
        """Whether this is the next call, and nobody has written to what it reads since the first."""
        call = self.chain.calls[self.done]
        if not call.takes(link, inputs, self.inputs, self.output):
            return False
        now = versions([*call.fixed(), *self.read])
        if not all(self.versions.get(at) == version for at, version in now.items()):
            return False
        if (brought := call.brings(inputs) if self.waits else {}) is None:
            return False
        for position, value in sorted(brought.items()):
            assert position == len(self.inputs)
            self.inputs.append(value)
            self.read.append(value)
            self.versions |= versions([value])
            self._keep(position)
        return True

    @property
    def ready(self) -> bool:
        """Whether the call that came last has brought what was waited for."""
        return self.waits and self.done > self.chain.ready

    def wait(self) -> None:
        """Go on without values, and keep copies of inputs that somebody may write to before the pass is replayed."""
        (shape, strides, dtype, needs_gradient), device = self.shape.kind, device_of(self.inputs)
        self.output = torch.empty_strided(shape, strides, dtype=dtype, device=device).requires_grad_(needs_gradient)
        for at in sorted(self.chain.read()):
            if at < len(self.inputs) and self.chain.varies(at) and isinstance(self.inputs[at], Tensor):
                self._keep(at)

    def _keep(self, position: int) -> None:
        """A copy of an input, where it will be copied anyway if there is a recording."""
        value = self.inputs[position]
        if value.requires_grad:
            self.edges[position] = get_gradient_edge(value)
        copy = None if self.recording is None else self.recording.load_at(position, value)
        self.copied.append((position, value.detach().clone() if copy is None else copy))

    def start(self) -> None:
        """Replay all calls."""
        recording = self.recording
        assert recording is not None
        self.waits, self.copied = False, recording.copied
        self.output = recording.replay(self.inputs, partial(settle, self.late))

    @property
    def recording(self) -> StackRecording | None:
        """Of its shape, in its memory."""
        return self.flight.recordings.get(self.shape)

    @property
    def key(self) -> tuple:
        """Of its chain."""
        return self.chain.calls[0].key

    @property
    def over(self) -> bool:
        """Whether all calls came."""
        return self.done == len(self.chain.calls)

    def held(self) -> list[Any]:
        """Tensors in place of results that somebody holds, but for the last one, which the last call was given."""
        return [each for ref in self.late[:-1] if (each := ref()) is not None]

    def result(self, calls: int) -> Tensor:
        """What so many calls give, run one by one."""
        if calls not in self.results:
            self._take_back()
            known = max((done for done in self.results if done < calls), default=0)
            self.results[calls] = self.chain.run(self.inputs, calls, known=(known, self.results.get(known)))
        return self.results[calls]

    def _take_back(self) -> None:
        """Inputs that were written to since, as they were: the recording has copies."""
        for at, buffer in self.copied:
            if versions([self.inputs[at]])[id(self.inputs[at])] != self.versions.get(id(self.inputs[at]), 0):
                self.inputs[at] = _as_it_was(buffer, self.edges.get(at))


def _as_it_was(copy: Tensor, edge: GradientEdge | None) -> Tensor:
    """An input that somebody has written to, by a copy of what it was, whose gradient goes where its own went."""
    made = copy.clone()
    if edge is not None:
        made.requires_grad_().register_post_accumulate_grad_hook(partial(_pass_on, edge))
    return made


def _pass_on(edge: GradientEdge, made: Tensor) -> None:
    gradient, made.grad = made.grad, None
    torch.autograd.backward((edge,), (gradient,), retain_graph=True)


def settle(late: Sequence[weakref.ref]) -> None:
    """Make what somebody still holds, before weights change."""
    for held in [each() for each in late]:
        if held is not None:
            held.real()
