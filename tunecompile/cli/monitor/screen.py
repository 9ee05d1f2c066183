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
    """GPUs or the reason why there are none, host memory, and for each optimized model its speed and its memory. Fits 80 columns."""
    parts: list[RenderableType] = [
        _gpus(snapshot) if snapshot.gpus else Text(snapshot.why_no_gpu or "", style="yellow")
    ]
    if snapshot.host_total:
        parts.append(Text(f"host memory {shown(snapshot.host_used)} of {shown(snapshot.host_total)}", style="dim"))
    if snapshot.processes:
        parts += ["", _speed(snapshot), "", _memory(snapshot)]
    else:
        parts += ["", Text("no optimized model has begun a training step since this was asked", style="dim")]
    return Group(*parts)


def _table(*columns: str, left: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in columns:
        table.add_column(
            name, justify="left" if name in left else "right", no_wrap=name != "model", overflow="ellipsis"
        )  # which gives way
    return table


def _gpus(snapshot: MachineSnapshot) -> Table:
    table = _table("GPU", "", "memory", "in use", "busy", left=("GPU", "", "memory"))
    for gpu in snapshot.gpus:
        known = gpu.used is not None and gpu.total
        table.add_row(
            str(gpu.index),
            escape(gpu.name),
            _bar(gpu.used, gpu.total) if known else "",
            f"{shown(gpu.used)} of {shown(gpu.total)}" if known else "?",
            "?" if gpu.busy is None else f"{gpu.busy} %",
        )
    return table


def _speed(snapshot: MachineSnapshot) -> Table:
    table = _table("pid", "model", "on", "rank", "step", "tokens/s", "ms a step", "", left=("model", "on", ""))
    indices = {gpu.uuid: f"GPU {gpu.index}" for gpu in snapshot.gpus}
    for told in (process.status for process in snapshot.processes):
        quiet = snapshot.time - told.updated
        table.add_row(
            str(told.pid),
            escape(told.model),
            indices.get(told.gpu or "", told.device),
            _number(told.rank, "d"),
            f"{told.steps:,}",
            _number(told.tokens_per_s, ",.0f"),
            _number(told.step_ms, ",.1f"),
            Text(f"idle {quiet:,.0f} s" if quiet > QUIET else "", style="yellow"),
        )
    return table


def _memory(snapshot: MachineSnapshot) -> Table:
    table = _table("pid", "now", "peak", "predicted", "budget", "", left=("",))
    for process in snapshot.processes:
        told = process.status
        now = (
            f"{shown(process.resident)} (host)"
            if told.allocated is None and process.resident
            else _bytes(told.allocated)
        )
        over = bool(told.measured_peak and told.budget and told.measured_peak > told.budget)
        table.add_row(
            str(told.pid),
            now,
            Text(_bytes(told.measured_peak), style="bold red" if over else ""),
            _bytes(told.predicted_peak),
            _bytes(told.budget) or escape(told.memory or ""),
            _bar(told.allocated, told.budget) if told.allocated and told.budget else "",
        )
    return table


def _bar(used: int, total: int) -> ProgressBar:
    return ProgressBar(total, min(used, total), width=16, complete_style="cyan", finished_style="cyan")


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _bytes(value: int | None) -> str:
    return "" if value is None else shown(value)


def as_json(snapshot: MachineSnapshot) -> str:
    """One line: bytes, milliseconds, seconds since the epoch."""
    return json.dumps(asdict(snapshot))
