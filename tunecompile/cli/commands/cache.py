"""`tunecompile cache`: compiled code and measured choices, from one machine to others of its kind."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tunecompile.cli import cache_archive
from tunecompile.cli.options import escape, exit_code
from tunecompile.planner.device_memory import shown

cache = typer.Typer(
    no_args_is_help=True,
    help="Carry compiled code and measured choices to other machines of the same kind.",
)


@cache.command()
def save(path: Annotated[Path, typer.Argument(help="The file to write, such as first-step.zip.")]) -> None:
    """Write the caches of this user to a file, and print the SHA-256 that `load` requires."""

    def work() -> int:
        made = cache_archive.save(path)
        say(f"{made.files} files, {shown(made.size)}. On a machine with the same GPU and versions:")
        say(f"  tunecompile cache load {escape(str(path))} --sha256 {made.digest}")
        return 0

    raise typer.Exit(exit_code(work))


@cache.command()
def load(
    path: Annotated[Path, typer.Argument(help="A file that `tunecompile cache save` wrote.")],
    sha256: Annotated[str, typer.Option(help="As `save` printed it. Code in the file will run under your account.")],
) -> None:
    """Put the files of another machine's caches into those of this user. What is there stays."""

    def work() -> int:
        made = cache_archive.load(path, sha256)
        there = f", of which {made.kept} were there" if made.kept else ""
        say(f"{made.files} files{there}, {shown(made.size)}.")
        return 0

    raise typer.Exit(exit_code(work))


def say(line: str) -> None:
    """Print a line as it is."""
    Console().print(line, highlight=False, soft_wrap=True)
