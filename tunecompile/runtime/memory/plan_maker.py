"""The plan of a model's layers on one device: made in the first training step, and again where a batch outgrows it.

Survey, solve, compile. The first call of a kind of layers is compiled up to its joint graph, which is surveyed. The
plan of the whole step is solved from all surveys (tunecompile/planner/step_plan.py). Only then is code generated, under
the plan that the layer follows. So nothing is traced twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from tunecompile.compiler.partitioner import JointGraph
from tunecompile.compiler.survey import Surveys, survey
from tunecompile.notes import Note, note
from tunecompile.planner import candidates
from tunecompile.planner.datasheets import rates_of
from tunecompile.planner.device_memory import MARGIN, shown
from tunecompile.planner.hardware import Rates
from tunecompile.planner.solver import KEEP, KEEP_WEIGHTS, RECOMPUTE, Plan, PlanOption
from tunecompile.planner.step_plan import AdmittedPlan, RegionCandidates, StepRequest, solve_from_here
from tunecompile.runtime.memory.accounting import MemoryAccounting, PlannedLayer, compute_dtype
from tunecompile.runtime.memory.progress import Progress
from tunecompile.runtime.memory.timeline_trace import MemoryTrace

SHRUNK = 0.75  #: share of the tokens of a plan that costs time, down to which it is kept
WEIGHED = 1.5  #: times the milliseconds that recordings would save, by the last plan, from which on it is made anew
GROWN = 1.02  #: times the resident bytes at the last plan, from which on it is reviewed


@dataclass
class PlanMaker:
    """Makes the plan of all layers on one device, within the bytes the user allows."""

    memory: MemoryAccounting
    surveys: Surveys = field(default_factory=Surveys)
    progress: Progress = field(default_factory=Progress)
    options: dict[int, PlanOption] = field(default_factory=dict)  #: by slot
    ran: dict[int, PlanOption] = field(default_factory=dict)  #: in the running step's forward, by slot
    admitted: AdmittedPlan | None = None
    allowed: int = 0  #: bytes that torch's allocator was allowed to hold when the plan was made
    plans: int = 0  #: that were admitted
    shortfall: Note | None = None
    notes: list[Note] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.layers, self.device, self.offload = self.memory.layers, self.memory.device, self.memory.offload
        self.places = {id(slot): place for place, slot in enumerate(self.layers)}
        self.regions = list(dict.fromkeys(id(slot.region) for slot in self.layers))
        self.offloading = False
        self.trace = MemoryTrace(self.memory.gauge)
        self.speed = Rates(float("inf"), float("inf"))  #: not known before the first plan

    def _plan_of(self, slot: PlannedLayer) -> Plan:
        """What a layer follows as far as is known. Without candidates, that is the user's own checkpointing."""
        option = self.options.get(id(slot))
        return (RECOMPUTE if slot.checkpoint else KEEP) if option is None else option.plan

    def _see(self, slot: PlannedLayer, joint: JointGraph) -> None:
        """Survey a layer's graph, and plan for all layers."""
        region, before = id(slot.region), self.surveys.candidates.get(id(slot.region))
        found = error = None
        try:
            request = self._request(self.progress.tokens)
            stages, weighs = candidates.candidate_stages(joint.graph), self.memory.kept is not None
            result = survey(joint, self.progress.tokens, stages, partial(self._is_enough, request, region), weighs)
            found, error = result.found, result.error
        except Exception as failure:
            error = failure
        if error is not None:  # the step goes on with what was surveyed before, or without a plan
            known = max(filter(None, (before, found)), key=lambda each: len(each.rows), default=None)
            missing = "no-memory-plan" if known is None else "few-memory-plans"
            self.notes = _with_failure(self.notes, missing, slot.region.name, error)
            found = known and replace(known, whole=True)  # it would fail again
        self.surveys.reopened.discard(region)
        if found is None:
            self._follow_the_user()
            return
        self.surveys.candidates[region] = found
        made = self._admit(self._held())
        if self.offload is not None and self.offloading:  # code is generated next, in which nothing else happens
            self.offload.expect(made.choice.waiting)

    def _is_enough(self, request: StepRequest, region: int, found: RegionCandidates) -> bool:
        """Whether the candidates found of a region so far are enough."""
        known = {**request.candidates, region: found}
        seen = self._all_seen(known)
        made = solve_from_here(replace(request, candidates=known, all_seen=seen), self._held())
        return made.settles(self._surveyed(known))

    def _surveyed(self, known: dict[int, RegionCandidates]) -> list[RegionCandidates]:
        """Candidates of this device's layers. Others are surveyed where they are."""
        return [known[region] for region in self.regions if region in known]

    def _all_seen(self, known: dict[int, RegionCandidates]) -> bool:
        """Whether each kind of layer was surveyed, or has had its step without showing a backward."""
        return self.progress.steps > self.progress.survey_step or all(region in known for region in self.regions)

    def _follow_the_user(self) -> None:
        """Without any candidates, layers follow the user's own checkpointing."""
        for slot in self.layers:
            self.options.setdefault(id(slot), PlanOption(self._plan_of(slot), 0, 0, 0, 0.0))

    def _survey_again(self) -> bool:
        """Survey regions once more of which only a part of the plans is known. Returns whether there are any."""
        known = self.surveys.candidates
        partly = {region for region in self.regions if region in known and not known[region].whole}
        self.surveys.reopen(partly)
        if partly:
            self.options = {
                id(slot): self.options[id(slot)]
                for slot in self.layers
                if id(slot) in self.options and id(slot.region) not in partly
            }
            self.progress.survey_step = self.progress.steps
        return bool(partly)

    def retreat(self, missing: int | None) -> bool:
        """The device was full: plan for less from here on.

        Args:
            missing: bytes that could not be allocated; None to plan for as little as possible.

        Returns:
            Whether there is a smaller plan, or recordings gave memory back.
        """
        made, freed = self.admitted, self.memory.recordings.retreat()
        if freed:
            self.memory.gauge.release()
        if made is None or not self.surveys.candidates:
            return freed
        self.progress.highest = self.memory.gauge.peak()[0]  # of a plan that is dropped
        target = (
            0 if missing is None else min(made.choice.peak, made.room) - max(missing, int(MARGIN * made.choice.peak))
        )
        request = self._request(self.progress.tokens)
        room = request.available - request.beside_layers(request.layer_runs())
        self.memory.surplus += max(0, room - target)
        return self._make_smaller(made) or freed

    def give_way(self, room: int) -> bool:
        """Another rank ran out of memory: plan with its room from here on, if that is less.

        Args:
            room: bytes for layers, head and loss.

        Returns:
            Whether that takes another plan.
        """
        ceiling = self.memory.ceiling
        self.memory.ceiling = room if ceiling is None else min(room, ceiling)
        made = self.admitted
        return (
            made is not None
            and bool(self.surveys.candidates)
            and made.choice.peak > self.memory.ceiling
            and self._make_smaller(made)
        )

    def _make_smaller(self, before: AdmittedPlan) -> bool:
        self.progress.pressed = True
        self.ran.clear()  # layers repeat what they have to, and so hold something else
        made = self._admit()
        if made.choice.fits or not self._survey_again():
            return made.choice.peak < before.choice.peak
        return True

    def _review(self) -> None:
        """Before a step's first layer."""
        made, tokens = self.admitted, self.progress.tokens
        if made is not None and (self.progress.exceeded or tokens != made.tokens):
            room = 0 if self.progress.exceeded else made.room + made.spare - made.weights
            if self.memory.recordings.make_way(made.choice.peak * tokens // made.tokens, room):
                self.memory.gauge.release()
        surveyed = self._surveyed(self.surveys.candidates)
        serves = made is not None and still_serves(made, self.memory, self.progress, self.allowed)
        if not self.surveys.candidates or (serves and is_final(made, self.progress, surveyed)):
            return
        try:
            made = self._admit()
        except Exception as error:
            if made is not None:
                raise
            # layers of this kind are on another device, too, and were surveyed there
            self.notes = _with_failure(self.notes, "no-memory-plan", str(self.device), error)
            return
        if not made.settles(self._surveyed(self.surveys.candidates)):
            self._survey_again()

    def _request(self, tokens: int) -> StepRequest:
        known = self.surveys.candidates
        if self.admitted is None or self.progress.exceeded:
            self.memory.gauge.release()
        self.speed = rates_of(self.device, compute_dtype(self.device))  # while there is memory to measure with
        return self.memory.request(tokens, known, self.speed, self._all_seen(known), self.progress.steps == 1)

    def _held(self) -> list[PlanOption | None]:
        """What layers hold that ran in this step under a plan for its batch; None for all others."""
        same = self.admitted is not None and self.admitted.tokens == self.progress.tokens
        return [self.ran.get(id(slot)) if same else None for slot in self.layers]

    def _admit(self, ran: Sequence[PlanOption | None] = ()) -> AdmittedPlan:
        """Make the plan that layers follow from here on. ran: what layers hold already, by layer."""
        made = self.admitted = solve_from_here(self._request(self.progress.tokens), ran)
        self.allowed = self.memory.allowed()
        self.progress.exceeded = False
        self.plans += 1
        self._make_room_for(made)
        chosen, before = (option for options in made.choice.options for option in options), self.options
        self.options = {
            id(slot): option for slot, option in zip(self.layers, chosen) if not self.surveys.needs(id(slot.region))
        }
        if any(slot in before and before[slot].plan != option.plan for slot, option in self.options.items()):
            self.memory.recordings.forget()  # other graphs run from here on
        missing = made.choice.peak - made.room
        self.shortfall = None
        if not made.choice.fits and not self.progress.pressed:
            spec = "checkpointing" if self.memory.checkpointed else self.memory.spec
            self.shortfall = note("over-budget", repr(spec), shown(missing), tokens=made.tokens)
        return made

    def _make_room_for(self, made: AdmittedPlan) -> None:
        """Let recordings, kept weights and copies take the bytes that the plan leaves them."""
        memory = self.memory
        if not made.weights and memory.kept is not None and memory.kept.matrices:
            memory.kept.release()
            if memory.replays is not None:
                memory.replays.forget()  # recordings point at them
        memory.recordings.allow(made)
        self.offloading = made.choice.offloads
        if self.offload is not None:
            self.offload.ahead = made.choice.ahead


def _with_failure(notes: Sequence[Note], code: str, subject: str, error: Exception) -> list[Note]:
    """The notes and one on a failure, once."""
    return [*dict.fromkeys([*notes, note(code, subject, f"{type(error).__name__}: {str(error)[:200]}")])]


def still_serves(made: AdmittedPlan, memory: MemoryAccounting, progress: Progress, allowed: int) -> bool:
    """Whether a plan serves the next batch, too: a plan for each size of batch would compile without end.

    allowed: bytes that torch's allocator was allowed to hold when it was made.
    """
    tokens = progress.tokens
    gained = memory.allowed() - allowed if memory.bounds_all else 0  # what others gave back, or took
    moved = abs(gained) > MARGIN * allowed and not made.outlives(gained, memory.checkpointed)
    if made.for_one_step or progress.exceeded or memory.others() > GROWN * made.resident or moved:
        return False
    if not made.records_all and memory.recordings.saving(tokens) > WEIGHED * made.saving:
        return False  # now it is known what recordings would save
    if tokens > made.tokens:
        return made.choice.peak * tokens <= (made.room - made.weights) * made.tokens
    return tokens >= SHRUNK * made.tokens or not any(
        o.offloaded or o.plan not in (KEEP, KEEP_WEIGHTS) for options in made.choice.options for o in options
    )


def is_final(made: AdmittedPlan, progress: Progress, surveyed: Sequence[RegionCandidates]) -> bool:
    """Whether no survey could change a plan: every kind of layer was seen, with all its plans where none fits."""
    guessed = not made.seen and progress.steps > progress.survey_step
    return not guessed and (made.settles(surveyed) or all(found.whole for found in surveyed))
