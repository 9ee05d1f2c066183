"""Whether a layer is launch-bound: found from a few calls, without a synchronisation with the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from tunecompile.runtime.cuda_graphs.capture import Recorder

SAMPLES = 4  #: calls that are timed, beside the first, which also loads the kernels
PROBES = 3  #: calls whose kernels are timed alone
OCCUPIED = 4  #: times as long as the host launches a call, the device is busy with nothing else before such a call
#: the device's time from layer to layer by the host's, below which kernels wait. It is 1 where they do; a little above,
#: backwards, which launch more, may still wait
WAITING = 1.2


@dataclass
class HostTime:
    """What the host spends on one kind of work."""

    seconds: float = 0.0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """A context for such work."""
        begun = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - begun


@dataclass(frozen=True)
class TimedCall:
    """One call that was timed."""

    pass_: int  #: the same for calls of one forward pass
    begun: float  #: seconds
    copying: float  #: seconds that the host had spent on copies of saved tensors by then
    host: float  #: milliseconds until all was launched
    begin: Any  #: marks in the device's work
    end: Any


class Clock:
    """Compares the host's time from one layer's beginning to the next one's with the device's.

    One call alone is not enough: between two calls the host also checks guards and updates autograd's graph, while the
    last kernels run. (8B QLoRA on 2x512 tokens: 0.67 ms to launch, 1.09 until computed, and yet the next layer began at
    1.13 on both, for 0.90 replayed.)
    """

    def __init__(self, recorder: Recorder, loads: bool, tokens: int, copying: HostTime):
        self.recorder = recorder
        self.copying = copying  #: on copies of saved tensors: recordings have none
        self.tokens = tokens  #: of the calls that it times; 0 where that does not matter
        self.loads = loads  #: whether no other shape ran the graph's kernels before
        self.calls: list[TimedCall] = []
        #: whether the timed step may be the first, in which the host has more to do: only a "no" counts from it
        self.first = loads
        self.waiting: bool | None = None  #: whether the layer is launch-bound; None until that is known
        #: the host's milliseconds to launch a call, and from one to the next but for copies, if kernels wait for it
        self.launching = self.span = 0.0
        self.probes: list[tuple[Any, Any]] = []  #: marks around calls whose kernels did not wait
        self.computing: float | None = None  #: the device's milliseconds a call, where kernels do not wait
        self.saved = 0  #: bytes that a call saves for its backward, once one was timed
        self.large: bool | None = None  #: whether all layers' calls save much of the device; None until that is asked

    def time(
        self, run: Callable[[list], Sequence[Any]], inputs: list, device: torch.device, pass_: int
    ) -> Sequence[Any]:
        if self.waiting is False or len(self.calls) > SAMPLES:
            return run(inputs)
        begun, begin = time.perf_counter(), self.recorder.mark(device)
        result = run(inputs)
        end = self.recorder.mark(device)
        self.calls.append(
            TimedCall(pass_, begun, self.copying.seconds, (time.perf_counter() - begun) * 1e3, begin, end)
        )
        return result

    def decide(self) -> bool:
        """Whether recording pays; False as long as that is not known."""
        if self.waiting is None and len(self.calls) > SAMPLES:
            calls = self.calls[1:]
            spans = [
                ((b.begun - a.begun) * 1e3, (b.copying - a.copying) * 1e3, a.begin, b.begin)
                for a, b in pairwise(calls)
                if a.pass_ == b.pass_
            ]
            spans = spans or [(call.host, 0.0, call.begin, call.end) for call in calls]  # a layer alone
            device = [ms for *_, begin, end in spans if (ms := self.recorder.elapsed(begin, end)) is not None]
            if len(device) == len(spans):
                waiting = min(device) < WAITING * min(host for host, *_ in spans)
                self._conclude(
                    waiting, min(call.host for call in calls), min(host - copying for host, copying, *_ in spans)
                )
        return bool(self.waiting)

    def _conclude(self, waiting: bool, launching: float, span: float) -> None:
        if self.first and waiting:
            self.first = False
        else:
            self.waiting = waiting
            self.launching, self.span = (launching, span) if waiting else (0.0, 0.0)
        self.calls.clear()

    def probe(self, run: Callable[[list], Sequence[Any]], inputs: list, device: torch.device) -> Sequence[Any]:
        """Run a call that is not recorded.

        Of a launch-bound layer a few such calls are launched while the device is busy with something else: these tell
        how long kernels take that need not wait.
        """
        if not self.waiting or len(self.probes) >= PROBES:
            return run(inputs)
        self.recorder.occupy(device, OCCUPIED * self.launching)
        begin = self.recorder.mark(device)
        result = run(inputs)
        self.probes.append((begin, self.recorder.mark(device)))
        return result

    @property
    def known(self) -> bool:
        """Whether it is known what a recording saves."""
        if self.computing is None and self.waiting and len(self.probes) == PROBES:
            found = [self.recorder.elapsed(*marks) for marks in self.probes]
            if all(ms is not None for ms in found):
                self.computing = min(ms for ms in found if ms is not None)
        return self.waiting is False or self.computing is not None

    def saving(self, tokens: int) -> float:
        """Milliseconds that a recording saves of a call on so many tokens; 0 as long as that is not known.

        No more than the launches take, and than the device rests.
        """
        if not self.known:
            return 0.0
        computing = (self.computing or 0.0) * (tokens / self.tokens if self.tokens else 1.0)
        return max(0.0, min(self.launching, self.span - computing))
