"""What `optimize` attaches to one model: settings, a list of parts, and what the parts share."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import nn

from tunecompile.compiler.backend import Executor
from tunecompile.compiler.pass_manager import MatchCount, Pass
from tunecompile.errors import NotOptimized
from tunecompile.integrations.rank_store import RankStore
from tunecompile.notes import Note
from tunecompile.planner.device_memory import Spec, gauge_of
from tunecompile.runtime.cuda_graphs.replay import GraphReplays
from tunecompile.runtime.layers.find_layers import LayerStack
from tunecompile.runtime.layers.layer_slot import LayerSlot
from tunecompile.runtime.layers.norm_slot import NormSlot
from tunecompile.runtime.layers.region import Region, merge_tallies, pieces_of
from tunecompile.runtime.loss_head import Head
from tunecompile.runtime.memory.weight_cache import WeightCache
from tunecompile.runtime.step.state import NotCopied, Step
from tunecompile.runtime.unpad.evaluation import Evaluation
from tunecompile.runtime.unpad.unpad import Unpadding

ATTRIBUTE = "_tunecompile"  #: of a model: where its `State` is
Precision = Literal["fp8", "int8", "8bit"]


class Verdicts(Protocol):
    """The result of a verification."""

    @property
    def passed(self) -> bool:
        """Whether loss and gradients are right."""
        ...

    def summary(self) -> str:
        """One line."""
        ...


Verify = Callable[[nn.Module, Mapping[str, Any]], Verdicts]  #: of a model and one batch


@dataclass(frozen=True)
class Settings:
    """The arguments of `optimize`, and the passes."""

    passes: tuple[Pass, ...]
    executor: Executor = "inductor"
    precision: Precision | None = None
    memory: Spec = None
    host_bytes: int | None = None  #: of pinned host memory; None for half of what is available
    offload_dir: Path | None = None
    host_embedding: bool = False
    generate: bool = True  #: whether `generate` runs recorded
    verify: Verify | None = None  #: called once, before the first training step


@dataclass(frozen=True)
class ModelCall:
    """One call of a module that owns layers, as a training step begins."""

    args: tuple
    kwargs: dict[str, Any]
    counts: bool = True  #: whether it counts as the step: a decoder's call does, its encoder's does not


class Part:
    """One feature of an optimized model. A feature overrides the moments it needs; there is one object of each kind for
    a model.
    """

    def attach(self, state: State) -> None:
        """At `optimize`: put hooks and slots in place."""

    def follow(self, state: State, slots: Sequence[LayerSlot]) -> None:
        """At the entry of a module that owns layers, in training and scoring steps: look for changes since the last.

        slots: of the layers that it is about to call.
        """

    def before_step(self, state: State, call: ModelCall) -> None:
        """At the model's entry, in training steps alone."""

    def notes(self, state: State) -> list[Note]:
        """For the report."""
        return []

    def detach(self, state: State) -> None:
        """At `restore`: undo all of it."""


P = TypeVar("P", bound=Part)


def give_back(state: State) -> int:
    """Give back the GPU memory that is held from step to step, as `tunecompile.free` does.

    Returns:
        Bytes that the process gave back to its GPUs.
    """
    devices = {device for slot in state.slots if (device := slot.device) is not None and device.type == "cuda"}
    before = sum(map(torch.cuda.memory_reserved, devices))
    state.replays.forget()
    state.kept.release()
    for device in devices:
        gauge_of(device).release()
    return max(0, before - sum(map(torch.cuda.memory_reserved, devices)))


def state_of(model: nn.Module) -> State:
    """The state that `optimize` attached to this model.

    Raises:
        NotOptimized: there is none.
    """
    state = getattr(model, ATTRIBUTE, None)
    if state is None:
        raise NotOptimized(type=type(model).__name__)
    return state


def is_optimized(model: nn.Module) -> bool:
    """Whether `optimize` attached anything to this very object."""
    return getattr(model, ATTRIBUTE, None) is not None


class State(NotCopied):
    """Settings, parts, and what the parts of one model share."""

    def __init__(
        self, model: nn.Module, settings: Settings, kinds: Sequence[type[Part]], store: RankStore | None = None
    ):
        self.model = model
        self.kinds = tuple(kinds)
        self._store = store
        self.reset(settings)

    def __reduce__(self) -> Any:
        return type(None), ()

    def reset(self, settings: Settings) -> None:
        """Begin anew, with nothing attached. Hooks under way keep this very object."""
        self.settings = settings
        self.memory = settings.memory  #: the budget, unless it turns out that nothing can be planned
        self.checkpointed = False  #: whether the budget is what checkpoints around all layers would need
        self.parts = tuple(kind() for kind in self.kinds)
        self.step = Step(state=weakref.ref(self))
        self.stacks: list[LayerStack] = []
        self.regions: list[Region] = []
        self.slots: list[LayerSlot] = []
        self.norms: list[NormSlot] = []  #: outside the layers
        self.heads: list[Head] = []
        self.paddings: list[Unpadding] = []
        self.evaluations: list[Evaluation] = []  #: one beside each of these
        self.replays = GraphReplays()
        self.kept = WeightCache()
        self.notes: list[Note] = []

    def part(self, kind: type[P]) -> P:
        """The part of this kind."""
        return next(part for part in self.parts if isinstance(part, kind))

    def attach(self) -> None:
        """Put everything in place."""
        for part in self.parts:
            part.attach(self)

    def detach(self) -> None:
        """Undo it."""
        for part in self.parts:
            part.detach(self)

    def reattach(self, passes: Sequence[Pass], *notes: Note) -> None:
        """Everything anew, with other passes."""
        self.detach()
        self.reset(replace(self.settings, passes=tuple(passes), verify=None))
        self.notes += notes
        self.attach()

    def follow(self, slots: Sequence[LayerSlot]) -> None:
        """A training or scoring step of some layers begins."""
        for part in self.parts:
            part.follow(self, slots)

    def before_step(self, call: ModelCall) -> None:
        """A training step begins."""
        for part in self.parts:
            part.before_step(self, call)

    @property
    def passes(self) -> tuple[Pass, ...]:
        """All passes, in order."""
        return self.settings.passes

    @property
    def precision(self) -> Precision | None:
        """Of products with frozen weights; None for the model's own."""
        return self.settings.precision

    @property
    def store(self) -> RankStore:
        """Of the ranks that train the model. Not read before the first training step, when there are adapters and
        ranks.
        """
        if self._store is None:
            self._store = RankStore.of(self.model)
        return self._store

    @property
    def has_store(self) -> bool:
        """Whether a step has read it."""
        return self._store is not None

    def base(self) -> nn.Module:
        """The model below adapters."""
        find = getattr(self.model, "get_base_model", None)
        return find() if callable(find) else self.model

    def compiled(self) -> list[Region]:
        """All regions of the report: norms outside the layers only where they run compiled."""
        return self.regions + [slot.region for slot in self.norms if slot.region.variants]

    def matches(self) -> list[MatchCount]:
        """Found and rewritten patterns, one count a family, for one layer, in the last graph compiled of each region;
        with those of heads, whose losses are fused outside the regions.
        """
        tallies = [tally for region in self.compiled() for context in pieces_of(region) for tally in context.tallies]
        return merge_tallies(tallies, [head.tally for head in self.heads])
