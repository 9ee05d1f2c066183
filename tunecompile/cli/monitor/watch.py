"""`tunecompile monitor`: request telemetry, read it, and show it repeatedly: as tables for a terminal, or as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tunecompile.cli.monitor.gpu import MachineReader, MachineSnapshot
from tunecompile.errors import need
from tunecompile.planner.device_memory import shown
from tunecompile.runtime import telemetry_files

ASK_EVERY = telemetry_files.PATIENCE / 3
Show = Callable[[MachineSnapshot], object]


def watch(
    console: Console,
    interval: float,
    once: bool = False,
    json: bool = False,
    address: tuple[str, int] | None = None,
    sleep: Callable[[float], object] = time.sleep,
) -> None:
    """Show the training processes of this user, until interrupted.

    Args:
        console: of the output; without a terminal, tables are printed one after the other.
        interval: seconds between updates, and with `once` the time for processes to answer, each at its next step.
        once: show one table and return.
        json: print lines of JSON, not tables.
        address: (host, port) of the metrics for Prometheus.
        sleep: a function that waits a number of seconds.

    Raises:
        UnsafeFolder: another user could write to the telemetry folder.
        BadOption: the address cannot be bound.
        MissingExtra: prometheus_client is not installed.
    """
    machine = MachineReader()
    telemetry_files.ask()
    with ExitStack() as stack:
        if address is not None:
            stack.enter_context(_serving(machine, *address))
        if once:
            _wait(interval, sleep)
            (_json(console) if json else _print(console))(machine.look(time.time()))
            return
        show = _json(console) if json else stack.enter_context(_tables(console, quiet=address is not None))
        while True:
            show(machine.look(time.time()))
            _wait(interval, sleep)


def _wait(seconds: float, sleep: Callable[[float], object]) -> None:
    """Wait, and repeat the request for telemetry, which expires after some seconds."""
    while seconds > 0:
        telemetry_files.ask()
        sleep(min(seconds, ASK_EVERY))
        seconds -= ASK_EVERY
    telemetry_files.ask()


def _json(console: Console) -> Show:
    return lambda snapshot: console.out(as_json(snapshot), highlight=False)


def _print(console: Console) -> Show:
    return lambda snapshot: console.print(screen(snapshot))


@contextmanager
def _tables(console: Console, quiet: bool) -> Iterator[Show]:
    """On a terminal, a table that is updated; elsewhere a new table each time, or none if quiet."""
    if not console.is_terminal:
        yield (lambda snapshot: None) if quiet else _print(console)
        return
    with Live(console=console, auto_refresh=False, screen=False) as live:
        yield lambda snapshot: live.update(screen(snapshot), refresh=True)


@contextmanager
def _serving(machine: MachineReader, host: str, port: int) -> Iterator[None]:
    need("--prometheus", "monitor", "prometheus_client")
    from tunecompile.cli.monitor.prometheus import serve

    server = serve(lambda: machine.look(time.time()), host, port)
    Console(stderr=True).print(f"serving http://{host}:{port}/metrics", highlight=False)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


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
