"""Datasheets: what is read of them, and what they are taken to mean."""

import pytest
import torch

from tunecompile._torch.card import CARDS
from tunecompile.errors import UnknownGpu
from tunecompile.planner import datasheets
from tunecompile.planner.datasheets import GPUS, DatasheetGauge, find_gpu
from tunecompile.planner.device_memory import HostGauge


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_figures_are_plausible(gpu):
    assert (
        50 < gpu.tflops < 5000
        and 0.2 < gpu.bandwidth < 20
        and 14 < gpu.memory / 2**30 < 300
        and gpu.source.startswith("https://")
    )
    assert gpu.nvlink == 0 or gpu.nvlink > gpu.pcie
    assert 0 < gpu.rates.copy < gpu.link < gpu.rates.bandwidth or not gpu.nvlink
    assert find_gpu(gpu.name.upper()) == gpu


def test_an_h200_reaches_what_was_measured_on_one():
    gpu = find_gpu("h200")
    assert gpu.rates.flops == pytest.approx(790e9, rel=0.02) and gpu.rates.bandwidth == pytest.approx(4.15e9, rel=0.02)
    assert gpu.rates.copy == pytest.approx(55e6, rel=0.02) and gpu.measured
    for length, measured in (
        (2048, 851e9),
        (16384, 1215e9),
        (32768, 1155e9),
    ):  # cuDNN, `attention of` in benchmarks/results
        assert gpu.attention(length, 128) == pytest.approx(measured, rel=0.1)
    assert gpu.attention(2048, 64) == pytest.approx(633e9, rel=0.05)
    # "blocks 3.63 ms" for 4x8x2048x512 in gemma-4-12b-qlora-4x2048.json
    assert gpu.attention(2048, 512) == pytest.approx(7 * 4 * 8 * 2048**2 * 1024 / 3.63, rel=0.05)


def test_a_datasheet_of_the_users_own():
    gpu = find_gpu("h100, memory=94GiB, tflops=835")
    assert (gpu.memory, gpu.tflops, gpu.bandwidth) == (
        94 * 2**30,
        835,
        GPUS["h100"].bandwidth,
    ) and "memory=94GiB" in gpu.title
    assert not find_gpu("h200,pcie=32").measured and find_gpu("h200,nvlink=0").nvlink == 0
    assert (
        DatasheetGauge(gpu).available() < DatasheetGauge(gpu).total() == gpu.memory
        and DatasheetGauge(gpu).allocated() == 0
    )


@pytest.mark.parametrize(
    "text, says",
    [
        ("x900", "no datasheet"),
        ("h100,vram=3GiB", "no figure"),
        ("h100,memory=94", "no figure"),
        ("h100,tflops=0", "more than 0"),
        ("h100,bandwidth=0", "more than 0"),
        ("h100,nvlink=0,pcie=0", "more than 0"),
        ("h100,tflops=fast", "no figure"),
        ("", "no datasheet"),
    ],
)
def test_wrong_figures_are_refused(text, says):
    with pytest.raises(UnknownGpu, match=says) as told:
        find_gpu(text)
    assert all(name in str(told.value) for name in GPUS)


def test_the_host_has_all_of_its_memory():
    assert HostGauge().available() == HostGauge().total() > 2**28


#: bits of the memory's bus and 1e9 bits a second of each
PINS = {
    **{"b200": (8192, 7.8), "h200": (6144, 6.25), "h100": (5120, 5.23), "h100-pcie": (5120, 3.125)},
    **{
        "h100-nvl": (6144, 5.08),
        "a100-80": (5120, 3.19),
        "a100-40": (5120, 2.43),
        "l40s": (384, 18),
        "l4": (192, 12.5),
    },
    **{"a10": (384, 12.5), "t4": (256, 10), "rtx6000-ada": (384, 20), "rtx5090": (512, 28), "rtx4090": (384, 21)},
    **{"rtx3090": (384, 19.5)},
}


@pytest.mark.parametrize("name", GPUS)
def test_links_are_those_of_a_generation(name):
    """A slip in a figure: memory reads as its pins do, PCIe and NVLink come in generations and links."""
    gpu, (bits, each) = find_gpu(name), PINS[name]
    assert gpu.bandwidth * 1e12 == pytest.approx(bits / 8 * each * 1e9, rel=0.015)
    capability = CARDS[name].capability
    assert gpu.pcie == (16 if capability < (8, 0) else 32 if capability < (9, 0) else 64)
    assert gpu.nvlink % 25 == 0 and gpu.nvlink <= (0 if bits < 5000 else 900 if capability >= (10, 0) else 450)


def test_a_gpu_that_is_absent_is_empty_but_for_the_libraries():
    gauge = DatasheetGauge(GPUS["h200"])
    assert gauge.peak() == (0, 0) and gauge.failures() == 0
    assert 850 << 20 <= gauge.outside() <= 910 << 20 and gauge.available() == gauge.total() - gauge.outside()


def test_rates_are_those_of_the_card_that_a_gpu_behaves_as(monkeypatch):
    """A CPU behaves as itself."""
    monkeypatch.setattr(datasheets, "measure_rates", lambda device, dtype: (device, dtype))
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    for card, expected in (("rtx4090", GPUS["rtx4090"].rates), (None, (cuda, torch.float16))):
        monkeypatch.setattr(datasheets, "emulated", lambda card=card: card)
        assert datasheets.rates_of(cuda, torch.float16) == expected
        assert datasheets.rates_of(cpu, torch.float16) == (cpu, torch.float16)


def test_rings_take_the_link_that_is_there():
    assert GPUS["h100"].link == pytest.approx(360e6) and GPUS["l4"].link == pytest.approx(0.6 * 32e6)
    assert GPUS["t4"].dtype is torch.float16 and GPUS["a10"].dtype is GPUS["a100-80"].dtype is torch.bfloat16
