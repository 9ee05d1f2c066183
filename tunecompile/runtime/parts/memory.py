"""`optimize(memory=...)`: a byte budget for each device, and recovery from running out of memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tunecompile._torch.cuda import grow_segments
from tunecompile._torch.distributed import sharded
from tunecompile.integrations.trainer_batches import largest_batch
from tunecompile.notes import Note, note
from tunecompile.planner.device_memory import shown
from tunecompile.runtime.layers.dynamic_shapes import DynamicShapes, tensors_in
from tunecompile.runtime.memory.across_ranks import RankPlans
from tunecompile.runtime.memory.budget import RuntimePlanner
from tunecompile.runtime.memory.oom_recovery import Recovery
from tunecompile.runtime.memory.per_device import by_device, make_budgets
from tunecompile.runtime.model_state import ModelCall, Part, State


class OomRecovery(Part):
    """What runs out of memory is repeated with less."""

    def attach(self, state: State) -> None:
        state.step.recovery = Recovery(state.step, state.slots) if state.memory is not None else None


class MemoryBudget(Part):
    """Budgets are made at the first training step, when the model is where it will be trained.

    If all layers are checkpointed and no budget is set, the user wants a run that does not run out of memory, not that
    layers are computed twice: the budget is what checkpoints would need at the largest batch that may come, and never
    less than a share of what is free at the first step (`accounting.FLOOR`).
    """

    def before_step(self, state: State, call: ModelCall) -> None:
        step = state.step
        if state.settings.memory is None:
            self._follow_checkpointing(state)
        if state.memory is None:
            return
        if not step.budgets:
            step.budgets = make_budgets(state)
            if not step.budgets:
                state.memory = None
                return
            if step.recovery is not None:
                step.recovery.agreement = RankPlans(state.store)
            if state.checkpointed:
                _expect_largest(step.budgets, call)
        for budget in step.budgets:
            budget.begin()
        if step.recovery is not None:
            step.recovery.begin()

    def _follow_checkpointing(self, state: State) -> None:
        """It may be enabled and disabled between any two steps."""
        if not (wanted := _is_checkpointed(state)) and state.checkpointed:
            state.step.budgets = ()
        if wanted != state.checkpointed:
            state.checkpointed, state.memory = wanted, "auto" if wanted else None

    def notes(self, state: State) -> list[Note]:
        """Of each device's budget, and how often memory ran out."""
        budgets, recovery = state.step.budgets, state.step.recovery
        if not budgets:
            return []
        several = len(budgets) > 1
        told = [
            note("on-device", str(budget.device), each) if several else each
            for budget in budgets
            for each in budget.report_notes()
        ]
        if state.checkpointed:
            limits = ", ".join(shown(each.admitted.limit) for each in budgets if each.admitted is not None)
            told.append(note("checkpointing-is-budget", detail=limits or "not known yet"))
        return told + (recovery.report_notes() if recovery is not None else [])


class GrowingSegments(Part):
    """Without a budget, segments of torch's allocator grow from the second size of a batch on.

    A block that one size left is hardly ever right for another: 82 GiB were reserved where now 47 are (Qwen3-VL-8B, a
    hundred sizes of images). Under a budget they grow from the first step on.
    """

    first: list[torch.Size] | None = None  #: shapes of the first batch
    done: bool = False

    def before_step(self, state: State, call: ModelCall) -> None:
        if self.done or not call.counts or state.memory is not None:
            return
        shapes = [tensor.shape for _, tensor in tensors_in(call.args, call.kwargs)]
        if self.first is None:
            self.first = shapes
        elif shapes != self.first:
            self.done = True
            on_gpu = any(device.type == "cuda" for device in by_device(state.slots))
            if on_gpu and grow_segments():
                torch.cuda.empty_cache()  # what the first size left


def _expect_largest(budgets: Sequence[RuntimePlanner], call: ModelCall) -> None:
    """Tell budgets the largest batch that the trainer under way may bring, where it says so."""
    rows = DynamicShapes.of(list(tensors_in(call.args, call.kwargs)))[:1]
    for budget in budgets:
        budget.memory.most = max(budget.memory.most, largest_batch(*rows) if rows else 0)


def _is_checkpointed(state: State) -> bool:
    """Whether checkpoints of torch's are around all layers, whose weights this process has."""
    if not state.slots or not all(slot.checkpoint for slot in state.slots):
        return False
    return state.checkpointed or not any(map(sharded, state.model.parameters()))  # milliseconds, so once
