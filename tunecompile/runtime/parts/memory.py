"""`optimize(memory=...)`: a byte budget for each device, and recovery from running out of memory."""

from __future__ import annotations

from tunecompile.notes import Note, note
from tunecompile.runtime.memory.across_ranks import RankPlans
from tunecompile.runtime.memory.oom_recovery import Recovery
from tunecompile.runtime.memory.per_device import make_budgets
from tunecompile.runtime.model_state import ModelCall, Part, State


class OomRecovery(Part):
    """What runs out of memory is repeated with less."""

    def attach(self, state: State) -> None:
        state.step.recovery = Recovery(state.step, state.slots) if state.memory is not None else None


class MemoryBudget(Part):
    """Budgets are made at the first training step, when the model is where it will be trained."""

    def before_step(self, state: State, call: ModelCall) -> None:
        step = state.step
        if state.memory is None or step.recovery is None:
            return
        if not step.budgets:
            step.budgets = make_budgets(state)
            if not step.budgets:
                state.memory = None
                return
            step.recovery.agreement = RankPlans(state.store)
        for budget in step.budgets:
            budget.begin()
        step.recovery.begin()

    def notes(self, state: State) -> list[Note]:
        """Of each device's budget, and how often memory ran out."""
        budgets, recovery = state.step.budgets, state.step.recovery
        if not budgets or recovery is None:
            return []
        several = len(budgets) > 1
        told = [
            note("on-device", str(budget.device), each) if several else each
            for budget in budgets
            for each in budget.report_notes()
        ]
        return told + recovery.report_notes()
