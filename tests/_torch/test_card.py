"""What is asked of a GPU, and what `TUNECOMPILE_AS` answers in its place."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import tunecompile
from tests.support.notes import find
from tunecompile._torch import card
from tunecompile.compiler import attention_backend, tuning_cache
from tunecompile.compiler.partitioner import Lowering
from tunecompile.compiler.pass_manager import Context
from tunecompile.errors import UnknownGpu
from tunecompile.planner.datasheets import GPUS, rates_of
from tunecompile.planner.device_memory import CudaGauge
from tunecompile.templates import _tiles

GPU = torch.device("cuda", 0)


@pytest.fixture
def h100(monkeypatch):
    """A process that has one, as far as anybody asks."""
    held = []
    properties = SimpleNamespace(total_memory=80 << 30, warp_size=32)
    for name, value in (
        ("is_available", lambda: True),
        ("get_device_capability", lambda device: (9, 0)),
        ("get_device_name", lambda device: "NVIDIA H100"),
        ("get_device_properties", lambda device: properties),
        ("get_per_process_memory_fraction", lambda device: held[-1] if held else 1.0),
        ("set_per_process_memory_fraction", lambda share, device: held.append(share)),
        ("mem_get_info", lambda device: (79 << 30, 80 << 30)),
        ("memory_reserved", lambda device: 0),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91000)  # torch 2.15's asks all GPUs that are there
    return held


def test_every_datasheet_has_a_card_and_every_card_a_datasheet():
    assert GPUS.keys() == card.CARDS.keys()
    assert GPUS["t4"].dtype is torch.float16 and GPUS["rtx3090"].dtype is torch.bfloat16
    assert {c.capability for c in card.CARDS.values()} <= card.SHARED.keys() | {(7, 5)}


def test_without_a_gpu_nothing_is_refused():
    device = torch.device("cpu")
    assert card.capability(device) is None and card.has_bfloat16(device) and card.shared_memory(device) == 0


def test_a_card_in_place_of_a_larger_one(h100, monkeypatch):
    real = card.capability(GPU), card.shared_memory(GPU), CudaGauge(GPU).total(), tuning_cache.machine(GPU)
    hook = Lowering((), Context("layer"))
    assert real[:3] == ((9, 0), 232448, 80 << 30) and card.has_bfloat16(GPU)
    wide, key = _tiles.find("attention", card.shared_memory(GPU), 2, 512), hook.uuid()
    monkeypatch.setenv(card.VARIABLE, "RTX4090")
    assert card.capability(GPU) == (8, 9) and card.shared_memory(GPU) == 101376
    assert _tiles.find("attention", card.shared_memory(GPU), 2, 512) != wide and hook.uuid() != key
    assert tuning_cache.machine(GPU) == real[3] | {"as": "rtx4090"}
    assert rates_of(GPU, torch.bfloat16) == GPUS["rtx4090"].rates
    card.hold_to_memory(GPU, 1 << 30)
    gauge = CudaGauge(GPU)
    assert gauge.total() == GPUS["rtx4090"].memory and gauge.total() - gauge.available() == pytest.approx(
        1 << 30, abs=2
    )
    card.hold_to_memory(GPU, 0)
    assert len(h100) == 1  # a smaller limit stays


def test_faults_of_compilers_are_those_of_the_gpu_that_runs(h100, monkeypatch):
    """An H100 that behaves as a card for which the compiler fails, one that is only planned for, and no GPU."""
    monkeypatch.setenv(card.VARIABLE, "b200")
    assert card.capability(GPU) == (10, 0) and card.compiled_for(GPU) == (9, 0)
    with card.acting_as("a100-80"):
        assert card.compiled_for(GPU) == card.capability(GPU) == (8, 0)
    assert card.compiled_for(torch.device("cpu")) is None is card.capability(torch.device("cpu"))


def test_a_smaller_gpu_keeps_its_memory(h100, monkeypatch):
    monkeypatch.setenv(card.VARIABLE, "b200")
    card.hold_to_memory(GPU, 1 << 30)
    assert CudaGauge(GPU).total() == 80 << 30


def test_a_t4_has_neither_flash_nor_cudnn_and_no_bfloat16(h100, monkeypatch):
    assert {"flash", "cudnn"} <= set(attention_backend._enabled(GPU))
    monkeypatch.setenv(card.VARIABLE, "t4")
    assert attention_backend._enabled(GPU) == ("efficient", "math") and not card.has_bfloat16(GPU)


def test_the_report_says_that_choices_are_anothers(monkeypatch):
    monkeypatch.setenv(card.VARIABLE, "t4")
    model = tunecompile.optimize(nn.Linear(2, 2), executor="eager")
    (said,) = find(model, "emulated-card")
    assert said.subject == GPUS["t4"].title


def test_a_card_that_nobody_knows_is_refused(monkeypatch):
    monkeypatch.setenv(card.VARIABLE, "rtx9999")
    with pytest.raises(UnknownGpu, match="rtx9999"):
        tunecompile.optimize(nn.Linear(2, 2), executor="eager")
