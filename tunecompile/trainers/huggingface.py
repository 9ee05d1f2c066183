"""The door of transformers' Trainer, of TRL's trainers, and of all that are built on them: a callback."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from torch import nn

from tunecompile.api import optimize, report
from tunecompile.errors import MissingExtra, NotOptimized
from tunecompile.report.report import Report
from tunecompile.trainers.names import RUN

try:
    from transformers import TrainerCallback
except ImportError as missing:
    raise MissingExtra(what="tunecompile.Callback", package="transformers", extra="hf") from missing

__all__ = ["Callback", "from_environment"]

log = logging.getLogger(__name__)


class Callback(TrainerCallback):
    """Optimizes the model that a Trainer trains.

        Trainer(model, arguments, callbacks=[tunecompile.Callback(memory="auto")], ...).train()

    It does so when the Trainer has been made, before engines wrap the model; and once more when training begins, for a
    callback that was added later, or a model that `model_init` made anew. A model that was optimized before is left as
    it is. The report is `callback.report()`.

    Args:
        options: of `tunecompile.optimize`.
    """

    def __init__(self, **options: Any):
        self.options = options
        self.model: nn.Module | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **_: Any) -> None:
        """Optimize the model before engines wrap it."""
        self._optimize(model)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **_: Any) -> None:
        """Optimize a model that was not there at the beginning."""
        self._optimize(model)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log the report."""
        if state.is_world_process_zero and self.model is not None:
            log.info("%s", self.report())

    def _optimize(self, model: nn.Module | None) -> None:
        if model is None or model is self.model:
            return
        self.model = optimize(model, **self.options)
        log.info("tunecompile optimizes %s", type(model).__name__)
        if RUN in os.environ:
            with Path(json.loads(os.environ[RUN])["told"]).open("a", encoding="utf-8") as file:
                file.write(f"{type(model).__name__}\n")

    def report(self) -> Report:
        """What was found, rewritten and refused.

        Raises:
            NotOptimized: no Trainer was given this callback yet.
        """
        if self.model is None:
            raise NotOptimized(type="callback's model")
        return report(self.model)


def from_environment() -> Callback:
    """A callback with the options that `tunecompile run` was given."""
    return Callback(**json.loads(os.environ[RUN])["options"])
