"""The door of axolotl: a plugin, with keys of its own in the YAML.

plugins:
  - tunecompile.trainers.axolotl.Plugin
tunecompile:
  memory: 20GiB
"""

from __future__ import annotations

from typing import Any, Literal

from tunecompile.errors import HostOptions, MissingHost
from tunecompile.integrations.registered import register
from tunecompile.trainers.door import check_host
from tunecompile.trainers.huggingface import Callback

try:
    from axolotl.integrations.base import BasePlugin
    from pydantic import BaseModel, ConfigDict  # axolotl requires it
except ImportError as missing:
    raise MissingHost(door="tunecompile.trainers.axolotl", package="axolotl") from missing


#: axolotl's own kernels, by their keys: layers that have them are not recognised, or are no longer the model's
_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")
_OTHERS = ("use_scattermoe", "use_sonicmoe", "expert_backend", "torch_compile")


class Options(BaseModel):
    """What stands under `tunecompile:`, the arguments of `tunecompile.optimize`."""

    model_config = ConfigDict(extra="forbid")

    memory: str | int | float | None = None
    host_memory: str | int | float | None = None
    offload_dir: str | None = None
    host_embedding: bool = False
    precision: Literal["fp8", "int8", "8bit"] | None = None
    verify: bool = False
    executor: Literal["inductor", "eager"] = "inductor"


class Arguments(BaseModel):
    """The keys that the plugin adds to axolotl's configuration."""

    tunecompile: Options | None = None


class Plugin(BasePlugin):
    """Adds the callback to axolotl's trainer.

    Raises:
        HostTooOld: axolotl is older than 0.12.
        HostOptions: the configuration switches kernels of axolotl's on, for the same layers.
    """

    def register(self, cfg: dict) -> None:
        """Refuse kernels of axolotl's, and keep it from choosing some by itself, which it does for what is unset.

        `attn_implementation: tunecompile` and `experts_implementation: tunecompile` are known from then on.
        """
        check_host("axolotl", oldest="0.12", newest="0.19")
        if clashing := clashes(cfg):
            raise HostOptions(host="axolotl", options=", ".join(clashing))
        cfg.update(dict.fromkeys(_KERNELS, False))
        register()

    def get_input_args(self) -> str:
        """The class of our keys, which axolotl validates."""
        return "tunecompile.trainers.axolotl.Arguments"

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Callback]:
        """The callback, with the options of the YAML."""
        return [Callback(**Options(**(cfg.get("tunecompile") or {})).model_dump())]


def clashes(cfg: dict) -> list[str]:
    """The keys that are on, of what may not be."""
    keys = [key for key in cfg if key in (*_KERNELS, *_OTHERS) or key.startswith(("liger_", "unsloth_"))]
    plugins = [name for name in cfg.get("plugins") or () if "LigerPlugin" in name]
    return [*(key for key in keys if cfg[key]), *(f"plugins: {name}" for name in plugins)]
