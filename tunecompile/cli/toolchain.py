"""Findings of the doctor, and its checks of the toolchain: headers, compilers, a Triton kernel, caches."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from tunecompile import templates
from tunecompile.errors import summary
from tunecompile.planner.device_memory import shown

GIB = 1 << 30
Status = Literal["ok", "warning", "fail"]
LIBRARY = "#include <math.h>\n%s double doctor(double x) { return sqrt(x); }\n"


@dataclass(frozen=True)
class Line:
    """The finding of a check."""

    name: str  #: of the check; empty until `doctor.examine` gives it
    status: Status
    found: str
    mend: str = ""  #: the remedy, a sentence; empty if there is nothing to do


def line(status: Status, found: str, mend: str = "") -> Line:
    """What a check found."""
    return Line("", status, found, mend)


ok, warning, fail = (partial(line, status) for status in ("ok", "warning", "fail"))


def headers() -> Line:
    """Check Python's headers, which Triton needs to compile its launchers."""
    path = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if path.exists():
        return ok(str(path))
    return line(
        "fail" if torch.cuda.is_available() else "warning",
        f"no {path}, without which Triton cannot launch kernels",
        "Install Python's headers: apt install python3-dev, or use a Python that has them (conda, uv).",
    )


def compiler(variable: str, names: tuple[str, str], suffix: str, needed: bool) -> Line:
    """Check that the compiler, found as Triton (C) and Inductor (C++) find it, makes a shared library."""
    bad: Status = "fail" if needed else "warning"
    found = os.environ.get(variable) or next(filter(None, map(shutil.which, names)), None)
    mend = f"Install one (apt install build-essential), or set {variable} to one that works."
    if found is None:
        return line(bad, f"neither {' nor '.join(names)}", mend)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, f"doctor{suffix}")
        source.write_text(LIBRARY % ('extern "C"' if suffix == ".cpp" else ""))
        try:
            done = subprocess.run(
                [*found.split(), str(source), "-O2", "-shared", "-fPIC", "-o", f"{folder}/doctor.so"],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return line(bad, f"{found} does not run: {summary(error)}", mend)
    if done.returncode:
        return line(
            bad,
            f"{found} cannot make a library: {(done.stderr.strip().splitlines() or ['it gives no reason'])[0][:200]}",
            mend,
        )
    return ok(found)


def kernel() -> Line:
    """Compile and launch a Triton kernel of tunecompile, and compare its result."""
    if not torch.cuda.is_available():
        return ok("no GPU: not run")
    gate, up = torch.randn(2, 8, 256, device="cuda")
    try:
        torch.testing.assert_close(
            templates.swiglu.forward(gate, up), torch.nn.functional.silu(gate) * up, rtol=1e-5, atol=1e-5
        )
    except Exception as error:  # whatever Triton, its compiler or the driver raise
        return fail(
            summary(error), "Fix the failures above; if there are none, reinstall the triton that torch requires."
        )
    return ok(f"compiled and right on {torch.cuda.get_device_name()}")


def cache(find: Callable[[], Path], variable: str) -> Line:
    """Check that a cache's folder, or the one it will be made in, can be written to and has free space."""
    mend = f"Set {variable} to a folder with free space that you may write to."
    try:
        folder = find()
        exists = next(path for path in (folder, *folder.parents) if path.exists())
        with tempfile.NamedTemporaryFile(dir=exists, prefix=".tunecompile") as file:
            file.write(bytes(1 << 16))
            file.flush()
        free = shutil.disk_usage(exists).free
    except OSError as error:
        return fail(f"cannot be written to: {summary(error)}", mend)
    status: Status = "ok" if free >= 2 * GIB else "warning"
    status = status if free >= GIB // 4 else "fail"
    return line(
        status,
        f"{folder}, {shown(free)} free",
        "" if status == "ok" else f"Free some space there (2 GiB are enough). {mend}",
    )


def triton_cache() -> Path:
    """The folder of Triton's cache."""
    return Path(
        os.environ.get("TRITON_CACHE_DIR") or Path(os.environ.get("TRITON_HOME") or Path.home(), ".triton", "cache")
    )
