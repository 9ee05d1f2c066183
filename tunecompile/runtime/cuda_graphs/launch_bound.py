"""Whether a layer is launch-bound: found from a few calls, without a synchronisation with the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from tunecompile.runtime.cuda_graphs.capture import Recorder

SAMPLES = 4  #: calls that are timed, beside the first, which also loads the kernels
#: the device's time from layer to layer by the host's, below which kernels wait. It is 1 where they do; a little above,
#: backwards, which launch more, may still wait
WAITING = 1.2


@dataclass(frozen=True)
class TimedCall:
    """One call that was timed."""

    pass_: int  #: the same for calls of one forward pass
    begun: float  #: seconds
    host: float  #: milliseconds until all was launched
    begin: Any  #: marks in the device's work
    end: Any


class Clock:
    """Compares the host's time from one layer's beginning to the next one's with the device's.

    One call alone is not enough: between two calls the host also checks guards and updates autograd's graph, while the
    last kernels run. (8B QLoRA on 2x512 tokens: 0.67 ms to launch, 1.09 until computed, and yet the next layer began at
    1.13 on both, for 0.90 replayed.)
    """

    def __init__(self, recorder: Recorder, loads: bool = True):
        self.recorder = recorder
        self.loads = loads  #: whether no other shape ran the graph's kernels before
        self.calls: list[TimedCall] = []
        #: whether the timed step may be the first, in which the host has more to do: only a "no" counts from it
        self.first = loads
        self.waiting: bool | None = None  #: whether the layer is launch-bound; None until that is known
        self.launching = 0.0  #: the host's milliseconds a call, if kernels wait for it; the kernels take as long then

    def time(
        self, run: Callable[[list], Sequence[Any]], inputs: list, device: torch.device, pass_: int
    ) -> Sequence[Any]:
        if self.waiting is False or len(self.calls) > SAMPLES:
            return run(inputs)
        begun, begin = time.perf_counter(), self.recorder.mark(device)
        result = run(inputs)
        end = self.recorder.mark(device)
        self.calls.append(TimedCall(pass_, begun, (time.perf_counter() - begun) * 1e3, begin, end))
        return result

    def decide(self) -> bool:
        """Whether recording pays; False as long as that is not known."""
        if self.waiting is None and len(self.calls) > SAMPLES:
            calls = self.calls[1:]
            spans = [((b.begun - a.begun) * 1e3, a.begin, b.begin) for a, b in pairwise(calls) if a.pass_ == b.pass_]
            spans = spans or [(call.host, call.begin, call.end) for call in calls]  # a layer alone
            device = [ms for _, begin, end in spans if (ms := self.recorder.elapsed(begin, end)) is not None]
            if len(device) == len(spans):
                self._conclude(
                    min(device) < WAITING * min(host for host, *_ in spans), min(call.host for call in calls)
                )
        return bool(self.waiting)

    def _conclude(self, waiting: bool, launching: float) -> None:
        if self.first and waiting:
            self.first = False
        else:
            self.waiting, self.launching = waiting, launching if waiting else 0.0
        self.calls.clear()
