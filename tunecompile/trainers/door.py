"""What the doors share: which models of a host's object are trained, and what became of them."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from tunecompile.api import optimize, report
from tunecompile.errors import HostTooOld, NotOptimized
from tunecompile.report.report import Report
from tunecompile.runtime.layers.find_layers import find_layers
from tunecompile.runtime.model_state import is_optimized

log = logging.getLogger(__name__)

#: the variable with a JSON: `options` of `optimize`, `merge_accumulation`, and `told`, a file to which each process
#: writes what it optimizes
RUN = "TUNECOMPILE_RUN"
SITE = Path(__file__).parent / "site"  #: the folder that `tunecompile run` puts first on Python's path


class Door:
    """Options of `optimize`, and the models that they were applied to."""

    def __init__(self, **options: Any):
        self.options = options
        self.models: list[nn.Module] = []  #: that this door has met, each once

    def optimize(self, model: nn.Module) -> None:
        """Optimize a model, once. One that was optimized before is left as it is, and TUNECOMPILE=0 leaves all."""
        if os.environ.get("TUNECOMPILE") == "0" or any(model is known for known in self.models):
            return
        self.models.append(optimize(model, **self.options))
        log.info("tunecompile optimizes %s", type(model).__name__)
        if RUN in os.environ:
            with Path(json.loads(os.environ[RUN])["told"]).open("a", encoding="utf-8") as file:
                file.write(f"{type(model).__name__}\n")

    def optimize_parts(self, host: nn.Module) -> None:
        """Optimize what a host's module holds: see `trained`."""
        for model in trained(host):
            self.optimize(model)

    def report(self) -> Report:
        """What was found, rewritten and refused in the model that was met last; `models` has the others.

        Raises:
            NotOptimized: no model was met yet.
        """
        if not self.models:
            raise NotOptimized(type="callback's model")
        return report(self.models[-1])


def trained(host: nn.Module) -> list[nn.Module]:
    """The models of a host's module (a LightningModule, an engine's wrapper, a class of the user's) to be optimized.

    These are the outermost models with output embeddings, such as those of transformers and PEFT, since head and loss
    are found by them; if there is none, the module itself, where layers repeat. What has nothing to train, or is
    optimized in part by the user, is left alone.
    """
    if is_optimized(host):
        return [host]
    found = list(_with_heads(host)) or ([host] if find_layers(host) else [])
    trained = [model for model in found if any(parameter.requires_grad for parameter in model.parameters())]
    return [each for each in trained if is_optimized(each) or not any(map(is_optimized, each.modules()))]


def _with_heads(module: nn.Module) -> Iterator[nn.Module]:
    if callable(getattr(module, "get_output_embeddings", None)):
        yield module
    else:
        for child in module.children():
            yield from _with_heads(child)


def held_by(optimizer: Optimizer) -> set[int]:
    """The identities of an optimizer's parameters."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def options_of_run() -> dict[str, Any] | None:
    """The options that `tunecompile run` was given; {} with TUNECOMPILE=1; None without either."""
    if RUN in os.environ:
        return json.loads(os.environ[RUN])["options"]
    return {} if os.environ.get("TUNECOMPILE") == "1" else None


def merges_in_run() -> bool:
    """Whether `tunecompile run` was told to merge accumulated batches."""
    return bool(json.loads(os.environ.get(RUN, "{}")).get("merge_accumulation"))


def check_host(package: str, oldest: str, newest: str) -> None:
    """Look at the version of a door's host, as the door is opened.

    Args:
        package: as it was installed.
        oldest: first version that has what the door uses.
        newest: last version that it was tested with. A newer one is tried, with a warning.

    Raises:
        HostTooOld: the installed version is older.
    """
    from packaging.version import Version  # hosts require it

    try:
        installed = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # run from its sources
        return
    here, first, last = (Version(version).release for version in (installed, oldest, newest))
    if here < first:
        raise HostTooOld(package=package, installed=installed, oldest=oldest)
    if here[:2] > last[:2]:
        log.warning(
            "tunecompile: %s %s is newer than %s, the last version that this door was tested with. If it fails, call "
            "tunecompile.optimize(model) yourself.",
            package,
            installed,
            newest,
        )
