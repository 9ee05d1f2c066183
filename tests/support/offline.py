"""tests/templates/offline.py in processes of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "templates/offline.py"


def start(*arguments):
    """offline.py in a process of its own: the interpreter of the other tests replaces triton.jit for good."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, SCRIPT, *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err[-3000:]
    return [json.loads(line) for line in out.splitlines()]
