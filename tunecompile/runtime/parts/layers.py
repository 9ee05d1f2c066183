"""Regions in the slots of repeated layers and of the norms outside them, or one region for a model without layers."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from tunecompile._torch.modules import empty, fill, slot_of
from tunecompile.integrations.loss_caller import liger_kinds
from tunecompile.integrations.shared_keys import KeptKeys
from tunecompile.integrations.transformers import gives_cache
from tunecompile.notes import KINDS, Note, note
from tunecompile.runtime.compile_limits import Leftovers
from tunecompile.runtime.layers.find_layers import LayerStack, find_layers, find_norms, structure
from tunecompile.runtime.layers.layer_slot import LayerSlot
from tunecompile.runtime.layers.norm_slot import NormSlot
from tunecompile.runtime.layers.owner_slot import OwnerSlot
from tunecompile.runtime.layers.region import Region
from tunecompile.runtime.layers.unused_results import UnreadKeys
from tunecompile.runtime.model_state import ModelCall, Part, State
from tunecompile.runtime.parts.first_step import FirstStepCheck
from tunecompile.runtime.step.facts import facts_without_call, read_facts, takes_cache, takes_ids
from tunecompile.runtime.step.mode import Mode, mode_of_step
from tunecompile.runtime.step.state import NotCopied
from tunecompile.runtime.watch.module_watch import TURNS

log = logging.getLogger("tunecompile")


class Layers(Part):
    """The compiled layers of a model."""

    def __init__(self) -> None:
        self.handles: list[RemovableHandle] = []
        self.entries: list[EntryHook] = []
        self.keys: list[KeptKeys] = []
        self.leftovers = Leftovers()

    def attach(self, state: State) -> None:
        state.stacks = find_layers(state.model)
        if not state.stacks:
            state.notes.append(note("no-layers-found"))
            self._attach_whole(state)
        # a decoder's call counts as the step, its encoder's does not
        longest = max(reversed(state.stacks), key=lambda stack: len(stack.members), default=None)
        for stack in state.stacks:
            hook = EntryHook(state, stack.owner, self._attach_stack(state, stack), counts=stack is longest)
            for slot in hook.slots:
                slot.entry = hook
            self.entries.append(hook)
            self.handles.append(stack.owner.register_forward_pre_hook(hook, with_kwargs=True))
        for index, region in enumerate(state.regions):
            region.effort.number = (index + 1, len(state.regions))

    def _attach_stack(self, state: State, stack: LayerStack) -> list[LayerSlot]:
        """Fill the slots of the layers, and of the norms beside them, and return them."""
        before = len(state.slots), len(state.norms)
        kinds: dict[tuple, Region] = {}
        keys = KeptKeys(stack.members)
        self.keys.append(keys)
        for index, layer in enumerate(stack.members):
            if slot_of(layer) is not None:
                state.notes.append(note("compiled-already", f"{stack.path}.{index}"))
                continue
            kind = structure(layer)
            if kind not in kinds:
                number = [str(len(kinds))] if kinds else []
                kinds[kind] = _region(state, "_".join((*stack.path.split("."), type(layer).__name__, *number)))
                state.regions.append(kinds[kind])
            slot = LayerSlot(state.step, layer, kinds[kind])
            slot.keys_read = keys.read.get(layer)
            if slot.keys_read is not None:
                slot.region.keys = slot.region.keys or UnreadKeys()
            slot.place, slot.stack, slot.first = len(state.slots), state.stacks.index(stack), index == 0
            slot.owner, slot.takes_ids = stack.owner, takes_ids(stack.owner)
            fill(layer, slot)
            state.slots.append(slot)
        for norm in find_norms(stack.owner):
            if slot_of(norm) is None:
                name = "_".join((*stack.path.split(".")[:-1], type(norm).__name__))
                region = Region(name, state.passes, state.settings.executor)
                slot = NormSlot(state.step, norm, region)
                fill(norm, slot)
                state.norms.append(slot)
        return [*state.slots[before[0] :], *state.norms[before[1] :]]

    def _attach_whole(self, state: State) -> None:
        if slot_of(state.model) is not None:
            state.notes.append(note("compiled-already", "the model"))
            return
        region = _region(state, type(state.model).__name__)
        slot = WholeSlot(state, region)
        state.regions.append(region)
        fill(state.model, slot)
        state.slots.append(slot)

    def before_step(self, state: State, call: ModelCall) -> None:
        state.kept.expect()

    def follow(self, state: State, slots: Sequence[LayerSlot]) -> None:
        """Modules inside layers may have come, gone, or got hooks, and their classes other methods."""
        self.leftovers.collect(sum(region.effort.seconds for region in state.regions))
        late = [slot.follow_modules() for slot in slots]
        for region in state.regions:
            region.classes.look()
        if any(late) and (found := note("hooks-replaced", steps=TURNS)) not in state.notes:
            state.notes.append(found)

    def notes(self, state: State) -> list[Note]:
        """Which modules run kernels of another package, and which layers are never called."""
        kinds = liger_kinds(state.model)
        never = [found for entry in self.entries if entry.trained for found in entry.never_called()]
        return [note("liger-kernels", ", ".join(kinds))] * bool(kinds) + never

    def detach(self, state: State) -> None:
        for handle in self.handles:
            handle.remove()
        for slot in (*state.norms, *state.slots):
            empty(slot.layer, slot)
            slot.release()
        for each in self.keys:
            each.restore()
        self.entries.clear()
        state.replays.forget()  # Dynamo keeps compiled graphs, and so their recordings: gigabytes beside the next model
        state.kept.release()


def _region(state: State, name: str) -> Region:
    return Region(name, state.passes, state.settings.executor, state.replays, state.precision, state.kept)


class EntryHook(NotCopied):
    """Forward pre-hook of the module that owns the layers: decides whether this is a training step, and keeps a cache
    out of it.
    """

    def __init__(self, state: State, owner: nn.Module, slots: Sequence[LayerSlot], counts: bool):
        self.state, self.owner, self.slots, self.counts = state, owner, slots, counts
        self.entered = False  #: whether the owner was ever called
        self.trained = False  #: and whether in a training step
        self.told = False  #: whether the first step's calls were looked at

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict | None = None) -> tuple[tuple, dict] | None:
        """kwargs: None where the hook was taken out while it ran."""
        step = self.state.step
        step.makes_cache = False
        if step.repeats:
            return self._without_cache(module, args, kwargs)
        self.entered = True
        if isinstance(slot_of(module), OwnerSlot):  # which has decided
            self._enter(step.mode)
        else:
            self._enter(mode_of_step(read_facts(module, args, kwargs or {}, step.elsewhere)))
        if not step.active:
            for budget in step.budgets if not step.elsewhere and step.mode is not Mode.SCORE else ():
                budget.pause()
            return self._without_cache(module, args, kwargs) if step.evaluates else None
        if self.trained and not self.told:
            self.told = True
            for never in self.never_called():
                log.warning("tunecompile: %s. %s", never, KINDS[never.code].mend)
        self.trained = True
        self.state.before_step(ModelCall(args, kwargs or {}, self.counts))
        return self._without_cache(module, args, kwargs)

    def never_called(self) -> list[Note]:
        """Kinds of layers of which no call went through a slot."""
        slots = [slot for slot in self.slots if not isinstance(slot, NormSlot)]
        called = {slot.region.name for slot in slots if slot.called}
        counts = Counter(slot.region.name for slot in slots if slot.region.name not in called)
        return [note("never-called", name, count=count) for name, count in counts.items()]

    def begin(self) -> None:
        """Layers are called without their owner: by a loop over a Sequential, or in its `forward`."""
        step = self.state.step
        if step.repeats or step.evaluates:
            return
        step.makes_cache = False
        self._enter(mode_of_step(facts_without_call(self.owner)))
        if step.active:
            self.state.before_step(ModelCall((), {}, self.counts))

    def _enter(self, mode: Mode) -> None:
        """A call begins, which runs so. Engines take a model at its first training step: what an evaluation before it
        saw is looked at anew.
        """
        step = self.state.step
        step.enter(self.owner, mode)
        if step.mode is Mode.EAGER:
            return
        step.early |= step.evaluates and not step.trained
        if step.active and not step.trained:
            for slot in (*self.state.slots, *self.state.norms) if step.early else ():
                slot.look_anew()
        step.trained |= step.active
        self.state.follow(self.slots)

    def _without_cache(self, module: nn.Module, args: tuple, kwargs: dict | None) -> tuple[tuple, dict] | None:
        """Training needs no cache, and layers take none (`without_cache`).

        With one, transformers does not look for packed sequences in the positions: there the model goes on making it,
        so that sequences that see each other go on doing so.
        """
        if kwargs is None or not takes_cache(module) or len(args) > 2:
            return None
        if kwargs.get("use_cache") is not None or gives_cache(kwargs):
            return None
        self.state.step.drops_cache |= bool(getattr(getattr(module, "config", None), "use_cache", False))
        mask = args[1] if len(args) > 1 else kwargs.get("attention_mask")
        if mask is None and kwargs.get("position_ids") is not None:
            self.state.step.makes_cache = True
            return None
        return args, {**kwargs, "use_cache": False}


class WholeSlot(LayerSlot):
    """The slot of a model without repeated layers: entry and region are one."""

    def __init__(self, state: State, region: Region):
        super().__init__(state.step, state.model, region)
        self.state = state

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.state.part(FirstStepCheck).check(self.state, args, kwargs)
        if (slot := slot_of(self.layer)) is not self and slot is not None:  # a rewrite was switched off
            return slot(*args, **kwargs)
        self.step.enter(self.layer, mode_of_step(facts_without_call(self.layer)))
        if not self.step.active or self.step.recovery is None:
            return self._run_step(args, kwargs)
        return self.step.recovery.attempt(lambda: self._run_step(args, kwargs), restarts=True)

    def _run_step(self, args: tuple, kwargs: dict) -> Any:
        if self.step.active:
            self.state.follow([self])
            self.state.before_step(ModelCall(args, kwargs))
        return super().__call__(*args, **kwargs)

    def differentiable(self, args: tuple, kwargs: dict) -> tuple[tuple, dict, None]:
        """There are no other layers to be like."""
        return args, kwargs, None
