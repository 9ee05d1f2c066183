"""Engines of several processes: gradients are those of one process on all of the batch."""

import pytest
import torch

from tests.distributed.ranks import run

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")


DDP, FSDP = "tests.distributed.ddp", "tests.distributed.fsdp"


@pytest.mark.parametrize("modules, slow", [(f"{DDP},{FSDP}", False), pytest.param(DDP, True, marks=pytest.mark.slow), pytest.param(FSDP, True, marks=pytest.mark.slow)])
def test_on_two_ranks(modules, slow, tmp_path):
    for needed in ("transformers", "peft"):
        pytest.importorskip(needed)
    failed = run(modules, slow, 2, tmp_path)
    assert not failed, "\n\n".join(failed)


@pytest.mark.gpu
def test_on_two_gpus(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    failed = run(f"{DDP},{FSDP}", False, 2, tmp_path, gpus=True)
    assert not failed, "\n\n".join(failed)
