"""Python in a process of its own, whose torch is told of a GPU that is not there (`stand_in_gpu`), and remembers it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

#: marks of tests that do so
STANDS_IN = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
    pytest.mark.skipif(
        not torch.__version__.startswith(("2.11.", "2.13.")), reason="what stands in for a GPU fits these versions"
    ),
]


def printed(*arguments: str, seconds: int = 600) -> str:
    """What Python prints, called with these arguments in the folder of the repository. It must end well."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
