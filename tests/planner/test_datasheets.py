"""Datasheets: what is read of them, and what they are taken to mean."""

import pytest

from tunecompile.errors import UnknownGpu
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


def test_a_datasheet_of_the_users_own():
    gpu = find_gpu("h100, memory=94GiB, tflops=835")
    assert (gpu.memory, gpu.tflops, gpu.bandwidth) == (
        94 * 2**30,
        835,
        GPUS["h100"].bandwidth,
    ) and "memory=94GiB" in gpu.title
    assert not find_gpu("h200,pcie=32").measured
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
