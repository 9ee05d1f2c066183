"""The plan that a model's layers on one device follow: handed out call by call, and told in the report."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from tunecompile.compiler.partitioner import JointGraph
from tunecompile.notes import Note
from tunecompile.planner.cost_model import beside_layers
from tunecompile.planner.solver import Plan
from tunecompile.planner.step_plan import count_options, recomputed_names
from tunecompile.runtime.memory.accounting import PlannedLayer
from tunecompile.runtime.memory.plan_maker import PlanMaker


class RuntimePlanner(PlanMaker):
    """Gives every layer on one device its plan."""

    def begin(self) -> None:
        """At the model's entry: learn how many bytes the last step needed."""
        if self.offload is not None:
            self.offload.begin_step()
        self.progress.begin(self.memory, self.admitted)

    def pause(self) -> None:
        """Other code than the training runs: its memory is not a step's."""
        self.progress.pause(self.memory, self.admitted)

    def plan_for(
        self, slot: PlannedLayer, kind: Hashable, tokens: int
    ) -> tuple[Plan, Callable[[JointGraph], Plan] | None]:
        """The plan that a layer follows in this step.

        Args:
            slot: of a layer on this device.
            kind: the same for calls with the same graph.
            tokens: of the batch that the layer is called on.

        Returns:
            The plan; and where that has to be made first, the function that makes it of the joint graph.
        """
        now = self.progress
        if not now.layers_began:
            now.layers_began, now.tokens = True, tokens
            now.survey_step = now.survey_step or now.steps
            self.ran.clear()
            self.memory.begin_layers(tokens)
            self._review()
            self.trace.begin(now.steps, self.admitted and self.admitted.choice.options, tokens)
        self.trace.note("forward", self.places[id(slot)])
        look = self._look(slot, kind) if id(slot) not in self.options else None
        return self._plan_of(slot), look

    def known_plan(self, slot: PlannedLayer, tokens: int) -> Plan | None:
        """What a layer follows in steps of so many tokens; None as long as none of that many was planned."""
        option = self.options.get(id(slot))
        return None if option is None or self.admitted is None or tokens > self.admitted.tokens else option.plan

    def around(self, slot: PlannedLayer, planned: bool = True) -> AbstractContextManager:
        """A context for a layer's call: saved tensors are offloaded, where its plan says so.

        planned: whether its plan is known; else it is made during the call.
        """
        if self.offload is None or (planned and not self.offloading):
            return nullcontext()
        return self.offload.layer(self.places[id(slot)], slot.layer, partial(self._leaves, slot))

    def _leaves(self, slot: PlannedLayer, saved: torch.Tensor) -> bool:
        """Whether a saved tensor is offloaded. Its bytes are scaled to the batch that the plan was made for."""
        if (option := self.options.get(id(slot))) is None or self.admitted is None:
            return False
        made = self.admitted.tokens
        return option.offloads_tensor(saved.untyped_storage().nbytes() * made // max(self.progress.tokens, made))

    def follow(self, slot: PlannedLayer, output: object) -> None:
        """After a layer's forward."""
        if (option := self.options.get(id(slot))) is not None:
            self.ran[id(slot)] = option
        self.trace.follow(output, self.places[id(slot)])

    def settle(self) -> None:
        """Before head and loss, whose memory may be the peak."""
        if self.offload is not None:
            self.offload.settle()
        self.trace.note("tail")

    def _look(self, slot: PlannedLayer, kind: Hashable) -> Callable[[JointGraph], Plan] | None:
        """The function that makes a layer's plan of its joint graph, where that is to be surveyed."""
        key = id(slot.region), kind, tuple(parameter.requires_grad for parameter in slot.layer.parameters())
        if not self.surveys.needs(id(slot.region)) or key in self.surveys.called:
            return None
        self.surveys.called[key] = False

        def look(joint: JointGraph) -> Plan:
            self.surveys.called[key] = True
            self._see(slot, joint)
            return self._plan_of(slot)

        return look

    @property
    def tight(self) -> bool:
        """Whether layers need more than half of their room, as far as is known."""
        return self.admitted is None or 2 * self.admitted.choice.peak > self.admitted.room

    def step_ms(self) -> float | None:
        """Predicted milliseconds of a step under the plan, with AdamW and without data loading.

        None on a CPU, whose kernels have no common rate.
        """
        if self.admitted is None or not self.speed.launches:
            return None
        beside = beside_layers(self.memory.head_weights(), self.memory.trained_here(), self.admitted.tokens)
        return self.admitted.choice.work + beside.ms(self.speed)

    def report_notes(self) -> list[Note]:
        """Notes."""
        return self.notes + ([self.shortfall] if self.shortfall else [])

    def summary(self) -> dict[str, Any] | None:
        """Device, budget and peaks in bytes, the step's predicted milliseconds, and counts of layers by plan."""
        if self.admitted is None:
            return None
        return {
            "device": str(self.device),
            "budget": self.admitted.limit if self.memory.checkpointed else self.memory.allowed(),
            "predicted_peak": self.admitted.peak,
            "measured_peak": self.progress.measured or None,
            "tokens": self.admitted.tokens,
            "predicted_ms": self.step_ms(),
            "recompute_ms": self.admitted.choice.ms,
            "replans": self.plans,
            "kept_weights": self.admitted.weights,
            "offload": self.offload.report() if self.offload is not None and self.offloading else None,
            "plans": self.plans_by_layer(),
        }

    def plans_by_layer(self) -> list[dict[str, Any]]:
        """How many layers follow each plan."""
        chosen = ((slot, self.options.get(id(slot))) for slot in self.layers)
        return count_options((option, self._names(slot)) for slot, option in chosen if option is not None)

    def recomputed(self, slot: PlannedLayer, plan: Plan) -> Sequence[str]:
        """The values that a layer recomputes under a plan, by name."""
        return recomputed_names(plan, self._names(slot))

    def _names(self, slot: PlannedLayer) -> Sequence[str]:
        found = self.surveys.candidates.get(id(slot.region))
        return found.names if found is not None else ()
