"""`tunecompile monitor`: asks, looks and shows, again and again."""

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
    """Show what the training processes of this user do, until interrupted.

    Args:
        console: where to; one that is no terminal gets table after table.
        interval: seconds between two looks, and with `once` how long processes have to answer: each does at its next step.
        once: show one table and return.
        json: lines of JSON in place of tables.
        address: (host, port) to serve the figures to Prometheus at.
        sleep: waits so many seconds.

    Raises:
        UnsafeFolder: the folder that processes write to is somebody else's.
        BadOption: nobody can listen at the address.
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
    """Go on asking meanwhile: an asking holds for some seconds only."""
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
    """On a terminal one picture that is drawn anew; elsewhere a table each time, or none where Prometheus is what it is for."""
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
