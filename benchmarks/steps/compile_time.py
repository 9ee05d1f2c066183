"""What the first step waits for, kind of layer by kind of layer: Dynamo, our passes, the joint trace, code, kernels. One JSON.

    python benchmarks/steps/compile_time.py --model llama-3.1-8b --mode qlora --layers 4 --shapes 4x2048,2x1024,3x512 --out FILE
    python benchmarks/steps/compile_time.py --model llama-tiny --executor eager --shapes 2x64 --profile /tmp/first.prof

The model is random weights of a known architecture. Each run is a process of its own with an empty folder of caches; with --warm a
second one follows in the same folder. Times are exclusive: what a phase calls is not in its time. `rest` is what no phase has: the
step's own launches, the first use of libraries, the optimizer's state.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import functools
import gc
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs without an installation, too

from benchmarks._jobs import DEVICE, add_loop_options, loop_job
from benchmarks._results import print_row, printed_rows, write

#: phases in the order in which a kind of layer goes through them, and the functions that each is the time of
PHASES = {
    "dynamo": ("torch._dynamo.convert_frame:ConvertFrame.__call__",),
    "copies": ("tunecompile.compiler.backend:Backend.__call__",),
    "attention": ("tunecompile.compiler.backend:choosing_attention",),
    "recognize": ("tunecompile.compiler.backend:run_stage",),
    "joint": (
        "tunecompile.compiler.backend:compile_inductor",
        "tunecompile.compiler.backend:compile_eager",
    ),
    "partition": ("tunecompile.compiler.partitioner:Partitioner.__call__",),
    "survey": ("tunecompile.runtime.memory.budget:RuntimePlanner._see",),
    "lower": ("tunecompile.compiler.partitioner:run_stage",),
    "code": ("torch._inductor.compile_fx:compile_fx_inner",),
    "kernels": ("torch._inductor.async_compile:AsyncCompile.wait",),
}


class Stopwatch:
    """Exclusive seconds by (region, phase), of functions that are wrapped while it runs."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, str], float] = defaultdict(float)
        self.open: list[list[Any]] = []  # [phase, region, exclusive seconds], outermost first
        self.since = 0.0
        self.collecting = 0.0  # seconds of Python's garbage collector, which are in those of phases, too

    def _collect(self, event: str, _: dict[str, Any]) -> None:
        """A callback of the garbage collector."""
        self.collecting += time.perf_counter() * (1 if event == "stop" else -1)

    def _turn(self) -> None:
        """Give the time since the last turn to the innermost phase."""
        now = time.perf_counter()
        if self.open:
            self.open[-1][2] += now - self.since
        self.since = now

    @contextlib.contextmanager
    def phase(self, name: str, region: str | None) -> Iterator[None]:
        self._turn()
        for outer in self.open if region else ():
            outer[1] = outer[1] or region
        self.open.append([name, region or next((o[1] for o in reversed(self.open) if o[1]), None), 0.0])
        try:
            yield
        finally:
            self._turn()
            _, found, seconds = self.open.pop()
            self.seconds[found or "", name] += seconds

    def wrap(self, phase: str, path: str) -> Callable[[], None]:
        """Time a function. Returns what undoes it."""
        module, _, name = path.partition(":")
        owner: Any = __import__(module, fromlist=["_"])
        *holders, name = name.split(".")
        for holder in holders:
            owner = getattr(owner, holder)
        plain = getattr(owner, name)

        @functools.wraps(plain)
        def timed(*args: Any, **kwargs: Any) -> Any:
            region = getattr(args[0], "region", None) if phase == "copies" else None
            with self.phase(phase, region):
                return plain(*args, **kwargs)

        setattr(owner, name, timed)
        return functools.partial(setattr, owner, name, plain)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        undo = []
        for phase, paths in PHASES.items():
            for path in paths:
                with contextlib.suppress(ImportError, AttributeError):  # another version of torch
                    undo.append(self.wrap(phase, path))
        gc.callbacks.append(self._collect)
        try:
            yield
        finally:
            gc.callbacks.remove(self._collect)
            for each in undo:
                each()

    def taken(self) -> dict[str, dict[str, float]]:
        """Seconds by region and phase, and none from here on."""
        found: dict[str, dict[str, float]] = {}
        for (region, phase), seconds in sorted(
            self.seconds.items(), key=lambda item: (item[0][0], list(PHASES).index(item[0][1]))
        ):
            if seconds >= 0.005:
                found.setdefault(region or "outside", {})[phase] = round(seconds, 3)
        self.seconds.clear()
        return found


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_loop_options(parser)
    parser.add_argument("--shapes", default="4x2048", help="a step of each in turn; the first one's is the first step")
    parser.add_argument("--memory", help="a budget, as optimize takes it")
    parser.add_argument("--executor", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--warm", action="store_true", help="once more, with the caches that the first run filled")
    parser.add_argument("--ready", action="store_true", help="wait for Inductor's workers before the first step")
    parser.add_argument("--profile", type=Path, help="write what cProfile sees of the first step here")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each shape, in this process."""
    import tunecompile
    from tunecompile.cli.compare.models import load_model, precision
    from tunecompile.cli.compare.spec import Shape, parse_shape

    shapes = [parse_shape(shape) for shape in given.shapes.split(",")]
    job = loop_job(given, system="tunecompile", shapes=tuple(given.shapes.split(",")), steps=1)
    model = load_model(job)
    model = tunecompile.optimize(model, executor=given.executor, memory=given.memory).train()
    if given.ready:
        from torch._inductor.async_compile import AsyncCompile

        AsyncCompile.wait_pool_ready()
    vocabulary, watch = model.config.get_text_config().vocab_size, Stopwatch()

    def step(shape: Shape) -> float:
        ids = torch.randint(vocabulary, (shape.rows, shape.length), device=DEVICE)
        begin = time.perf_counter()
        with precision(job):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        loss.item()
        return time.perf_counter() - begin

    torch.ones(1, device=DEVICE).sum().item()  # the GPU's context is not compilation
    for place, shape in enumerate(shapes):
        watch.collecting = 0.0
        profile = cProfile.Profile() if given.profile and place == 0 else None
        with watch.running(), profile or contextlib.nullcontext():
            seconds = step(shape)
        if profile is not None:
            profile.dump_stats(given.profile)
        phases = watch.taken()
        again = step(shape)
        rest = seconds - sum(sum(row.values()) for row in phases.values())
        yield {
            "system": "tunecompile",
            "model": given.model,
            "mode": given.mode,
            "layers": given.layers,
            "shape": str(shape),
            "status": "ok",
            "first_step_s": round(seconds, 3),
            "second_step_s": round(again, 3),
            "rest_s": round(rest, 3),
            "collecting_s": round(watch.collecting, 3),
            "phases": phases,
        }


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['model']} {row['shape']} {row['caches']}: {row['first_step_s']:.2f} s, then {row['second_step_s']:.2f} s"
    )
    for region, phases in row["phases"].items():
        told = "  ".join(f"{phase} {seconds:.2f}" for phase, seconds in phases.items())
        print(f"  {region.rpartition('_')[2][:28]:<28} {sum(phases.values()):6.2f} s = {told}")
    print(
        f"  {'rest':<28} {row['rest_s']:6.2f} s   (garbage collector, in all: {row['collecting_s']:.2f} s)", flush=True
    )


def main() -> int:
    given = parse_arguments()
    if given.child:
        for row in measure(given):
            print_row(row)
        return 0
    from tunecompile.cli.compare.machine import header

    result: dict[str, Any] = {**header(), "runs": []}
    with tempfile.TemporaryDirectory(prefix="tunecompile-first-step-") as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        for kind in ("cold", "warm") if given.warm else ("cold",):
            command = [sys.executable, __file__, *sys.argv[1:], "--child"]
            child = subprocess.Popen(command, env={**os.environ, **caches}, stdout=subprocess.PIPE, text=True)
            for row in printed_rows(child.stdout or ()):
                result["runs"].append({**row, "caches": kind})
                show(result["runs"][-1])
                if given.out:
                    write(given.out, result, ["the rest"])
            if child.wait():
                return child.returncode
    if given.out:
        write(given.out, result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
