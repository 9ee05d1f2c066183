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


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_on_two_gpus(engine, tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    failed = run(f"tests.distributed.{engine}", False, 2, tmp_path, gpus=True)
    assert not failed, "\n\n".join(failed)
