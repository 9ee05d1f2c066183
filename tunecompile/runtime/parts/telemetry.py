"""Steps, tokens and peaks, for `tunecompile monitor` and reports."""

from __future__ import annotations

from tunecompile.notes import Note, note
from tunecompile.planner.device_memory import MARGIN, budget_bytes, gauge_of, gradient_bytes, shown
from tunecompile.runtime.accumulation import at_once
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
            trained = next((p for p in state.model.parameters() if p.requires_grad), None)
            self.telemetry.beat(batch_tokens(call.args, call.kwargs), trained is None or trained.grad is None)

    def notes(self, state: State) -> list[Note]:
        """What accumulated batches would take at once, where that is known, and they fit."""
        trained = [p for p in state.model.parameters() if p.requires_grad]
        if self.telemetry is None or not trained:
            return []
        gauge = gauge_of(trained[0].device)
        limit = budget_bytes(state.memory, gauge)
        room = min(gauge.available(), limit) if isinstance(limit, int) else gauge.available()
        base = gauge.allocated() + (gradient_bytes(trained) if trained[0].grad is None else 0)
        batch = gauge.peak()[0] - base  # of the largest one
        found = at_once(list(self.telemetry.begun), int((room * (1 - MARGIN) - base) // batch) if batch > 0 else 1)
        if found is None:
            return []
        told = note(
            "accumulated-apart",
            count=found.count,
            steps=found.steps,
            tokens=found.tokens,
            total=found.count * found.tokens,
            percent=round(100 * found.ratio),
            peak=shown(base + found.count * batch),
            room=shown(room),
        )
        return [told]

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
