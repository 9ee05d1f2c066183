"""The door of transformers' Trainer, of TRL's trainers, and of all that are built on them: a callback."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from torch import nn

from tunecompile.errors import MissingExtra
from tunecompile.integrations.trainer_batches import calling_trainer
from tunecompile.notes import Note, note
from tunecompile.report.report import Report
from tunecompile.runtime.model_state import state_of
from tunecompile.trainers.accumulation import merge_accumulation
from tunecompile.trainers.door import Door, merges_in_run, options_of_run
from tunecompile.trainers.unneeded_backward import UnneededBackward
from tunecompile.trainers.watch import Watcher, watch

try:
    from transformers import TrainerCallback
except ImportError as missing:
    raise MissingExtra(what="tunecompile.Callback", package="transformers", extra="hf") from missing


log = logging.getLogger(__name__)


class Callback(Door, TrainerCallback):
    """Optimizes the model that a Trainer trains.

        Trainer(model, arguments, callbacks=[tunecompile.Callback(memory="auto")], ...).train()

    It does so when the Trainer has been made, before engines wrap the model; and once more when training begins, for a
    callback that was added later, or a model that `model_init` made anew. A model that was optimized before is left as
    it is. The report is `callback.report()`.

    Batches of completions whose rewards leave no gradient, GRPO's groups that are all right or all wrong, get no
    backward pass in a training of one process: their gradients are zeros, and the report counts them.

    Args:
        watch: whether the training's health is watched, as `tunecompile.watch` does.
        merge_accumulation: whether batches that the Trainer accumulates (`gradient_accumulation_steps`) come as one
            where they fit, by a prediction: the same rows, loss and gradients a step, and the same number of steps. It
            is done for losses that are sums over tokens, as Trainer and SFTTrainer have them; else nothing changes, and
            the report says why.
        options: of `tunecompile.optimize`.
    """

    def __init__(self, *, watch: bool = False, merge_accumulation: bool = False, **options: Any):
        super().__init__(**options)
        self.watches, self.merges = watch, merge_accumulation
        self.merged: Note | None = None  #: what became of accumulated batches
        self.watcher: Watcher | None = None  #: while training
        self.unneeded: UnneededBackward | None = None  #: of the Trainer that began to train

    def on_init_end(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **_: Any) -> None:
        """Optimize the model before engines wrap it, and merge accumulated batches before a loader is made."""
        self._optimize(model)
        if self.merges and self.models:
            self._tell(merge_accumulation(self.models[-1]))

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **_: Any) -> None:
        """Optimize a model that was not there at the beginning."""
        self._optimize(model)
        if self.merges and self.models:
            self._tell(self.merged or note("accumulation-kept", detail=note("added-late")))
        if self.watches and model is not None:
            self.watcher = watch(model)
        if self.unneeded is None and self.models and (trainer := calling_trainer()) is not None:
            self.unneeded = UnneededBackward(trainer)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log the report."""
        if self.watcher is not None:
            self.watcher.stop()
        if state.is_world_process_zero and self.models:
            log.info("%s", self.report())

    def report(self) -> Report:
        """As `tunecompile.report` has it, with what became of the Trainer's batches."""
        found = super().report()
        return found if self.unneeded is None else replace(found, notes=[*found.notes, *self.unneeded.notes()])

    def _optimize(self, model: nn.Module | None) -> None:
        if model is not None:
            self.models = [known for known in self.models if known is model]  # `model_init` has dropped the others
            self.optimize(model)

    def _tell(self, merged: Note) -> None:
        """Say in the report of the model that is trained what became of accumulated batches."""
        self.merged = merged
        notes = state_of(self.models[-1]).notes
        if merged not in notes:
            notes.append(merged)
            log.info("tunecompile: %s", merged)


def from_environment() -> Callback:
    """A callback with the options that `tunecompile run` was given."""
    return Callback(**(options_of_run() or {}), merge_accumulation=merges_in_run())
