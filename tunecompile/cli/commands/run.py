"""`tunecompile run`: a training script or command as it is, with what it trains optimized."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Literal, Optional

import typer
from rich.console import Console

from tunecompile.cli.options import escape, exit_code
from tunecompile.errors import BadOption
from tunecompile.trainers.door import RUN, SITE

NOT_FOUND = (
    "no Trainer was made, and no optimizer of torch's over a model with repeated layers. Call "
    "model = tunecompile.optimize(model) before the loop."
)


def run(
    command: Annotated[
        list[str],
        typer.Argument(
            help="A script with its arguments, or a command behind --, such as -- trl sft ... or -- torchrun ..."
        ),
    ],
    memory: Annotated[
        Optional[str], typer.Option(help="Of optimize(): bytes such as 20GiB, a fraction of the GPU's memory, or auto.")
    ] = None,
    precision: Annotated[Literal["full", "fp8", "int8", "8bit"], typer.Option(help="Of optimize().")] = "full",
    verify: Annotated[
        bool, typer.Option("--verify", help="Check the gradients of the first step against fp32.")
    ] = False,
    merge_accumulation: Annotated[
        bool,
        typer.Option(
            "--merge-accumulation",
            help="Have batches that a Trainer accumulates come as one where they fit, if the step is the same.",
        ),
    ] = False,
) -> None:
    """Run a training, and optimize what it trains: by a Trainer of transformers, TRL, Lightning, or in a loop.

    In every process that the command starts. In a loop, it is the model that an optimizer of torch's is made for.
    """

    def work() -> int:
        options: dict = {"memory": memory} if memory is not None else {}
        if precision != "full":
            options["precision"] = precision
        if verify:
            options["verify"] = True
        with tempfile.TemporaryDirectory(prefix="tunecompile-run-") as folder:
            told = Path(folder) / "optimized"
            code = subprocess.call(arguments(command), env=environment(options, told, merge_accumulation))
            if not told.exists():
                why = NOT_FOUND if os.environ.get("TUNECOMPILE") != "0" else "TUNECOMPILE=0 is set."
                text = f"tunecompile run: nothing was optimized: {why}"
                Console(stderr=True).print(text, highlight=False, soft_wrap=True)
        return code

    raise typer.Exit(exit_code(work))


def arguments(command: list[str]) -> list[str]:
    """The command as a process gets it: a script is run by this Python.

    Raises:
        BadOption: there is no such script or command.
    """
    first = command[0]
    if first.endswith(".py"):
        if not Path(first).is_file():
            raise BadOption(option="COMMAND", value=escape(first), reason="there is no such file")
        return [sys.executable, *command]
    if shutil.which(first) is None:
        raise BadOption(option="COMMAND", value=escape(first), reason="there is no such command")
    return command


def environment(options: dict, told: Path, merge_accumulation: bool = False) -> dict[str, str]:
    """The environment of the command: where Python finds what adds the callback, and the options."""
    folder = str(SITE)
    path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    about = {"options": options, "told": str(told)} | ({"merge_accumulation": True} if merge_accumulation else {})
    return {**os.environ, "PYTHONPATH": path, RUN: json.dumps(about)}
