"""The door of Lightning's Trainer and of Fabric: a callback."""

from __future__ import annotations

import logging
import os
from typing import Any

from torch import nn

from tunecompile.errors import MissingHost
from tunecompile.trainers.door import Door, check_host, options_of_run
from tunecompile.trainers.watch import Watcher, watch

try:
    from lightning.pytorch.callbacks import Callback as HostCallback

    HOST = "lightning"
except ImportError:
    try:
        from pytorch_lightning.callbacks import Callback as HostCallback

        HOST = "pytorch-lightning"
    except ImportError as missing:
        raise MissingHost(door="tunecompile.trainers.lightning", package="lightning") from missing


log = logging.getLogger(__name__)


class Callback(Door, HostCallback):
    """Optimizes the models that a LightningModule holds, or that Fabric sets up.

        Trainer(callbacks=[tunecompile.trainers.lightning.Callback(memory="auto")]).fit(module, loader)
        Fabric(callbacks=[tunecompile.trainers.lightning.Callback()])

    It does so before the strategy wraps the module, and looks once more when fitting begins, for models that
    `configure_model` made. In Fabric it does so in `fabric.setup`. The report is `callback.report()`.

    Args:
        watch: whether the health of the training is watched, as `tunecompile.watch` does.
        options: of `tunecompile.optimize`.

    Raises:
        HostTooOld: Lightning is older than 2.4.
    """

    def __init__(self, *, watch: bool = False, **options: Any):
        check_host(HOST, oldest="2.4", newest="2.6")
        super().__init__(**options)
        self.watches = watch
        self.watchers: dict[int, Watcher] = {}  #: while training, by the identity of their model

    def optimize(self, model: nn.Module) -> None:
        """Optimize a model, once, and watch it."""
        super().optimize(model)
        if self.watches and id(model) not in self.watchers:
            self.watchers[id(model)] = watch(model)

    def setup(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        """Optimize before the strategy wraps the module."""
        if stage == "fit":
            self.optimize_parts(pl_module)

    def on_fit_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Optimize models that were not there at setup; say so where there are none."""
        self.optimize_parts(pl_module)
        if not self.models and os.environ.get("TUNECOMPILE") != "0":
            log.warning("tunecompile: no model with repeated layers was found in %s", type(pl_module).__name__)

    def on_fit_end(self, trainer: Any, pl_module: nn.Module) -> None:
        """Log the report."""
        for watcher in self.watchers.values():
            watcher.stop()
        self.watchers = {}
        if trainer.is_global_zero and self.models:
            log.info("%s", self.report())

    def on_after_setup(self, fabric: Any, module: nn.Module) -> None:
        """Optimize what Fabric has set up: the module inside of its wrappers."""
        self.optimize_parts(getattr(module, "module", module))


def from_environment() -> list[Callback]:
    """The entry point of Lightning's callback factories: a callback under the command, or with TUNECOMPILE=1."""
    options = options_of_run()
    return [] if options is None else [Callback(**options)]
