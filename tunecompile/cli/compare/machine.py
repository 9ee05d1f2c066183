"""The machine, the versions and the source of a measurement."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import tunecompile

SCHEMA = 1  # the version of what is saved: see result.py
PACKAGES = ("torch", "triton", "transformers", "peft", "bitsandbytes", "trl", "unsloth", "liger_kernel", "tunecompile")


def output_of(*command: str) -> str | None:
    """The output of a command; None if it fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    return None


def cpu_name() -> str:
    """The model of the CPU, and its number of cores."""
    with contextlib.suppress(OSError):
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
        if found:
            return f"{found[1]}, {len(os.sched_getaffinity(0))} cores"
    return f"{os.cpu_count()} cores"


def memory_gib() -> float | None:
    """Host memory in GiB."""
    with contextlib.suppress(ValueError, OSError, AttributeError):
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    return None


def describe_machine() -> dict:
    """GPU, CPU and memory, as in a result."""
    import torch

    gpus = torch.cuda.device_count()
    return {
        "gpu": torch.cuda.get_device_name(0) if gpus else None,
        "gpu_count": gpus,
        "cpu": cpu_name(),
        "memory_gib": memory_gib(),
    }


def version_of(package: str) -> str | None:
    """The installed version of a package. tunecompile may also run from its source tree."""
    if package == "tunecompile":
        return tunecompile.__version__
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def describe_versions() -> dict:
    """The versions of installed packages."""
    return {package: version for package in PACKAGES if (version := version_of(package))}


def describe_source() -> dict:
    """The commit of the measured source tree, and whether it has changes; None outside of a repository."""
    folder = str(Path(__file__).resolve().parent)
    commit = output_of("git", "-C", folder, "rev-parse", "HEAD")
    return {
        "commit": commit,
        "dirty": bool(output_of("git", "-C", folder, "status", "--porcelain")) if commit else None,
    }


def header() -> dict:
    """The fields that every result file begins with."""
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return {
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        **describe_source(),
        "command": command,
        "machine": describe_machine(),
        "versions": describe_versions(),
    }


def gpu_clock_mhz() -> int | None:
    """The current clock of the first GPU, in MHz."""
    found = output_of("nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits")
    return int(found.splitlines()[0]) if found and found.splitlines()[0].isdigit() else None
