"""The course of the training on one device: its steps, and the bytes that they took."""

from __future__ import annotations

from dataclasses import dataclass

from tunecompile.planner.device_memory import Gauge
from tunecompile.planner.step_plan import AdmittedPlan
from tunecompile.runtime.memory.accounting import MemoryAccounting


@dataclass
class Progress:
    """The course of the training, as far as its plan depends on it."""

    steps: int = 0  #: that began
    layers_began: bool = False  #: whether the running step's first layer was called
    tokens: int = 0  #: of the step's first layer, and so of the batch (a decoder may run on fewer than its encoder)
    survey_step: int = 0  #: the step in which layers are surveyed; a kind without candidates after it has no backward
    highest: int = 0  #: the device's peak when last looked at
    measured: int = 0  #: the last peak that was a step's
    exceeded: bool = False  #: whether the last step took more than the budget
    paused: bool = False  #: whether other code than the training ran since the last step, such as a generation
    pressed: bool = False  #: whether the device was ever full under a plan, so that less than the budget is there

    def begin(self, memory: MemoryAccounting, admitted: AdmittedPlan | None) -> None:
        """At the model's entry: learn how many bytes the last step needed.

        Args:
            memory: of the device.
            admitted: the plan that the last step followed, if there is one.
        """
        self.layers_began = False
        self.steps += 1
        if admitted is None or self.paused:
            self.highest = memory.gauge.peak()[0]  # of loading the model, or of a generation between steps
        else:
            self._measure(memory, admitted)
        self.paused = False

    def pause(self, memory: MemoryAccounting, admitted: AdmittedPlan | None) -> None:
        """Other code than the training runs: its memory is not a step's.

        Args:
            memory: of the device.
            admitted: the plan that the last step followed, if there is one.
        """
        if admitted is not None and not self.paused:
            self._measure(memory, admitted)
            self.paused = True

    def forget(self, gauge: Gauge) -> None:
        """Forget the device's peak, and begin to count steps anew.

        Args:
            gauge: of the device.
        """
        gauge.release()
        gauge.forget_peak()
        self.highest, self.steps = gauge.peak()[0], 0

    def _measure(self, memory: MemoryAccounting, admitted: AdmittedPlan) -> None:
        """How many bytes the last step needed."""
        peak, held = memory.gauge.peak()
        if peak == self.highest or peak - memory.gauge.allocated() <= admitted.choice.peak // 2:
            return  # not a step's, or the count was reset since
        self.measured, self.highest = peak, peak
        if not memory.checkpointed:  # whose peak may be of other code: a generation between steps needs more
            memory.surplus += max(0, peak - admitted.peak - memory.recordings.bytes)
        memory.slack = max(memory.slack, held - peak)
        self.exceeded = held > memory.allowed()
