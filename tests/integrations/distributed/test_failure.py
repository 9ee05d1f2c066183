"""What the user of torchrun sees of a rank that cannot go on."""

import os
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")


@pytest.mark.slow
def test_a_rank_that_cannot_go_on_ends_the_others():
    pytest.importorskip("peft")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "tests.integrations.distributed.dying",
    ]
    ended = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ended.returncode != 0 and "trained" not in ended.stdout
    (said,) = [line for line in ended.stderr.splitlines() if "RankLost: " in line]
    assert said.startswith("[rank1]: tunecompile.errors."), ended.stderr
    assert "RankLost: Rank 1 of 2 ran out of memory. 0.00 MiB were missing" in said
    assert "resume it from its last checkpoint with memory='" in said
    assert "rank      : 1 (local_rank: 1)" in ended.stderr.partition("Root Cause")[2], (
        ended.stderr
    )  # gloo may have told rank 0 of it, too
