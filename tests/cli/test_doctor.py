"""The doctor finds what is broken, says how to mend it, and finds nothing wrong with a machine that has no GPU."""

import json
import os
import re
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.torch_version import TorchVersion
from typer.testing import CliRunner

from tunecompile._torch import known_bugs
from tunecompile.cli import doctor
from tunecompile.cli.main import app
from tunecompile.cli.monitor.gpu import GpuReading

ROOT = Path(__file__).parents[2]


@pytest.fixture
def versions(monkeypatch):
    """Which versions are installed, as the test says."""
    known = {}
    monkeypatch.setattr(
        known_bugs, "installed", lambda package: TorchVersion(known[package]) if known.get(package) else None
    )
    return known


@pytest.fixture
def nvml(monkeypatch):
    """A driver for CUDA 12.8 with one GPU, whatever torch can do with it."""
    library = SimpleNamespace(nvmlSystemGetDriverVersion=lambda: "570.1", nvmlSystemGetCudaDriverVersion=lambda: 12080)
    fake = SimpleNamespace(
        handles=[object()], missing=None, library=library, gpus=lambda: (GpuReading(0, "", "H200", 0, 1 << 37, 0),)
    )
    monkeypatch.setattr(doctor, "Nvml", lambda: fake)


def test_this_machine_passes():
    """As it is, by both forms of the command: what tests run on has all that is needed."""
    shown, told = CliRunner().invoke(app, ["doctor"]), CliRunner().invoke(app, ["doctor", "--json"])
    lines = json.loads(told.output)
    assert shown.exit_code == told.exit_code == 0, shown.output
    assert [line["name"] for line in lines] == [name for name, _ in doctor.checks()] and all(
        line["name"] in shown.output for line in lines
    )
    assert all(set(line) == {"name", "status", "found", "mend"} and line["found"] for line in lines)
    if not torch.cuda.is_available():
        assert all(
            "no GPU" in line["found"]
            for line in lines
            if line["name"] in ("GPU", "driver", "Triton kernel", "pinned memory", "NCCL")
        )


def test_what_is_supported_is_what_the_package_asks_for():
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = " ".join(
        [*project["dependencies"], *(line for lines in project["optional-dependencies"].values() for line in lines)]
    )
    oldest = (ROOT / "constraints-oldest.txt").read_text(encoding="utf-8")
    for name, least in doctor.SUPPORTED.items():
        assert re.search(rf"\b{name}>={least}(?![.\d])", asked) and re.search(rf"^{name}=={least}\b", oldest, re.M)
    assert all(
        re.search(rf"\b{name}>=", " ".join(project["optional-dependencies"][extra]))
        for name, extra in doctor.OPTIONAL.items()
    )


def test_packages(versions):
    versions |= {"peft": "0.17.1", "trl": "99.0"}
    assert doctor.package("peft") == doctor.fail(
        "0.17.1, and 0.18 is the oldest supported", "Update it: pip install -U 'peft>=0.18'"
    )
    assert doctor.package("trl").status == "ok" and doctor.package("transformers").found.startswith("not installed")


@pytest.mark.parametrize(
    ("installed", "asked", "gpu", "status", "says"),
    [
        ("3.5.1", "3.6.0", True, "fail", "pip install triton==3.6.0"),
        ("3.6.0", "3.6.0", True, "ok", ""),
        (None, "3.6.0", True, "fail", "pip install triton==3.6.0"),
        (None, None, False, "ok", ""),
        ("3.9.0", None, False, "ok", ""),
    ],
)
def test_triton(monkeypatch, versions, installed, asked, gpu, status, says):
    versions["triton"] = installed
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(
        doctor.metadata,
        "requires",
        lambda _: ["filelock", *([f'triton=={asked}; platform_system == "Linux"'] if asked else [])],
    )
    line = doctor.triton()
    assert line.status == status and says in line.mend, line


@pytest.mark.parametrize(("cuda", "status"), [("12.6", "ok"), ("12.9", "warning"), ("13.0", "fail")])
def test_driver(monkeypatch, nvml, cuda, status):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert doctor.driver().status == status and "570.1, for CUDA up to 12.8" in doctor.driver().found


@pytest.mark.parametrize(("cuda", "says"), [(None, "has no CUDA"), ("12.8", "torch cannot use it")])
def test_a_gpu_that_torch_does_not_see(monkeypatch, nvml, cuda, says):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert doctor.gpu().status == "fail" and says in doctor.gpu().found and doctor.gpu().mend


@pytest.mark.parametrize(("capability", "status"), [((6, 1), "fail"), ((7, 5), "warning"), ((9, 0), "ok")])
def test_generations_of_gpus(monkeypatch, nvml, capability, status):
    for name, value in (("is_available", True), ("device_count", 1), ("get_device_capability", capability)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    assert doctor.gpu().status == status and "H200 128.00 GiB" in doctor.gpu().found


@pytest.mark.parametrize(
    ("hip", "capability", "platform", "status", "says"),
    [
        (None, (9, 0), "linux", "ok", "tests run"),
        (None, (8, 9), "linux", "ok", "larger"),
        (None, (10, 0), "linux", "warning", "none ran"),
        (None, (6, 1), "linux", "warning", "no such card"),
        ("6.4", (9, 4), "linux", "warning", "none ran"),
        (None, (9, 0), "win32", "warning", "win32"),
    ],
)
def test_what_was_shown_on_a_card(monkeypatch, hip, capability, platform, status, says):
    properties = SimpleNamespace(gcnArchName="gfx942:sramecc+")
    for name, value in (
        ("is_available", True),
        ("get_device_capability", capability),
        ("get_device_properties", properties),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(sys, "platform", platform)
    line = doctor.card()
    assert line.status == status and says in line.found


def test_bitsandbytes_without_its_library(monkeypatch):
    cextension = pytest.importorskip("bitsandbytes.cextension")
    monkeypatch.setattr(
        cextension,
        "lib",
        cextension.ErrorHandlerMockBNBNativeLibrary("CUDA binary not found at libbitsandbytes_cuda99.so"),
    )
    line = doctor.bitsandbytes()
    assert line.status == "fail" and "cuda99" in line.found and "BNB_CUDA_VERSION" in line.mend


def test_no_headers(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert (
        doctor.headers().status == ("fail" if torch.cuda.is_available() else "warning")
        and "python3-dev" in doctor.headers().mend
    )


def test_compilers(monkeypatch, tmp_path):
    check = lambda needed=True: doctor.compiler("CC", ("gcc", "clang"), ".c", needed)  # noqa: E731
    monkeypatch.setenv("CC", "false")
    assert check().status == "fail" and "cannot make a library" in check().found
    monkeypatch.setenv("CC", str(tmp_path / "absent"))
    assert "does not run" in check().found
    monkeypatch.delenv("CC")
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert check() == doctor.fail(
        "neither gcc nor clang",
        "Install one (apt install build-essential), or set CC to one that works.",
    )
    assert check(needed=False).status == "warning"


@pytest.mark.parametrize(("free", "status"), [(1 << 20, "fail"), (1 << 30, "warning"), (1 << 40, "ok")])
def test_room_for_caches(monkeypatch, tmp_path, free, status):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    line = doctor.cache(lambda: tmp_path / "is" / "not" / "there", "ITS_FOLDER")
    assert line.status == status and ("ITS_FOLDER" in line.mend) == (status != "ok")
    assert os.listdir(tmp_path) == []


def test_a_cache_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    assert (
        doctor.cache(lambda: tmp_path / "file", "ITS_FOLDER").status == "fail"
    )  # root may write to any folder, but not into a file
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "mine"))
    assert doctor.triton_cache() == tmp_path / "mine"

    def refused(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", refused)
    assert "Permission denied" in doctor.cache(lambda: tmp_path, "ITS_FOLDER").found


def test_memory(monkeypatch):
    monkeypatch.setattr(doctor, "available", lambda: 1 << 30)
    assert doctor.host_memory().status == "warning"
    if not torch.cuda.is_available():
        assert "ulimit -l" in doctor.pinned_memory().found


@pytest.mark.parametrize(
    "count, built, broken, status, says",
    [
        (1, True, None, "ok", "one GPU"),
        (2, False, None, "fail", "built without it"),
        (2, True, None, "ok", "2.28.9, summed over 2 GPUs"),
        (4, True, "unhandled system error", "fail", "unhandled system error"),
    ],
)
def test_nccl(monkeypatch, count, built, broken, status, says):
    """Asked for a sum over all GPUs, where there are several."""

    def sum_up(parts):
        if broken:
            raise RuntimeError(broken)
        for part in parts:
            part.fill_(len(parts))

    ones = torch.ones
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: built)
    monkeypatch.setattr(torch.cuda, "nccl", SimpleNamespace(version=lambda: (2, 28, 9), all_reduce=sum_up))
    monkeypatch.setattr(doctor.torch, "ones", lambda size, device: ones(size))
    line = doctor.nccl()
    assert line.status == status and says in line.found and bool(line.mend) == (status == "fail"), line


def test_pinned_memory(monkeypatch):
    """Where none can be pinned, and where it is less than NCCL may want."""
    import resource

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64 << 10, 64 << 10))
    monkeypatch.setattr(doctor.torch, "empty", lambda *_, **__: None)
    assert doctor.pinned_memory().status == "warning" and "ulimit -l unlimited" in doctor.pinned_memory().mend

    def refused(*_, **__):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(doctor.torch, "empty", refused)
    line = doctor.pinned_memory()
    assert (
        line.status == "fail"
        and "64 MiB cannot be pinned (ulimit -l is 0.06 MiB)" in line.found
        and "memlock" in line.mend
    )


def test_variables(monkeypatch):
    for name in [*doctor.VARIABLES, *(name for name in os.environ if name.startswith("TUNECOMPILE"))]:
        monkeypatch.delenv(name, raising=False)
    assert doctor.environment().status == "ok"
    monkeypatch.setenv("TUNECOMPILE_CACHE", "/somewhere")
    assert doctor.environment() == doctor.ok("TUNECOMPILE_CACHE=/somewhere")
    monkeypatch.setenv("TUNECOMPILE", "0")
    monkeypatch.setenv("TUNECOMPILE_DUMB", "folder")
    line = doctor.environment()
    assert (
        line.status == "warning"
        and "TUNECOMPILE: 0 switches tunecompile off" in line.mend
        and "TUNECOMPILE_DUMB: nothing reads it" in line.mend
    )


def test_packages_of_passes(monkeypatch):
    monkeypatch.setenv("TUNECOMPILE_PASSES", "absent")
    assert doctor.packages().status == "fail" and "absent" in doctor.packages().found
    assert CliRunner().invoke(app, ["doctor", "--json"]).exit_code == 1


def test_a_check_that_breaks_is_a_line(monkeypatch):
    def broken():
        raise RuntimeError("no such thing")

    monkeypatch.setattr(doctor, "checks", lambda: (("one", broken),))
    assert [(line.name, line.status, line.found) for line in doctor.examine()] == [
        ("one", "fail", "the check failed: RuntimeError: no such thing")
    ]


@pytest.mark.gpu
def test_a_kernel_runs():
    assert doctor.kernel().status == doctor.pinned_memory().status == "ok"
