"""A monitor sees the training processes of its user, and they never pay for it, nor for what goes wrong with it."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import types
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tunecompile
from tests.support.memory.offload_stack import Stack
from tunecompile.cli.monitor.gpu import GpuReading, MachineReader, MachineSnapshot, Nvml, Process
from tunecompile.errors import UnsafeFolder
from tunecompile.runtime import telemetry, telemetry_files
from tunecompile.runtime.parts import StepTelemetry

pytest.importorskip("rich")
pytest.importorskip("typer")
GIB = 1 << 30


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("RANK", raising=False)
    return tmp_path


@pytest.fixture
def at_once(monkeypatch):
    """Every step looks for a monitor."""
    monkeypatch.setattr(telemetry, "EVERY", 0.0)


def train(model, steps=1, rows=6):
    for _ in range(steps):
        model(torch.randn(rows, 32)).backward()
    return model


def build(**options):
    return tunecompile.optimize(Stack(layers=3).train(), executor="eager", **options)


def told(**changes):
    plain = telemetry_files.Status(
        pid=os.getpid(),
        updated=time.time(),
        model="LlamaForCausalLM",
        device="cuda:0",
        gpu="GPU-a",
        rank=1,
        steps=1234,
        tokens_per_s=17406.4,
        step_ms=470.6,
        memory="20GiB",
        budget=20 * GIB,
        predicted_peak=18 * GIB,
        measured_peak=17 * GIB,
        allocated=12 * GIB,
        findings=["step 7: the loss is nan. Lower the learning rate."],
        found={"loss-not-finite": 1},
    )
    return replace(plain, **changes)


def written(folder):
    return sorted(path.name for path in folder.rglob("*.json"))


def test_nothing_is_written_unless_somebody_asks(temporary, at_once):
    model = train(build(), 3)
    assert not list(temporary.iterdir())
    telemetry_files.ask()
    os.utime(
        telemetry_files.folder() / telemetry_files.ASKED, (0, time.time() - 2 * telemetry_files.PATIENCE)
    )  # long ago
    train(model)
    assert not written(temporary)


def test_an_optimized_model_tells_what_it_does(at_once, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    model = train(build(memory="1GiB"), 3)
    telemetry_files.ask()
    train(model)
    (found,) = telemetry_files.read_all()
    assert (found.pid, found.model, found.device, found.rank, found.steps) == (os.getpid(), "Stack", "cpu", 3, 4)
    assert found.budget == GIB and found.memory == "1GiB" and found.allocated is None and found.gpu is None
    assert (
        found.predicted_peak == tunecompile.report(model).memory["predicted_peak"]
        and found.tokens_per_s > 0
        and found.step_ms > 0
    )
    tunecompile.restore(model)
    assert telemetry_files.read_all() == []


def test_evaluation_is_no_step(at_once):
    model = build()
    model.eval()(torch.randn(6, 32))
    with torch.no_grad():
        model.train()(torch.randn(6, 32))
    assert not model._tunecompile.part(StepTelemetry).telemetry.steps


def test_files_are_written_once_a_second(monkeypatch):
    telemetry_files.ask()
    wrote = []
    monkeypatch.setattr(telemetry_files, "write", lambda *given: wrote.append(given))
    beats = telemetry.Telemetry(
        lambda: dict.fromkeys(
            ("model", "device", "gpu", "memory", "budget", "predicted_peak", "measured_peak", "allocated")
        )
    )
    now = 1000.0
    monkeypatch.setattr(telemetry.time, "perf_counter", lambda: now)
    for _ in range(41):  # of 0.1 s each
        beats.beat(512)
        now += 0.1
    assert len(wrote) in (4, 5)
    assert beats.step_ms == pytest.approx(100) and beats.tokens_per_s == pytest.approx(5120)


def test_training_goes_on_where_nothing_can_be_written(at_once, monkeypatch):
    telemetry_files.ask()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(telemetry_files, "write", fail)
    train(build(), 2)
    assert telemetry_files.read_all() == []


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="folders have no owner")
@pytest.mark.parametrize("trick", ["link", "open", "file"])
def test_a_folder_somebody_else_prepared_is_not_used(temporary, at_once, trick):
    path = telemetry_files.folder()
    if trick == "link":
        (temporary / "elsewhere").mkdir(mode=0o700)
        path.symlink_to(temporary / "elsewhere")
    elif trick == "open":
        path.mkdir()
        path.chmod(0o777)
    else:
        path.touch()
    for refused in (telemetry_files.ask, telemetry_files.read_all):
        with pytest.raises(UnsafeFolder, match="TMPDIR"):
            refused()
    if trick != "file":
        (path / telemetry_files.ASKED).touch()
    train(build(), 2)
    assert not written(temporary)


def test_what_dead_processes_left_is_removed():
    telemetry_files.ask()
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    telemetry_files.write(told(), f"{os.getpid()}-a.json")
    telemetry_files.write(told(pid=dead.pid), f"{dead.pid}-a.json")
    telemetry_files.write(told(updated=1e9), f"{os.getpid()}-b.json")  # its number went to another process
    for name in (f"{os.getpid()}-d.json", f"{os.getpid()}-f.tmp", "other"):
        (telemetry_files.folder() / name).write_text("{")
    assert [found.steps for found in telemetry_files.read_all()] == [1234]
    assert {path.name for path in telemetry_files.folder().iterdir()} == {
        telemetry_files.ASKED,
        "other",
        f"{os.getpid()}-a.json",
        f"{os.getpid()}-f.tmp",
    }


def fake_nvml(monkeypatch, **answers):
    """A driver with two GPUs, one of which tells its name only, in bytes as old releases do."""

    class NVMLError(Exception):
        pass

    def of_first(answer):
        def ask(handle):
            if handle:
                raise NVMLError("Not Supported")
            return answer

        return ask

    library = types.ModuleType("pynvml")
    settings = dict(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: b"NVIDIA H200",
        nvmlDeviceGetUUID=of_first("GPU-a"),
        nvmlDeviceGetMemoryInfo=of_first(types.SimpleNamespace(used=60 * GIB, total=139 * GIB)),
        nvmlDeviceGetUtilizationRates=of_first(types.SimpleNamespace(gpu=97)),
    )
    vars(library).update(settings, **{name: answer(NVMLError) for name, answer in answers.items()})
    monkeypatch.setitem(sys.modules, "pynvml", library)


def test_gpus_by_nvml(monkeypatch):
    fake_nvml(monkeypatch)
    assert Nvml().gpus() == (
        GpuReading(0, "GPU-a", "NVIDIA H200", 60 * GIB, 139 * GIB, 97),
        GpuReading(1, "", "NVIDIA H200", None, None, None),
    )


def test_machines_without_a_gpu_say_so(monkeypatch):
    def no_driver(error):
        def init():
            raise error("Driver Not Loaded")

        return init

    fake_nvml(monkeypatch, nvmlInit=no_driver)
    assert MachineReader().look(0.0).why_no_gpu == "no NVIDIA GPU here (Driver Not Loaded)"
    fake_nvml(monkeypatch, nvmlDeviceGetCount=lambda error: lambda: 0)
    assert MachineReader().look(0.0).why_no_gpu == "no NVIDIA GPU here"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "tunecompile[monitor]" in MachineReader().look(0.0).why_no_gpu


def shot():
    gpus = (
        GpuReading(0, "GPU-a", "NVIDIA H200", 60 * GIB, 139 * GIB, 97),
        GpuReading(1, "", "NVIDIA H200", None, None, None),
    )
    bare = told(
        device="cpu",
        gpu=None,
        rank=None,
        allocated=None,
        measured_peak=None,
        budget=None,
        memory=None,
        predicted_peak=None,
        tokens_per_s=None,
        step_ms=None,
        updated=time.time() - 100,
    )
    return MachineSnapshot(
        time.time(), gpus, None, (Process(told(), 3 * GIB), Process(bare, 2 * GIB)), 30 * GIB, 128 * GIB
    )


def test_the_table_fits_a_narrow_terminal():
    from rich.console import Console

    from tunecompile.cli.monitor.watch import screen

    console = Console(width=80, record=True, file=open(os.devnull, "w"))
    console.print(screen(shot()))
    text = console.export_text()
    for part in (
        "60.00 GiB of 139.00 GiB",
        "97 %",
        "LlamaForCausalLM",
        "GPU 0",
        "17,406",
        "470.6",
        "1,234",
        "12.00 GiB",
        "17.00 GiB",
        "18.00 GiB",
        "20.00 GiB",
        "2.00 GiB (host)",
        "idle 100 s",
        "step 7: the loss is nan.",
        "30.00 GiB of 128.00 GiB",
        str(os.getpid()),
    ):
        assert part in text, part
    assert "…" not in text


def test_prometheus_scrapes_the_same_figures():
    pytest.importorskip("prometheus_client")
    from tunecompile.cli.monitor.prometheus import serve
    from tunecompile.errors import BadOption

    server = serve(shot, "127.0.0.1", 0)
    try:
        text = urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=10).read().decode()
        with pytest.raises(BadOption, match="cannot be bound"):
            serve(shot, "127.0.0.1", server.server_port)
    finally:
        server.shutdown()
        server.server_close()
    labels = f'{{device="cuda:0",gpu_uuid="GPU-a",model="LlamaForCausalLM",pid="{os.getpid()}",rank="1"}}'
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(lines["tunecompile_training_tokens_per_second" + labels]) == 17406.4
    assert float(lines["tunecompile_memory_budget_bytes" + labels]) == 20 * GIB
    assert float(lines["tunecompile_training_health_findings" + '{code="loss-not-finite",' + labels[1:]]) == 1
    assert float(lines["tunecompile_training_step_seconds" + labels]) == pytest.approx(0.4706)
    assert float(lines['tunecompile_gpu_utilization_ratio{gpu="0",name="NVIDIA H200",uuid="GPU-a"}']) == 0.97
    assert not any('gpu="1"' in name for name in lines)  # it tells nothing


def monitor(*options):
    from typer.testing import CliRunner

    from tunecompile.cli.main import app

    return CliRunner().invoke(app, ["monitor", *options])


def test_once_prints_a_table_and_ends(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    result = monitor("--once", "--interval", "0.1")
    assert (
        result.exit_code == 0
        and "no optimized model has begun" in result.output
        and "nvidia-ml-py is not installed" in result.output
    )
    telemetry_files.write(told(), f"{os.getpid()}-a.json")
    assert "LlamaForCausalLM" in monitor("--once", "--interval", "0.1").output


def test_json_is_a_line_a_look():
    telemetry_files.ask()
    telemetry_files.write(told(), f"{os.getpid()}-a.json")
    found = json.loads(monitor("--once", "--json", "--interval", "0.1").output)
    assert found["processes"][0]["status"]["budget"] == 20 * GIB and found["host_total"] > 0


@pytest.mark.parametrize(
    ("address", "says"), [("http", "give PORT or HOST:PORT"), ("70000", "give PORT"), ("host:", "give PORT")]
)
def test_mistakes(address, says):
    result = monitor("--once", "--prometheus", address)
    assert result.exit_code == 2 and says in " ".join(result.output.split()) and "Traceback" not in result.output


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "tunecompile.cli.monitor.prometheus", raising=False)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    result = monitor("--once", "--prometheus", "9400")
    assert result.exit_code == 2 and "pip install 'tunecompile[monitor]'" in " ".join(result.output.split())


@pytest.mark.parametrize("terminal", [True, False])
def test_it_looks_and_asks_until_interrupted(monkeypatch, terminal):
    from rich.console import Console

    from tunecompile.cli.monitor import watch

    asked, slept = [], []
    monkeypatch.setattr(telemetry_files, "ask", lambda: asked.append(True))
    monkeypatch.setattr(MachineReader, "look", lambda self, now: shot())

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) > 8:
            raise KeyboardInterrupt

    console = Console(width=80, record=True, file=open(os.devnull, "w"), force_terminal=terminal)
    with pytest.raises(KeyboardInterrupt):
        watch.watch(console, interval=20.0, sleep=sleep)
    assert max(slept) < telemetry_files.PATIENCE / 2 and len(asked) >= len(slept) and sum(slept[:4]) == 20
    assert "17,406" in console.export_text()


def test_the_dashboard_shows_the_exporters_metrics():
    """Every metric is on it, with labels that the exporter gives, and none that there is not."""
    prometheus = pytest.importorskip("tunecompile.cli.monitor.prometheus")
    text = (Path(__file__).parents[2] / "docs/grafana/tunecompile.json").read_text(encoding="utf-8")
    dashboard = json.loads(text)
    shown = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    known = {f"tunecompile_{name}" for name, *_ in (*prometheus.GPU, *prometheus.TRAINING, prometheus.FINDINGS)}
    assert set(re.findall(r"tunecompile_\w+", " ".join(shown))) == known
    variables = [each["query"] for each in dashboard["templating"]["list"] if each["type"] == "query"]
    assert set(re.findall(r"tunecompile_\w+", " ".join(variables))) < known
    labels = {"pid", "model", "device", "gpu_uuid", "rank", "gpu", "uuid", "name", "code"}
    assert set(re.findall(r"\{\{(\w+)\}\}|(\w+)=~", text)) <= {(a, b) for a in labels | {""} for b in labels | {""}}
    places = [tuple(panel["gridPos"][side] for side in "xy") for panel in dashboard["panels"]]
    assert len(set(places)) == len(places) == len({panel["id"] for panel in dashboard["panels"]})
