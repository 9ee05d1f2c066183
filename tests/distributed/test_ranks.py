"""Engines of several processes: gradients are those of one process on all of the batch."""

import pytest
import torch

from tests.distributed.ranks import run

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")


@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_on_two_ranks(engine, slow, tmp_path):
    for needed in ("transformers", "peft"):
        pytest.importorskip(needed)
    failed = run(f"tests.distributed.{engine}", slow, 2, tmp_path)
    assert not failed, "\n\n".join(failed)
