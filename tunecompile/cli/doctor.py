"""`tunecompile doctor`: what on this machine would prevent a training from compiling, and the remedies.

A check is a function that returns a `Line`. Nothing is changed: files are written to temporary folders, and briefly to
caches.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata

import torch
from torch.torch_version import TorchVersion

from tunecompile import passes as own_passes
from tunecompile._torch import known_bugs, lookup
from tunecompile._torch.card import COMPILED, EMULATED, RUN, shown_on
from tunecompile._torch.inductor import cache_folder
from tunecompile._torch.private_names import PRIVATE_NAMES
from tunecompile.cli.monitor.gpu import Nvml
from tunecompile.cli.toolchain import GIB, Line, cache, compiler, fail, headers, kernel, line, ok, triton_cache, warning
from tunecompile.compiler import plugins
from tunecompile.errors import TunecompileError, summary
from tunecompile.integrations.private_names import PRIVATE_NAMES as FOREIGN_NAMES
from tunecompile.passes.plan import probe
from tunecompile.planner.device_memory import shown
from tunecompile.runtime.memory.host.pinned_pool import available

#: the oldest supported version of each; there is no newest
SUPPORTED = {"torch": "2.11", "transformers": "5.0", "peft": "0.18", "bitsandbytes": "0.50", "trl": "1.0"}
OPTIONAL = {"transformers": "hf", "peft": "hf", "bitsandbytes": "qlora", "trl": "trl"}  #: the extra that installs it
VARIABLES = {  #: variables that change a training, and how; None: an ordinary setting
    "TUNECOMPILE": "0 switches tunecompile off",
    "TUNECOMPILE_AS": "the GPU behaves as another card, with its memory",
    "TUNECOMPILE_DUMP": "every graph is written, and caches are not used",
    "TUNECOMPILE_PASSES": None,
    "TUNECOMPILE_CACHE": None,
    "TUNECOMPILE_NODES": None,
    "TUNECOMPILE_SECONDS": None,
    "TUNECOMPILE_TURNS": "a comparison sets it for its own processes",
    "TORCH_COMPILE_DISABLE": "1 leaves all code uncompiled",
    "TORCHDYNAMO_DISABLE": "1 leaves all code uncompiled",
    "TRITON_INTERPRET": "1 runs kernels in Python, which is for tests",
    "CUDA_LAUNCH_BLOCKING": "1 waits for every kernel",
}


def gpu() -> Line:
    """Check that torch can use the GPUs, and their compute capability."""
    nvml = Nvml()
    names = ", ".join(f"{each.name}{f' {shown(each.total)}' if each.total else ''}" for each in nvml.gpus())
    if torch.cuda.is_available():
        weakest = min(torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count()))
        found = f"{names or torch.cuda.get_device_name(0)}, compute capability {weakest[0]}.{weakest[1]}"
        if weakest < (7, 0):
            return fail(found, "Triton needs compute capability 7.0: use a newer GPU, or leave tunecompile off.")
        return ok(found) if weakest >= (8, 0) else warning(found, "It computes bf16 slowly: train with fp16.")
    if not nvml.handles:
        return ok(f"no GPU: {nvml.missing}")
    if torch.version.cuda is None:
        return fail(
            f"{names}, but torch {torch.__version__} has no CUDA",
            "Install a torch with CUDA: see https://pytorch.org/get-started.",
        )
    return fail(
        f"{names}, but torch cannot use it ({_why_no_cuda()})",
        "Update the driver, or install a torch for the driver's CUDA version.",
    )


def _why_no_cuda() -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return summary(error)
    return "CUDA_VISIBLE_DEVICES hides it" if "CUDA_VISIBLE_DEVICES" in os.environ else "it gives no reason"


def driver() -> Line:
    """Check that the driver supports torch's version of CUDA."""
    nvml = Nvml()
    if not nvml.handles:
        return ok(f"no GPU: {nvml.missing}")
    version = nvml.library.nvmlSystemGetDriverVersion()
    version = version if isinstance(version, str) else version.decode()
    major, minor = divmod(nvml.library.nvmlSystemGetCudaDriverVersion(), 1000)
    highest = (major, minor // 10)
    found = f"{version}, for CUDA up to {highest[0]}.{highest[1]}; torch has CUDA {torch.version.cuda}"
    wanted = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))
    if wanted <= highest:
        return ok(found)
    if wanted[0] == highest[0]:  # NVIDIA's minor version compatibility
        return warning(found, "Update the driver: code that is compiled at run time may need a newer one.")
    return fail(found, f"Update the driver, or install a torch for CUDA {highest[0]}.")


def package(name: str) -> Line:
    """Check that a package is not too old."""
    version, least = known_bugs.installed(name), SUPPORTED[name]
    if version is None:
        return ok(f"not installed; models that need it: pip install 'tunecompile[{OPTIONAL[name]}]'")
    if version >= least:
        return ok(f"{version} (supported: {least} or newer)")
    return fail(f"{version}, and {least} is the oldest supported", f"Update it: pip install -U '{name}>={least}'")


def triton() -> Line:
    """Check that triton has the version that torch requires."""
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
        return line(
            "fail" if needed else "ok",
            "not installed" + ("" if needed else "; only a GPU needs it"),
            f"Install it: pip install triton{f'=={wanted}' if wanted else ''}" if needed else "",
        )
    if wanted is None:
        return ok(f"{version}; this build of torch requires none")
    if version == TorchVersion(wanted):
        return ok(f"{version}, which torch {torch.__version__} requires")
    return fail(
        f"{version}, but torch {torch.__version__} requires {wanted}", f"Install that: pip install triton=={wanted}"
    )


def bitsandbytes() -> Line:
    """Check that bitsandbytes has a native library for torch's CUDA, or for the CPU."""
    if known_bugs.installed("bitsandbytes") is None:
        return ok("not installed")
    from bitsandbytes import cextension

    cuda = torch.version.cuda if torch.cuda.is_available() else None
    if "error_msg" in vars(cextension.lib):  # the substitute of a library that could not be loaded
        return fail(
            f"no native library: {summary(RuntimeError(cextension.lib.error_msg))}",
            f"Install a bitsandbytes that has one for {f'CUDA {cuda}' if cuda else 'this processor'}, "
            "or set BNB_CUDA_VERSION to one that it has.",
        )
    if cuda and not cextension.lib.compiled_with_cuda:
        return fail(
            f"the CPU's only, and torch has CUDA {cuda}",
            f"Install one with a library for CUDA {cuda}: pip install -U bitsandbytes",
        )
    return ok(f"loaded, {f'with CUDA, for torch with CUDA {cuda}' if cuda else 'for the CPU'}")


def known_faults() -> Line:
    """List upstream bugs of the installed versions that tunecompile works around."""
    found = [str(fault) for fault in known_bugs.FAULTS.values() if fault.present]
    return ok(f"{len(found)} in these versions, each of them avoided" + "".join(f"\n{line}" for line in found))


def private_names() -> Line:
    """Names that the packages do not document, and that a newer version may not have."""
    used = [row for row in (*PRIVATE_NAMES, *FOREIGN_NAMES) if row.used]
    gone = [*lookup.missing(load=True), *lookup.lost(FOREIGN_NAMES, load=True)]
    if not gone:
        return ok(f"{len(used)} names that the packages do not document, all of them there")
    lines = "".join(f"\n{row}" for row in gone)
    checked = {row.package: f"'{row.package}=={row.last_checked[-1]}.*'" for row in gone}
    return line(
        "fail" if any(row.required for row in gone) else "warning",
        f"{len(gone)} of {len(used)} names that the packages do not document are gone{lines}",
        f"Install a version that was checked: pip install {' '.join(checked.values())}",
    )


def host_memory() -> Line:
    """Check available host memory."""
    free = available()
    if 0 < free < 4 * GIB:
        return warning(
            f"{shown(free)} available", "End other programs: loading a model and offloading need host memory."
        )
    return ok(f"{shown(free)} available" if free else "unknown on this system")


def pinned_memory() -> Line:
    """Check that host memory can be pinned."""
    import resource

    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    found = f"ulimit -l is {'unlimited' if limit == resource.RLIM_INFINITY else shown(limit)}"
    if not torch.cuda.is_available():
        return ok(f"no GPU: none is pinned ({found})")
    try:
        torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        return fail(
            f"64 MiB cannot be pinned ({found}): {summary(error)}",
            "Raise the limit: ulimit -l unlimited, or docker run --ulimit memlock=-1.",
        )
    if torch.cuda.device_count() > 1 and limit != resource.RLIM_INFINITY and limit < GIB:
        return warning(
            f"64 MiB were pinned; {found}",
            "For NCCL over InfiniBand: ulimit -l unlimited, or docker run --ulimit memlock=-1.",
        )
    return ok(f"64 MiB were pinned; {found}")


def nccl() -> Line:
    """Check that NCCL sums over all GPUs."""
    count = torch.cuda.device_count()
    if count < 2:
        return ok(f"not needed: {'one GPU' if count else 'no GPU: NCCL joins several'}")
    if not torch.distributed.is_nccl_available():
        return fail("torch is built without it", "Install a torch from https://pytorch.org, or train on one GPU.")
    version = ".".join(map(str, torch.cuda.nccl.version()))
    parts = [torch.ones(1024, device=f"cuda:{index}") for index in range(count)]
    try:
        torch.cuda.nccl.all_reduce(parts)
        torch.testing.assert_close(parts[-1].cpu(), torch.full((1024,), float(count)))
    except Exception as error:
        return fail(
            f"{version}: {summary(error)}",
            "Run with NCCL_DEBUG=INFO; in a container give it shared memory: docker run --ipc=host.",
        )
    return ok(f"{version}, summed over {count} GPUs")


def environment() -> Line:
    """Check for environment variables that change a training."""
    ours = {name for name in os.environ if name.startswith("TUNECOMPILE")}
    given = [
        f"{name}={os.environ[name]}" for name in sorted(ours | {name for name in VARIABLES if os.environ.get(name)})
    ]
    odd = [
        f"{name}: {VARIABLES.get(name, 'nothing reads it')}"
        for name in (line.split("=")[0] for line in given)
        if VARIABLES.get(name, "unknown")
    ]
    if not odd:
        return ok(", ".join(given) or "no variable that changes a training")
    return warning(", ".join(given), f"Unset those that are not intended ({'; '.join(odd)}).")


def card() -> Line:
    """Say what was shown on this kind of card and system."""
    if sys.platform != "linux":
        return warning(f"nothing was tried on {sys.platform}", "Linux is what the tests run on.")
    if not torch.cuda.is_available():
        return ok("no GPU: the tests run on CPUs, too")
    shown = shown_on(torch.device("cuda", 0))
    if shown == RUN:
        return ok("the tests run on such cards")
    said = {
        EMULATED: "kernels were compiled for such cards, and their choices ran on a larger one",
        COMPILED: "kernels were compiled for such cards, and none ran",
    }.get(shown, "no such card was tried")
    mend = "Let `tunecompile.verify(model, batch)` compare a step with eager's before you train for long."
    return line("ok" if shown == EMULATED else "warning", said, mend)


def templates() -> Line:
    """Try each template on the first GPU, on a few rows."""
    if not torch.cuda.is_available():
        return ok("not tried: no GPU")
    tried = [(f"{op.name}: {fault}", fault) for op, fault in probe.examine(torch.device("cuda", 0))]
    wrong = [said for said, fault in tried if fault]
    if not wrong:
        return ok(f"{len(tried)} of {len(tried)} give what torch gives")
    return warning("; ".join(wrong), "These ops are left to torch. Please report this line.")


def packages() -> Line:
    """Check that passes of installed packages can be used."""
    try:
        plugins.pipeline(own_passes.PIPELINE)
        found = [f"{entry.name} of {plugins.label(entry)}" for entry in plugins.chosen(os.environ.get(plugins.CHOICE))]
    except TunecompileError as error:
        return fail(summary(error), f"Update or remove the package, or set {plugins.CHOICE}=none.")
    return ok(", ".join(found) or "none")


def checks() -> tuple[tuple[str, Callable[[], Line]], ...]:
    """All checks as (name, check), in the order in which they are shown: a check follows those that it depends on."""
    on_gpu = torch.cuda.is_available()
    return (
        ("GPU", gpu),
        ("driver", driver),
        *((name, functools.partial(package, name)) for name in SUPPORTED),
        ("triton", triton),
        ("bitsandbytes library", bitsandbytes),
        ("known faults", known_faults),
        ("private names", private_names),
        ("Python headers", headers),
        ("C compiler", functools.partial(compiler, "CC", ("gcc", "clang"), ".c", on_gpu)),
        ("C++ compiler", functools.partial(compiler, "CXX", ("g++", "clang++"), ".cpp", not on_gpu)),
        ("Triton kernel", kernel),
        ("this card", card),
        ("templates", templates),
        ("Inductor's cache", functools.partial(cache, cache_folder, "TORCHINDUCTOR_CACHE_DIR")),
        ("Triton's cache", functools.partial(cache, triton_cache, "TRITON_CACHE_DIR")),
        ("host memory", host_memory),
        ("pinned memory", pinned_memory),
        ("NCCL", nccl),
        ("environment", environment),
        ("packages of passes", packages),
    )


def examine() -> list[Line]:
    """The findings of all checks. A check that raises has failed."""
    lines = []
    for name, check in checks():
        try:
            found = check()
        except Exception as error:
            found = fail(f"the check failed: {summary(error)}", "Please report this line.")
        lines.append(replace(found, name=name))
    return lines
