"""From the commands' arguments to values, and from errors to exit codes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import rich.markup
import torch
from rich.console import Console

from tunecompile.errors import BadOption, TunecompileError, need


def pick_mode(qlora: bool, lora: bool, full: bool) -> str:
    """qlora, lora or full, by the flags; qlora without any. Raises `BadOption` for several."""
    chosen = [name for name, given in (("qlora", qlora), ("lora", lora), ("full", full)) if given]
    if len(chosen) > 1:
        raise BadOption(
            option="--" + " --".join(chosen), value=True, reason="only one of --qlora, --lora and --full can hold"
        )
    return chosen[0] if chosen else "qlora"


def pick_device(device: str) -> str:
    """The device, cpu or cuda. Raises `BadOption`."""
    if device == "cuda" and not torch.cuda.is_available():
        raise BadOption(option="--device", value=device, reason="torch sees no CUDA device here; use --device cpu")
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def pick_dtype(dtype: str, device: str) -> str:
    """The dtype, float32 or bfloat16."""
    if dtype == "auto":
        return "bfloat16" if device == "cuda" else "float32"
    return dtype


def pick_rows(batch: int | None, together: int | None, gpus: int, per_node: int) -> int:
    """Rows a step: on each GPU, or `together` on all GPUs. Raises `BadOption`."""
    if batch is not None and together is not None:
        raise BadOption(
            option="--batch",
            value=batch,
            reason="--global-batch is the number of rows of all GPUs together; give one of the two",
        )
    if gpus > per_node and gpus % per_node:
        raise BadOption(
            option="--gpus", value=gpus, reason=f"machines have {per_node} each (--gpus-per-node): give a multiple"
        )
    if together is not None and together % gpus:
        raise BadOption(
            option="--global-batch",
            value=together,
            reason=f"{gpus} GPUs cannot have equal shares of it: give a multiple",
        )
    return together or batch or 1


def parse_budget(text: str | None) -> str | float | None:
    """A number between 0 and 1 is a fraction of the GPU's memory."""
    return float(text) if text and text.replace(".", "", 1).isdigit() and 0 < float(text) <= 1 else text


def parse_address(text: str) -> tuple[str, int]:
    """(host, port) of [HOST:]PORT. Raises `BadOption`."""
    host, _, port = text.rpartition(":")
    if not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise BadOption(
            option="--prometheus", value=text, reason="give PORT or HOST:PORT, such as 9400 or 0.0.0.0:9400"
        )
    return host.strip("[]") or "127.0.0.1", int(port)


def exit_code(work: Callable[[], int]) -> int:
    """Do the work and return its exit code. A user's mistake is one line and exit code 2; other errors are raised."""
    try:
        return work()
    except TunecompileError as error:
        Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)
        return 2


def escape(text: str) -> str:
    """The text without meaning as rich's markup."""
    return rich.markup.escape(text)


#: raises `MissingExtra` if a package of the report is not installed
need_packages = partial(need, "the report", "cli", "jinja2", "matplotlib", "pydantic")
