"""A snapshot as tables for a terminal, and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tunecompile.cli.monitor.gpu import MachineSnapshot
from tunecompile.planner.device_memory import shown

QUIET = 30.0  #: seconds without a step after which a process is shown as idle


def screen(snapshot: MachineSnapshot) -> RenderableType:
    """Tables of GPUs, host memory, and speed and memory of each optimized model, in 80 columns."""
    parts: list[RenderableType] = [
        _gpus(snapshot) if snapshot.gpus else Text(snapshot.why_no_gpu or "", style="yellow")
    ]
    parts.append(Text(f"host memory {shown(snapshot.host_used)} of {shown(snapshot.host_total)}", style="dim"))
    if snapshot.processes:
        parts += ["", _speed(snapshot), "", _memory(snapshot), *_health(snapshot)]
    else:
        parts += ["", Text("no optimized model has begun a training step since the monitor started", style="dim")]
    return Group(*parts)


def _table(*columns: str, left: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in columns:
        justify = "left" if name in left else "right"
        table.add_column(name, justify=justify, no_wrap=name != "model", overflow="ellipsis")  # only `model` shrinks
    return table


def _gpus(snapshot: MachineSnapshot) -> Table:
    table = _table("GPU", "", "memory", "in use", "busy", left=("GPU", "", "memory"))
    for gpu in snapshot.gpus:
        bar, used = "", "?"
        if gpu.used is not None and gpu.total:
            bar, used = _bar(gpu.used, gpu.total), f"{shown(gpu.used)} of {shown(gpu.total)}"
        table.add_row(str(gpu.index), escape(gpu.name), bar, used, "?" if gpu.busy is None else f"{gpu.busy} %")
    return table


def _speed(snapshot: MachineSnapshot) -> Table:
    table = _table("pid", "model", "on", "rank", "step", "tokens/s", "ms a step", "", left=("model", "on", ""))
    indices = {gpu.uuid: f"GPU {gpu.index}" for gpu in snapshot.gpus}
    for status in (process.status for process in snapshot.processes):
        quiet = snapshot.time - status.updated
        table.add_row(
            str(status.pid),
            escape(status.model),
            indices.get(status.gpu or "", status.device),
            _number(status.rank, "d"),
            f"{status.steps:,}",
            _number(status.tokens_per_s, ",.0f"),
            _number(status.step_ms, ",.1f"),
            Text(f"idle {quiet:,.0f} s" if quiet > QUIET else "", style="yellow"),
        )
    return table


def _memory(snapshot: MachineSnapshot) -> Table:
    table = _table("pid", "now", "peak", "predicted", "budget", "", left=("",))
    for process in snapshot.processes:
        status = process.status
        now = (
            f"{shown(process.resident)} (host)"
            if status.allocated is None and process.resident
            else _bytes(status.allocated)
        )
        over = bool(status.measured_peak and status.budget and status.measured_peak > status.budget)
        table.add_row(
            str(status.pid),
            now,
            Text(_bytes(status.measured_peak), style="bold red" if over else ""),
            _bytes(status.predicted_peak),
            _bytes(status.budget) or escape(status.memory or ""),
            _bar(status.allocated, status.budget) if status.allocated and status.budget else "",
        )
    return table


def _health(snapshot: MachineSnapshot) -> list[RenderableType]:
    """The last lines of `tunecompile.watch`, by process."""
    lines = [
        Text(f"{process.status.pid}  {line}", style="yellow")
        for process in snapshot.processes
        for line in process.status.findings
    ]
    return ["", *lines] if lines else []


def _bar(used: int, total: int) -> ProgressBar:
    return ProgressBar(total, min(used, total), width=16, complete_style="cyan", finished_style="cyan")


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _bytes(value: int | None) -> str:
    return "" if value is None else shown(value)


def as_json(snapshot: MachineSnapshot) -> str:
    """The snapshot as a line of JSON: bytes, milliseconds, seconds since the epoch."""
    return json.dumps(asdict(snapshot))
