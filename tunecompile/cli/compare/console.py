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
from tunecompile.cli.compare.curves import merge_seeds
from tunecompile.cli.compare.render import against_table, run_table

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
        """The bar of a system and shape; that of the loading phase becomes the first one of training."""
        key = (system, label)
        if key not in self.bars:
            waiting = self.bars.pop((system, ""), None)
            self.bars[key] = self.progress.add_task(system, total=total, state="") if waiting is None else waiting
        if total:
            described = system if label in ("", "train") else f"{system} {label}"
            self.progress.update(self.bars[key], total=total, description=described)
        return self.bars[key]

    def listen(self, system: str, event: str, fields: dict) -> None:
        """Show an event of a worker."""
        if event == "step":
            step, steps = fields["step"], fields["steps"]
            loss = "" if fields["loss"] is None else f"loss {fields['loss']:.3f}  "
            state = f"{loss}{fields['seconds']:.2f} s a step"
            self.progress.update(self.bar(system, fields["label"], steps), completed=step, state=state)
            self.line(system, f"step {step} of {steps}  {state}", often=step not in (1, steps))
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

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    head, rows = run_table(merge_seeds(result["runs"]))
    table = Table("", box=None, pad_edge=False)
    for row in rows:
        table.add_column(escape(row[0]), justify="right", style="bold" if row[0].startswith("tunecompile") else "")
    for place, name in enumerate(head[1:], 1):
        table.add_row(name, *(escape(row[place]) for row in rows))
    console.print("", table, "", sep="\n")
    for verdict in result["verdicts"]:
        mark = "[green]pass[/]" if verdict["passed"] else "[bold red]FAIL[/]"
        say(f"{mark}  {escape(verdict['name'])}: [dim]{escape(verdict['detail'])}[/]")
    if "against" in result:
        show_against(result, console)
    for answer in result["answers"]:
        question, before, after = (escape(answer[name]) for name in ("question", "before", "after"))
        say(f"\n[bold]{question}[/]\n  before  {before}\n  after   {after}")
    say(f"\nThe report: {paths['html']}")


def show_against(result: dict, console: Console) -> None:
    """Print the change of each figure since the older result, and the packages whose versions changed."""
    since = against_table(result["against"], result["versions"])
    table = Table(title=escape(since.title), title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name in since.head:
        table.add_column(name, justify="right" if name in ("before", "now", "change") else "left")
    for cells, row in zip(since.rows, result["against"]["rows"]):
        style = "bold red" if row["worse"] else {APART: "dim", SAME: ""}.get(row["verdict"], "green")
        table.add_row(*map(escape, cells), style=style)
    console.print("", table, sep="\n")
