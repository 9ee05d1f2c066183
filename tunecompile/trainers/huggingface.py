"""The door of transformers' Trainer, of TRL's trainers, and of all that are built on them: a callback."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from tunecompile.errors import MissingExtra
from tunecompile.trainers.door import Door, options_of_run
from tunecompile.trainers.watch import Watcher, watch

try:
    from transformers import TrainerCallback
except ImportError as missing:
    raise MissingExtra(what="tunecompile.Callback", package="transformers", extra="hf") from missing

__all__ = ["Callback", "from_environment"]

log = logging.getLogger(__name__)


class Callback(Door, TrainerCallback):
    """Optimizes the model that a Trainer trains.

        Trainer(model, arguments, callbacks=[tunecompile.Callback(memory="auto")], ...).train()

    It does so when the Trainer has been made, before engines wrap the model; and once more when training begins, for a
    callback that was added later, or a model that `model_init` made anew. A model that was optimized before is left as
    it is. The report is `callback.report()`.

    Args:
        watch: whether the training's health is watched, as `tunecompile.watch` does.
        options: of `tunecompile.optimize`.
    """

    def __init__(self, *, watch: bool = False, **options: Any):
        super().__init__(**options)
        self.watches = watch
        self.watcher: Watcher | None = None  #: while training

    def on_init_end(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **_: Any) -> None:
        """Optimize the model before engines wrap it."""
        self._optimize(model)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **_: Any) -> None:
        """Optimize a model that was not there at the beginning."""
        self._optimize(model)
        if self.watches and model is not None:
            self.watcher = watch(model)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log the report."""
        if self.watcher is not None:
            self.watcher.stop()
        if state.is_world_process_zero and self.models:
            log.info("%s", self.report())

    def _optimize(self, model: nn.Module | None) -> None:
        if model is not None:
            self.models = [known for known in self.models if known is model]  # `model_init` has dropped the others
            self.optimize(model)


def from_environment() -> Callback:
    """A callback with the options that `tunecompile run` was given."""
    return Callback(**(options_of_run() or {}))
