"""The door of LLaMA-Factory's v1: a kernel by the name `tunecompile`.

kernel_config:
  name: tunecompile

`tunecompile run -- llamafactory-cli sft train.yaml` knows the name, and takes options; in code of one's own
`import tunecompile.trainers.llamafactory` does it. The trainers before v1 take callbacks.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from tunecompile.errors import MissingHost
from tunecompile.trainers.door import Door, check_host, options_of_run

check_host("llamafactory", oldest="0.9.5", newest="0.9.5")
try:
    from llamafactory.v1.plugins.model_plugins.kernels.interface import KernelPlugin
except ImportError as missing:
    raise MissingHost(door="tunecompile.trainers.llamafactory", package="llamafactory") from missing


@KernelPlugin("tunecompile").register()
def apply(model: nn.Module, **_: Any) -> nn.Module:
    """Optimize a model before LLaMA-Factory shards it; its own options choose among its own kernels."""
    Door(**(options_of_run() or {})).optimize(model)
    return model
