"""Print a plan: a table of engines, and the recommended one."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tunecompile.estimate.multi_gpu import EnginePlan, PlanReport
from tunecompile.planner.device_memory import shown
from tunecompile.planner.solver import describe_plan

MODES = {"qlora": "QLoRA", "lora": "LoRA", "full": "all weights trained"}


def _gib(name: str) -> tuple[str, Callable[[EnginePlan], str]]:
    return name, lambda engine: f"{getattr(engine, name) / 2**30:.2f}"


def _timed(name: str, read: Callable[[EnginePlan], str]) -> tuple[str, Callable[[EnginePlan], str]]:
    return name, lambda engine: read(engine) if engine.fits else ""


COLUMNS = (  # heading, how to read it off an engine
    ("engine", lambda engine: f"{engine.engine} x {engine.gpus}" if engine.gpus > 1 else engine.engine),
    ("rows a GPU", lambda engine: f"{engine.rows:,}"),
    *map(_gib, ("weights", "gradients", "optimizer", "activations", "peak", "allowed")),
    _timed("step, ms", lambda engine: f"{engine.step_ms:,.0f}"),
    _timed("sending, ms", lambda engine: f"{engine.communication_ms:,.1f}"),
    _timed("waits", lambda engine: f"{100 * engine.share:.1f} %"),
    _timed("tokens/s", lambda engine: f"{engine.tokens_per_s:,.0f}"),
    ("rows that fit", lambda engine: f"{engine.most_rows:,}"),
)


def show(report: PlanReport, console: Console) -> None:
    """Print the report."""
    asked = report.question
    where = f"{asked.gpus} x {asked.gpu.title}" + (
        f", {asked.per_node} a machine" if asked.gpus > asked.per_node else ""
    )
    whose = " of all GPUs together" if asked.together else " a GPU" if asked.gpus > 1 else ""
    of = f"{asked.rows} x {asked.length:,} tokens{whose}"
    of += f", of which all rows share {asked.shared_prefix:,}" if asked.shared_prefix else ""
    console.print(
        f"[bold]{escape(asked.model)}[/], {MODES[asked.mode]}, {of}, on {where}: memory of the fullest GPU in GiB",
        highlight=False,
    )
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name, _ in COLUMNS:
        table.add_column(name, justify="left" if name == "engine" else "right", overflow="fold")
    for engine in report.engines:
        table.add_row(*(read(engine) for _, read in COLUMNS), style=None if engine.fits else "dim")
    console.print(table)
    for engine in report.engines:
        for line in _lines(engine):
            console.print(f"  {escape(line)}", highlight=False, soft_wrap=True)
    verdict = f"[bold green]take {report.best}[/]" if report.best else "[bold red]nothing fits[/]"
    console.print(f"{verdict}: {escape(report.reason)}", highlight=False, soft_wrap=True)
    for note in report.notes:
        console.print(f"  note: {escape(note)}", highlight=False, soft_wrap=True)


def _lines(engine: EnginePlan) -> list[str]:
    """The plans of its layers, or why it does not fit."""
    if not engine.fits:
        return [f"{engine.engine} does not fit: {shown(engine.missing)} too much. What helps: {engine.help}"]
    spec = "" if engine.memory is None else f", memory={engine.memory!r}"
    return [
        f"{engine.engine}: optimize(model{spec}): "
        + "; ".join(f"{plan['layers']} layers {describe_plan(plan)}" for plan in engine.plans)
    ]
