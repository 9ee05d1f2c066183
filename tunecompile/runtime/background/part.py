"""At each step: is there code for what runs op by op?"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence

from tunecompile._torch.background.deferral import can_defer
from tunecompile._torch.distributed import several
from tunecompile._torch.inductor import keeps_code
from tunecompile.notes import Note, note
from tunecompile.runtime.background.waiting import Change
from tunecompile.runtime.layers.layer_slot import LayerSlot
from tunecompile.runtime.layers.region import Region
from tunecompile.runtime.model_state import ModelCall, Part, State


class BackgroundCode(Part):
    """Starts and ends the process, and has regions change over between steps.

    A region changes over by being compiled anew, as in the next run of this training: with all guards, recordings and
    caches that belong to its code. So a forward and its backward are always of one kind, whichever of them comes next.
    """

    def attach(self, state: State) -> None:
        if state.background is None:
            return
        state.background.refused = _refused(state)
        if state.background.refused is None:
            with contextlib.suppress(OSError):  # each order tries it again, and tells why it fails
                state.background.compiler.start()

    def follow(self, state: State, slots: Sequence[LayerSlot]) -> None:
        """A forward without gradients may be one that a checkpoint repeats with gradients, after a change."""
        if state.background is not None:
            state.background.compiler.draws = False

    def before_step(self, state: State, call: ModelCall) -> None:
        """Comes behind the budget's, which may be made now."""
        background = state.background
        if background is None:
            return
        background.step += call.counts
        background.compiler.draws = True
        background.refused = _refused(state)
        waiting = [
            (region, key, variant)
            for region in _regions(state)
            for key, variant in region.variants.items()
            if variant.jobs
        ]
        if waiting:
            background.compiler.look()
        for region, key, variant in waiting:
            over = all(job.answer is not None for job in variant.jobs) or background.refused is not None
            if over and region.variants.get(key) is variant:  # it may have gone with another one
                self._change_over(state, region, key, variant.jobs)

    def _change_over(self, state: State, region: Region, key: tuple, jobs: list) -> None:
        background = state.background
        assert background is not None
        errors = [job.answer.error for job in jobs if job.answer is not None and job.answer.error]
        error = errors[0] if errors else str(background.refused or "")
        seconds = time.monotonic() - min(job.began for job in jobs)
        background.note_change(Change(region.name, background.step, seconds, error), key)
        region.change_over(key)

    def notes(self, state: State) -> list[Note]:
        """Which regions have changed over, which wait, and why code comes first all the same."""
        background = state.background
        if background is None:
            return []
        told = [] if background.refused is None else [note("compiled-first", detail=background.refused)]
        told += [change.note for change in background.changes]
        waiting = [region.name for region in _regions(state) if any(v.jobs for v in region.variants.values())]
        return told + [note("waits-for-code", name) for name in dict.fromkeys(waiting)]

    def detach(self, state: State) -> None:
        if state.background is not None:
            state.background.compiler.close()


def _regions(state: State) -> list[Region]:
    return [*state.regions, *(slot.region for slot in state.norms)]


def _refused(state: State) -> Note | None:
    """Why code is generated before it runs, as without a background."""
    if state.settings.executor != "inductor":
        return note("no-code-at-all")
    if state.memory is not None or state.step.budgets:
        return note("memory-is-planned")
    if state.settings.verify is not None:
        return note("code-is-verified")
    if several():
        return note("ranks-compile-together")
    if not keeps_code():
        return note("no-code-cache")
    if not can_defer() or os.name != "posix":
        return note("cannot-defer")
    return None
