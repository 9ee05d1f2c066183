"""`tunecompile monitor` and `tunecompile doctor`: the trainings on this machine, and what they need of it."""

from __future__ import annotations

import contextlib
import dataclasses
import json as json_format
from collections.abc import Sequence
from typing import Annotated, Optional

import typer
from rich.console import Console
from rich.table import Table

from tunecompile.cli.doctor import Line, examine
from tunecompile.cli.monitor.watch import watch
from tunecompile.cli.options import escape, exit_code, parse_address

COLORS = {"ok": "green", "warning": "yellow", "fail": "bold red"}


def monitor(
    interval: Annotated[
        float,
        typer.Option(min=0.1, help="Seconds between updates; with --once, how long processes have time to answer."),
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Show one table and stop.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print a line of JSON each time, not tables.")] = False,
    prometheus: Annotated[
        Optional[str],
        typer.Option(metavar="[HOST:]PORT", help="Also serve /metrics; without HOST, to this machine only."),
    ] = None,
) -> None:
    """Show GPU memory, utilisation, tokens/s and budget of your training processes on this machine."""

    def work() -> int:
        address = None if prometheus is None else parse_address(prometheus)
        with contextlib.suppress(KeyboardInterrupt):  # the way to leave it
            watch(Console(), interval, once, json, address)
        return 0

    raise typer.Exit(exit_code(work))


def doctor(json: Annotated[bool, typer.Option("--json", help="Print a list of objects, not a table.")] = False) -> None:
    """Check what a training needs: GPU, driver, packages, compilers, caches, memory. Exit with 1 if a check fails."""

    def work() -> int:
        lines = examine()
        show_lines(lines, json)
        return int(any(line.status == "fail" for line in lines))

    raise typer.Exit(exit_code(work))


def show_lines(lines: Sequence[Line], as_json: bool) -> None:
    """Print the doctor's findings, each with its remedy below."""
    if as_json:
        print(json_format.dumps([dataclasses.asdict(line) for line in lines], indent=1))
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(overflow="ellipsis")
    table.add_column(overflow="ellipsis")
    table.add_column(overflow="fold")
    for line in lines:
        table.add_row(
            f"[{COLORS[line.status]}]{line.status}[/]",
            escape(line.name),
            escape(line.found) + (f"\n[bold]{escape(line.mend)}[/]" if line.mend else ""),
        )
    Console().print(table)
