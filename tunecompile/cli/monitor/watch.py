"""`tunecompile monitor`: request telemetry, read it, and show it repeatedly."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from rich.console import Console
from rich.live import Live

from tunecompile.cli.monitor.gpu import MachineReader, MachineSnapshot
from tunecompile.cli.monitor.screen import as_json, screen
from tunecompile.errors import MissingExtra
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
    try:
        from tunecompile.cli.monitor.prometheus import serve
    except ImportError as missing:
        raise MissingExtra(what="--prometheus", package=missing.name, extra="monitor") from missing
    server = serve(lambda: machine.look(time.time()), host, port)
    Console(stderr=True).print(f"serving http://{host}:{port}/metrics", highlight=False)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
