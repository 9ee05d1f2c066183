"""Steps, tokens and peaks, for `tunecompile monitor` and reports."""

from __future__ import annotations

from tunecompile.notes import Note
from tunecompile.runtime.layers.dynamic_shapes import batch_tokens
from tunecompile.runtime.model_state import ModelCall, Part, State
from tunecompile.runtime.telemetry import Telemetry, describe


class StepTelemetry(Part):
    """Counts training steps."""

    telemetry: Telemetry | None = None  #: before `attach`

    def attach(self, state: State) -> None:
        self.telemetry = Telemetry(lambda: describe(state.base(), state.memory, state.step.budget))

    def before_step(self, state: State, call: ModelCall) -> None:
        if call.counts and self.telemetry is not None:
            self.telemetry.beat(batch_tokens(call.args, call.kwargs))

    def detach(self, state: State) -> None:
        if self.telemetry is not None:
            self.telemetry.stop()

    def tell(self, findings: list[Note]) -> None:
        """Show lines about the training's health on a monitor."""
        if self.telemetry is not None:
            self.telemetry.tell(findings)

    @property
    def step_ms(self) -> float | None:
        """Milliseconds from one step's beginning to the next one's, the median; None before there are two."""
        return None if self.telemetry is None else self.telemetry.step_ms
