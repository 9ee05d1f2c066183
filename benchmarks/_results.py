"""The file of a benchmark that is being run: it is written after each row, and says what is to come."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write(path: Path, result: dict[str, Any], to_come: Sequence[str] = ()) -> None:
    """Write what was measured; report.py leaves the file out while something is to come.

    A process that is ended meanwhile leaves the file as it was before.
    """
    part = result | ({"incomplete": list(to_come)} if to_come else {})
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(part, indent=1, default=str) + "\n")
    scratch.replace(path)
