"""The door of ms-swift: a callback by the name `tunecompile`.

    swift sft --external_plugins $(python -m tunecompile.trainers.swift) --callbacks tunecompile ...

`tunecompile run -- swift sft ...` needs neither, and takes options.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tunecompile.errors import MissingHost
from tunecompile.integrations.registered import register as register_names
from tunecompile.trainers.door import check_host, options_of_run
from tunecompile.trainers.huggingface import Callback

PLUGIN = Path(__file__).parent / "external" / "swift_callback.py"  #: what `--external_plugins` is given


def register() -> None:
    """Put the callback among those that `--callbacks` names, and ours among the names that `--attn_impl` takes.

    Raises:
        MissingHost: ms-swift is not installed.
        HostTooOld: ms-swift is older than 4.0, and has no callbacks by name.
    """
    check_host("ms-swift", oldest="4.0", newest="4.6")
    try:
        from swift.callbacks import callbacks_map
    except ImportError as missing:
        raise MissingHost(door="tunecompile.trainers.swift", package="ms-swift") from missing
    callbacks_map["tunecompile"] = _made
    register_names()


def _made(args: Any, trainer: Any) -> Callback:
    """A callback, as ms-swift makes one for a trainer."""
    return Callback(**(options_of_run() or {}))


if __name__ == "__main__":
    print(PLUGIN)
