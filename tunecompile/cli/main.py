"""The command line: `compare`, `demo`, `plan`, `run`, `monitor`, `doctor`, `cache`, `merge` and two for passes."""

from __future__ import annotations

import sys

try:
    import rich  # noqa: F401
    import typer
except ImportError as missing:  # the one extra that typer itself cannot report
    sys.exit(
        f"error: the command line needs {missing.name}, which is not installed. "
        "Install it: pip install 'tunecompile[cli]'"
    )

from tunecompile.cli.commands.cache import cache
from tunecompile.cli.commands.compare import compare, demo
from tunecompile.cli.commands.machine import doctor, monitor
from tunecompile.cli.commands.merge import merge
from tunecompile.cli.commands.passes import check_pass, new_pass
from tunecompile.cli.commands.plan import plan
from tunecompile.cli.commands.run import run

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Compiles the fine-tuning step of language models, and shows what that gains.",
)
for command in (compare, demo, plan, monitor, doctor, merge, new_pass, check_pass):
    app.command()(command)
app.add_typer(cache, name="cache")
app.command(context_settings={"allow_interspersed_args": False})(run)  # options behind the command are its own

if __name__ == "__main__":
    app()
