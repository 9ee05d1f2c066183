"""Progress bars of a comparison, and the summary at its end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tunecompile.cli.compare.against import APART, SAME
from tunecompile.cli.compare.render import against_table, against_title, run_table
from tunecompile.cli.compare.seeds import merge_seeds

EVERY_S = 20  # seconds between printed lines where no bar can be drawn


class Bars:
    """A progress bar for each system; on a console that is no terminal, a line from time to time."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console()
        self.bars: dict[tuple[str, str], int] = {}
        self.quiet_until: dict[str, float] = {}
        self.progress = Progress(
            TextColumn("{task.description:<24}"),
            BarColumn(bar_width=32),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )

    def __enter__(self):
        self.progress.start()
        return self

    def __exit__(self, *error):
        self.progress.stop()

    def bar(self, system: str, label: str = "", total: int | None = None) -> int:
        """The bar of a system and shape."""
        key = (system, label)
        if key not in self.bars:
            waiting = self.bars.pop(
                (system, ""), None
            )  # the bar of the loading phase becomes the first one of training
            if waiting is None:
                waiting = self.progress.add_task(system, total=total, state="")
            self.bars[key] = waiting
        if total:
            self.progress.update(
                self.bars[key], total=total, description=system if label in ("", "train") else f"{system} {label}"
            )
        return self.bars[key]

    def listen(self, system: str, event: str, fields: dict) -> None:
        """Show an event of a worker."""
        if event == "step":
            loss = "" if fields["loss"] is None else f"loss {fields['loss']:.3f}  "
            state = f"{loss}{fields['seconds']:.2f} s a step"
            self.progress.update(
                self.bar(system, fields["label"], fields["steps"]), completed=fields["step"], state=state
            )
            self.line(
                system,
                f"step {fields['step']} of {fields['steps']}  {state}",
                often=fields["step"] not in (1, fields["steps"]),
            )
        elif event in ("phase", "done"):
            text = fields.get("text") or fields["status"]
            latest = [task for (name, _), task in self.bars.items() if name == system]
            self.progress.update(latest[-1] if latest else self.bar(system), state=escape(text[:60]))
            self.line(system, text)

    def line(self, system: str, text: str, often: bool = False) -> None:
        """Print a line, unless there are bars. often: skip it if the system's last line is recent."""
        if self.console.is_terminal or (often and time.monotonic() < self.quiet_until.get(system, 0)):
            return
        self.quiet_until[system] = time.monotonic() + EVERY_S
        self.console.print(f"{system}: {escape(text)}", highlight=False, soft_wrap=True)


def show_summary(result: dict, paths: Mapping[str, Path], to: Console | None = None) -> None:
    """Print the transposed table of systems, the verdicts, and the path of the report."""
    console = to or Console()
    runs = merge_seeds(result["runs"])
    head, rows = run_table(runs)
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for row, run in zip(rows, runs):
        table.add_column(escape(row[0]), justify="right", style="bold" if run["system"] == "tunecompile" else "")
    for place, name in enumerate(head[1:], 1):
        table.add_row(name, *(escape(row[place]) for row in rows))
    console.print()
    console.print(table)
    console.print()
    for verdict in result["verdicts"]:
        mark = "[green]pass[/]" if verdict["passed"] else "[bold red]FAIL[/]"
        console.print(
            f"{mark}  {escape(verdict['name'])}: [dim]{escape(verdict['detail'])}[/]", highlight=False, soft_wrap=True
        )
    if "against" in result:
        show_against(result, console)
    for answer in result["answers"]:
        console.print(
            f"\n[bold]{escape(answer['question'])}[/]\n"
            f"  before  {escape(answer['before'])}\n  after   {escape(answer['after'])}",
            highlight=False,
            soft_wrap=True,
        )
    console.print(f"\nThe report: {paths['html']}", highlight=False, soft_wrap=True)


def show_against(result: dict, console: Console) -> None:
    """Print the change of each figure since the older result, and the packages whose versions changed."""
    head, rows = against_table(result["against"]["rows"])
    table = Table(title=against_title(result), title_justify="left", title_style="bold", box=None, pad_edge=False)
    for place, name in enumerate(head):
        table.add_column(name, justify="left" if place in (0, 1, 2, len(head) - 1) else "right")
    for cells, row in zip(rows, result["against"]["rows"]):
        style = "bold red" if row["worse"] else {APART: "dim", SAME: ""}.get(row["verdict"], "green")
        table.add_row(*map(escape, cells), style=style)
    console.print()
    console.print(table)
