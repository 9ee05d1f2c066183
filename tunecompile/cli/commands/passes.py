"""`tunecompile new-pass` and `tunecompile check-pass`: begin a package of passes, and check it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console

from tunecompile.cli.new_pass import load, write
from tunecompile.cli.options import escape, exit_code
from tunecompile.verification.check_pass import check


def new_pass(
    name: Annotated[str, typer.Argument(help="Name of the package: lower case letters, digits and underscores.")],
    out: Annotated[Optional[Path], typer.Option(help="A new folder. Default: ./NAME.")] = None,
) -> None:
    """Write a package with a working pass, its test and its benchmark, to replace with your own pattern."""

    def work() -> int:
        folder = out or Path(name)
        for path in write(name, folder):
            Console().print(f"  {escape(str(path))}", highlight=False)
        Console().print(f"Check it:  tunecompile check-pass {escape(str(folder))}", highlight=False)
        return 0

    raise typer.Exit(exit_code(work))


def check_pass(
    module: Annotated[
        str,
        typer.Argument(help="A module's name, file or folder. It has PASSES, and EXAMPLES to check them with."),
    ],
) -> None:
    """Check a module's passes: examples, other spellings, near misses, the ops alone, and a model's training step."""

    def work() -> int:
        console, failed = Console(), 0
        for finding in check(*load(module)):
            failed += not finding.passed
            mark = "[green]passed[/]" if finding.passed else "[bold red]FAILED[/]"
            console.print(f"{mark}  {escape(finding.text)}", highlight=False)
        console.print(f"{failed} questions failed" if failed else "all passed")
        return 1 if failed else 0

    raise typer.Exit(exit_code(work))
