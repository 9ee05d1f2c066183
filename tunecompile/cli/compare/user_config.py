"""`tunecompile compare --config train.yaml`: the options of a run that TRL's commands or axolotl take from a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunecompile.errors import BadOption, MissingExtra


@dataclass(frozen=True)
class UserConfig:
    """What was taken over from a file, and what was not."""

    host: str  #: trl or axolotl
    options: dict[str, Any]  #: of `compare`, by the names of its parameters
    job: dict[str, Any]  #: fields of the job that no option sets
    left: list[str] = field(default_factory=list)  #: keys that compare has nothing for


def _positive(value: Any) -> int | None:
    return int(value) if int(value) > 0 else None


def _packed(value: Any) -> str:
    return "packed" if value else "padded"


def _data(value: Any) -> Path | None:
    """A local file of JSON Lines; None for a data set of the hub."""
    return Path(value) if value and str(value).endswith((".jsonl", ".json")) else None


def _dtype(value: Any) -> str | None:
    name = "bfloat16" if value is True else str(value).removeprefix("torch.")
    return name if name in ("float32", "bfloat16") else None


Reader = tuple[str, Callable[[Any], Any]]
SHARED: dict[str, Reader] = {
    "learning_rate": ("lr", float),
    "seed": ("seed", int),
    "gradient_checkpointing": ("gradient_checkpointing", bool),
    "lora_r": ("rank", _positive),
    "lora_alpha": ("alpha", _positive),
    "bf16": ("dtype", _dtype),
}
TRL: dict[str, Reader] = {
    **SHARED,
    "model_name_or_path": ("model", str),
    "dataset_name": ("data", _data),
    "per_device_train_batch_size": ("batch", _positive),
    "max_length": ("seq_len", _positive),
    "max_seq_length": ("seq_len", _positive),
    "packing": ("batching", _packed),
    "dtype": ("dtype", _dtype),
    "torch_dtype": ("dtype", _dtype),
}
AXOLOTL: dict[str, Reader] = {
    **SHARED,
    "base_model": ("model", str),
    "micro_batch_size": ("batch", _positive),
    "sequence_len": ("seq_len", _positive),
    "sample_packing": ("batching", _packed),
}
OF_JOB = ("rank", "alpha")
READ_APART = {"use_peft", "load_in_4bit", "load_in_8bit", "adapter", "datasets", "rl"}
#: how long a run is, where it writes, and what does not change a step
SILENT = {"max_steps", "num_epochs", "num_train_epochs", "output_dir", "logging_steps", "report_to", "plugins"}


def read_config(path: Path) -> UserConfig:
    """Read a file of TRL's commands (`model_name_or_path`) or of axolotl (`base_model`).

    Raises:
        MissingExtra: there is no reader of YAML.
        BadOption: the file is not there, is no YAML, or is of neither; or it wants weights in 8 bits.
    """
    try:
        import yaml
    except ImportError as missing:
        raise MissingExtra(what="compare --config", package="pyyaml", extra="hf") from missing

    def refused(reason: str) -> BadOption:
        return BadOption(option="--config", value=str(path), reason=reason)

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise refused(f"it cannot be read ({error})") from error
    if not isinstance(found, Mapping) or not {"base_model", "model_name_or_path"} & found.keys():
        raise refused("it names neither model_name_or_path (TRL) nor base_model (axolotl)")
    if found.get("load_in_8bit"):
        raise refused("compare has no systems with weights in 8 bits")
    host, table = ("axolotl", AXOLOTL) if "base_model" in found else ("trl", TRL)
    options: dict[str, Any] = {"qlora": False, "lora": False, "full": False, _mode(host, found): True}
    for key, (name, read) in table.items():
        if found.get(key) not in (None, "", "auto") and (value := read(found[key])) is not None:
            options[name] = value
    if data := _first_data(found):
        options["data"] = data
    if host == "axolotl" and found.get("rl"):
        options["loss"] = str(found["rl"])
    left = [key for key in found if key not in table and key not in READ_APART | SILENT]
    return UserConfig(host, options, {name: options.pop(name) for name in OF_JOB if name in options}, left)


def _mode(host: str, found: Mapping[str, Any]) -> str:
    adapted = found.get("adapter") in ("lora", "qlora") if host == "axolotl" else bool(found.get("use_peft"))
    packed = found.get("load_in_4bit") or found.get("adapter") == "qlora"
    return "full" if not adapted else "qlora" if packed else "lora"


def _first_data(found: Mapping[str, Any]) -> Path | None:
    """The first local file among several data sets, which both hosts list alike."""
    for each in found.get("datasets") or ():
        if isinstance(each, Mapping):
            files = each.get("data_files")
            names = [each.get("path"), *(files if isinstance(files, list) else [files])]
            if path := next(filter(None, map(_data, names)), None):
                return path
    return None
