"""Engines of several processes: gradients are those of one process on all of the batch."""

import importlib.util

import pytest
import torch

from tests.integrations.distributed.ranks import TIMEOUT, run

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")


DDP, EXPERTS, FSDP, PARALLEL, PLANS, STARTUP, TRAINERS, ZERO = (
    f"tests.integrations.distributed.{name}"
    for name in ("ddp", "experts", "fsdp", "parallel", "plans", "startup", "trainers", "zero")
)
NEEDED = {ZERO: ("deepspeed",), TRAINERS: ("accelerate", "trl", "datasets")}


def check(modules: str, slow: bool, ranks: int, folder, **options):
    for needed in (
        "transformers",
        "peft",
        *(name for module, names in NEEDED.items() if module in modules for name in names),
    ):
        if importlib.util.find_spec(needed) is None:  # DeepSpeed chooses a device when it is imported
            pytest.skip(f"{needed} is not installed")
    failed = run(modules, slow, ranks, folder, **options)
    assert not failed, "\n\n".join(failed)


ALL = [pytest.mark.slow, pytest.mark.timeout(1300)]


@pytest.mark.parametrize(
    "modules, slow",
    [
        (f"{DDP},{FSDP},{PARALLEL},{PLANS},{STARTUP}", False),
        (ZERO, False),
        *(
            pytest.param(module, True, marks=ALL)
            for module in (DDP, EXPERTS, FSDP, PARALLEL, PLANS, STARTUP, TRAINERS, ZERO)
        ),
    ],
)
def test_on_two_ranks(modules, slow, tmp_path):
    check(modules, slow, 2, tmp_path, timeout=1200 if slow else TIMEOUT)


@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("slow", [False, True])
def test_on_four_ranks(slow, tmp_path):
    check(f"{DDP},{FSDP}", slow, 4, tmp_path, timeout=1200)


@pytest.mark.gpu
@pytest.mark.parametrize("modules, gpus", [(f"{DDP},{FSDP},{PARALLEL}", 2), (ZERO, 1), (ZERO, 2)])
def test_on_gpus(modules, gpus, tmp_path):
    if torch.cuda.device_count() < gpus:
        pytest.skip("one GPU")
    check(modules, False, gpus, tmp_path, gpus=True)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(1900)
@pytest.mark.parametrize("module", [PARALLEL, ZERO])
def test_all_cases_on_two_gpus(module, tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    check(module, True, 2, tmp_path, gpus=True, timeout=1800)
