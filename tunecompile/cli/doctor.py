"""`tunecompile doctor`: what of this machine would keep a training from compiling, and how each of it is mended.

A check is a function that returns a `Line`. Nothing is changed: files are written to temporary folders, and to caches for a moment.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch
from torch.torch_version import TorchVersion

from tunecompile import passes as own_passes
from tunecompile._torch import known_bugs
from tunecompile._torch.inductor import cache_folder
from tunecompile.cli.monitor.gpu import Nvml
from tunecompile.compiler import plugins
from tunecompile.errors import TunecompileError, summary
from tunecompile.planner.device_memory import shown
from tunecompile.runtime.memory.pinned_pool import available

GIB = 1 << 30
SUPPORTED = {
    "torch": "2.11",
    "transformers": "5.0",
    "peft": "0.18",
    "bitsandbytes": "0.50",
    "trl": "1.0",
}  #: the oldest of each; there is no newest
OPTIONAL = {"transformers": "hf", "peft": "hf", "bitsandbytes": "qlora", "trl": "trl"}  #: the extra that brings it
VARIABLES = {  #: those that change what a training does, and how; None: an ordinary choice
    "TUNECOMPILE": "0 switches tunecompile off",
    "TUNECOMPILE_DUMP": "every graph is written, and nothing comes from caches",
    "TUNECOMPILE_PASSES": None,
    "TUNECOMPILE_CACHE": None,
    "TUNECOMPILE_TURNS": "a comparison sets it for its own processes",
    "TORCH_COMPILE_DISABLE": "1 leaves all code uncompiled",
    "TORCHDYNAMO_DISABLE": "1 leaves all code uncompiled",
    "TRITON_INTERPRET": "1 runs kernels in Python, which is for tests",
    "CUDA_LAUNCH_BLOCKING": "1 has every kernel waited for",
}
LIBRARY = "#include <math.h>\n%s double doctor(double x) { return sqrt(x); }\n"


@dataclass(frozen=True)
class Line:
    """What a check found."""

    name: str
    status: Literal["ok", "warning", "fail"]
    found: str
    mend: str = ""  #: a sentence; empty where nothing is to be done


def gpu() -> Line:
    nvml = Nvml()
    names = ", ".join(f"{each.name}{f' {shown(each.total)}' if each.total else ''}" for each in nvml.gpus())
    if torch.cuda.is_available():
        weakest = min(torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count()))
        found = f"{names or torch.cuda.get_device_name(0)}, compute capability {weakest[0]}.{weakest[1]}"
        if weakest < (7, 0):
            return Line(
                "GPU", "fail", found, "Triton needs compute capability 7.0: use a newer GPU, or leave tunecompile off."
            )
        return (
            Line("GPU", "ok", found)
            if weakest >= (8, 0)
            else Line("GPU", "warning", found, "It computes bf16 slowly: train with fp16.")
        )
    if not nvml.handles:
        return Line("GPU", "ok", f"no GPU: {nvml.missing}")
    if torch.version.cuda is None:
        return Line(
            "GPU",
            "fail",
            f"{names}, but torch {torch.__version__} has no CUDA",
            "Install a torch with CUDA: see https://pytorch.org/get-started.",
        )
    return Line(
        "GPU",
        "fail",
        f"{names}, but torch cannot use it ({_why_no_cuda()})",
        "Update the driver, or install a torch for the driver's CUDA version.",
    )


def _why_no_cuda() -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return summary(error)
    return "CUDA_VISIBLE_DEVICES hides it" if "CUDA_VISIBLE_DEVICES" in os.environ else "it does not say why"


def driver() -> Line:
    nvml = Nvml()
    if not nvml.handles:
        return Line("driver", "ok", f"no GPU: {nvml.missing}")
    version, highest = (
        nvml.library.nvmlSystemGetDriverVersion(),
        divmod(nvml.library.nvmlSystemGetCudaDriverVersion(), 1000),
    )
    highest = (highest[0], highest[1] // 10)
    found = f"{version if isinstance(version, str) else version.decode()}, for CUDA up to {highest[0]}.{highest[1]}; torch has CUDA {torch.version.cuda}"
    wanted = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))
    if wanted <= highest:
        return Line("driver", "ok", found)
    if wanted[0] == highest[0]:  # NVIDIA's minor version compatibility
        return Line(
            "driver", "warning", found, "Update the driver: what is compiled at run time may need the newer one."
        )
    return Line("driver", "fail", found, f"Update the driver, or install a torch for CUDA {highest[0]}.")


def package(name: str) -> Line:
    version, least = known_bugs.installed(name), SUPPORTED[name]
    if version is None:
        return Line(name, "ok", f"not installed; models that need it: pip install 'tunecompile[{OPTIONAL[name]}]'")
    if version >= least:
        return Line(name, "ok", f"{version} (supported: {least} or newer)")
    return Line(
        name, "fail", f"{version}, and {least} is the oldest supported", f"Update it: pip install -U '{name}>={least}'"
    )


def triton() -> Line:
    version = known_bugs.installed("triton")
    wanted = next(
        (
            line.split(";")[0].split("==")[1].strip()
            for line in metadata.requires("torch") or ()
            if line.startswith("triton==")
        ),
        None,
    )
    if version is None:
        needed = torch.cuda.is_available()
        return Line(
            "triton",
            "fail" if needed else "ok",
            "not installed" + ("" if needed else "; only a GPU needs it"),
            f"Install it: pip install triton{f'=={wanted}' if wanted else ''}" if needed else "",
        )
    if wanted is None:
        return Line("triton", "ok", f"{version}; this build of torch asks for none")
    if version == TorchVersion(wanted):
        return Line("triton", "ok", f"{version}, which torch {torch.__version__} asks for")
    return Line(
        "triton",
        "fail",
        f"{version}, but torch {torch.__version__} asks for {wanted}",
        f"Install that: pip install triton=={wanted}",
    )


def bitsandbytes() -> Line:
    name = "bitsandbytes library"
    if known_bugs.installed("bitsandbytes") is None:
        return Line(name, "ok", "not installed")
    from bitsandbytes import cextension

    cuda = torch.version.cuda if torch.cuda.is_available() else None
    if "error_msg" in vars(cextension.lib):  # what stands in for a library that could not be loaded
        return Line(
            name,
            "fail",
            f"no native library: {summary(RuntimeError(cextension.lib.error_msg))}",
            f"Install a bitsandbytes that has one for {f'CUDA {cuda}' if cuda else 'this processor'}, or set BNB_CUDA_VERSION to one that it has.",
        )
    if cuda and not cextension.lib.compiled_with_cuda:
        return Line(
            name,
            "fail",
            f"the CPU's only, and torch has CUDA {cuda}",
            f"Install one with a library for CUDA {cuda}: pip install -U bitsandbytes",
        )
    return Line(name, "ok", f"loaded, {f'with CUDA, for torch with CUDA {cuda}' if cuda else 'for the CPU'}")


def known_faults() -> Line:
    found = [str(fault) for fault in known_bugs.FAULTS.values() if fault.present]
    return Line(
        "known faults",
        "ok",
        f"{len(found)} in these versions, each of them avoided" + "".join(f"\n{line}" for line in found),
    )


def headers() -> Line:
    path = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if path.exists():
        return Line("Python headers", "ok", str(path))
    return Line(
        "Python headers",
        "fail" if torch.cuda.is_available() else "warning",
        f"no {path}, without which Triton cannot launch kernels",
        "Install Python's headers: apt install python3-dev, or use a Python that has them (conda, uv).",
    )


def compiler(variable: str, names: tuple[str, str], suffix: str, needed: bool) -> Line:
    """One that makes a shared library, found as Triton (C) and Inductor (C++) find it."""
    name, bad = f"{'C++' if suffix == '.cpp' else 'C'} compiler", "fail" if needed else "warning"
    found = os.environ.get(variable) or next(filter(None, map(shutil.which, names)), None)
    mend = f"Install one (apt install build-essential), or set {variable} to one that works."
    if found is None:
        return Line(name, bad, f"neither {' nor '.join(names)}", mend)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, f"doctor{suffix}")
        source.write_text(LIBRARY % ('extern "C"' if suffix == ".cpp" else ""))
        try:
            done = subprocess.run(
                [*found.split(), str(source), "-O2", "-shared", "-fPIC", "-o", f"{folder}/doctor.so"],
                capture_output=True,
                text=True,
                timeout=60,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return Line(name, bad, f"{found} does not run: {summary(error)}", mend)
    if done.returncode:
        return Line(
            name,
            bad,
            f"{found} cannot make a library: {(done.stderr.strip().splitlines() or ['it says nothing'])[0][:200]}",
            mend,
        )
    return Line(name, "ok", found)


def kernel() -> Line:
    """One of our own, compiled, launched and compared."""
    if not torch.cuda.is_available():
        return Line("Triton kernel", "ok", "no GPU: not run")
    from tunecompile.templates.rms_norm import forward

    x, weight = torch.randn(8, 256, device="cuda"), torch.ones(256, device="cuda")
    try:
        torch.testing.assert_close(
            forward(x, weight), torch.nn.functional.rms_norm(x, (256,), weight, 1e-6), rtol=1e-5, atol=1e-5
        )
    except Exception as error:  # whatever Triton, its compiler or the driver say
        return Line(
            "Triton kernel",
            "fail",
            summary(error),
            "Mend the lines above that fail; if none does, reinstall the triton that torch asks for.",
        )
    return Line("Triton kernel", "ok", f"compiled and right on {torch.cuda.get_device_name()}")


def cache(name: str, find: Callable[[], Path], variable: str) -> Line:
    """Written to, and with room. A folder that is yet to be made is asked of the one it will be made in."""
    mend = f"Set {variable} to a folder on a disk with room that you may write to."
    try:
        folder = find()
        exists = next(path for path in (folder, *folder.parents) if path.exists())
        with tempfile.NamedTemporaryFile(dir=exists, prefix=".tunecompile") as file:
            file.write(bytes(1 << 16))
            file.flush()
        free = shutil.disk_usage(exists).free
    except OSError as error:
        return Line(name, "fail", f"cannot be written to: {summary(error)}", mend)
    status = "fail" if free < GIB // 4 else "warning" if free < 2 * GIB else "ok"
    return Line(
        name,
        status,
        f"{folder}, {shown(free)} free",
        "" if status == "ok" else f"Free some space there (2 GiB are plenty). {mend}",
    )


def triton_cache() -> Path:
    return Path(
        os.environ.get("TRITON_CACHE_DIR") or Path(os.environ.get("TRITON_HOME") or Path.home(), ".triton", "cache")
    )


def host_memory() -> Line:
    free = available()
    if 0 < free < 4 * GIB:
        return Line(
            "host memory",
            "warning",
            f"{shown(free)} available",
            "End other programs: loading a model and offloading need host memory.",
        )
    return Line("host memory", "ok", f"{shown(free)} available" if free else "this system does not say")


def pinned_memory() -> Line:
    import resource

    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    found = f"ulimit -l is {'unlimited' if limit == resource.RLIM_INFINITY else shown(limit)}"
    if not torch.cuda.is_available():
        return Line("pinned memory", "ok", f"no GPU: none is pinned ({found})")
    try:
        torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        return Line(
            "pinned memory",
            "fail",
            f"64 MiB cannot be pinned ({found}): {summary(error)}",
            "Raise the limit: ulimit -l unlimited, or docker run --ulimit memlock=-1.",
        )
    if torch.cuda.device_count() > 1 and limit != resource.RLIM_INFINITY and limit < GIB:
        return Line(
            "pinned memory",
            "warning",
            f"64 MiB were pinned; {found}",
            "For NCCL over InfiniBand: ulimit -l unlimited, or docker run --ulimit memlock=-1.",
        )
    return Line("pinned memory", "ok", f"64 MiB were pinned; {found}")


def nccl() -> Line:
    count = torch.cuda.device_count()
    if count < 2:
        return Line("NCCL", "ok", f"not needed: {'one GPU' if count else 'no GPU: NCCL joins several'}")
    if not torch.distributed.is_nccl_available():
        return Line(
            "NCCL",
            "fail",
            "torch is built without it",
            "Install a torch from https://pytorch.org, or train on one GPU.",
        )
    version, parts = (
        ".".join(map(str, torch.cuda.nccl.version())),
        [torch.ones(1024, device=f"cuda:{index}") for index in range(count)],
    )
    try:
        torch.cuda.nccl.all_reduce(parts)
        torch.testing.assert_close(parts[-1].cpu(), torch.full((1024,), float(count)))
    except Exception as error:
        return Line(
            "NCCL",
            "fail",
            f"{version}: {summary(error)}",
            "Run with NCCL_DEBUG=INFO; in a container give it shared memory: docker run --ipc=host.",
        )
    return Line("NCCL", "ok", f"{version}, summed over {count} GPUs")


def environment() -> Line:
    ours = {name for name in os.environ if name.startswith("TUNECOMPILE")}
    said = [
        f"{name}={os.environ[name]}" for name in sorted(ours | {name for name in VARIABLES if os.environ.get(name)})
    ]
    odd = [
        f"{name}: {VARIABLES.get(name, 'nothing reads it')}"
        for name in (line.split("=")[0] for line in said)
        if VARIABLES.get(name, "unknown")
    ]
    if not odd:
        return Line("environment", "ok", ", ".join(said) or "no variable that changes a training")
    return Line("environment", "warning", ", ".join(said), f"Unset what is not meant ({'; '.join(odd)}).")


def packages() -> Line:
    name = "packages of passes"
    try:
        plugins.pipeline(own_passes.PIPELINE)
        found = [f"{entry.name} of {plugins.label(entry)}" for entry in plugins.chosen(os.environ.get(plugins.CHOICE))]
    except TunecompileError as error:
        return Line(name, "fail", summary(error), f"Update or remove the package, or set {plugins.CHOICE}=none.")
    return Line(name, "ok", ", ".join(found) or "none")


def checks() -> tuple[tuple[str, Callable[[], Line]], ...]:
    """(name, check), in the order in which they are shown: what others rest on comes first."""
    on_gpu = torch.cuda.is_available()
    return (
        ("GPU", gpu),
        ("driver", driver),
        *((name, functools.partial(package, name)) for name in SUPPORTED),
        ("triton", triton),
        ("bitsandbytes library", bitsandbytes),
        ("known faults", known_faults),
        ("Python headers", headers),
        ("C compiler", functools.partial(compiler, "CC", ("gcc", "clang"), ".c", on_gpu)),
        ("C++ compiler", functools.partial(compiler, "CXX", ("g++", "clang++"), ".cpp", not on_gpu)),
        ("Triton kernel", kernel),
        ("Inductor's cache", functools.partial(cache, "Inductor's cache", cache_folder, "TORCHINDUCTOR_CACHE_DIR")),
        ("Triton's cache", functools.partial(cache, "Triton's cache", triton_cache, "TRITON_CACHE_DIR")),
        ("host memory", host_memory),
        ("pinned memory", pinned_memory),
        ("NCCL", nccl),
        ("environment", environment),
        ("packages of passes", packages),
    )


def examine() -> list[Line]:
    """What all checks found. One that raises is a line, too."""
    lines = []
    for name, check in checks():
        try:
            lines.append(check())
        except Exception as error:
            lines.append(
                Line(name, "fail", f"the check failed: {summary(error)}", "Please report this, with the line.")
            )
    return lines
