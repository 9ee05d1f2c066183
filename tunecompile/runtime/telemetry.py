"""The training process's side of `tunecompile monitor`: steps and tokens by the host's clock, written for a
monitor that requests them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from tunecompile.notes import KINDS, Note
from tunecompile.planner.device_memory import Spec, gauge_of
from tunecompile.runtime import telemetry_files
from tunecompile.runtime.accumulation import Batch
from tunecompile.runtime.memory.budget import RuntimePlanner

WINDOW = 20  #: steps over which speed is taken
KEPT = 80  #: steps whose times are kept
LINES = 3  #: last lines about the training's health that a monitor shows
EVERY = 1.0  #: seconds between two looks for a monitor


@dataclass
class Telemetry:
    """Counts of one optimized model. `describe` returns the other fields of its `Status`, and is called when a monitor
    asks.
    """

    describe: Callable[[], dict]
    steps: int = 0
    begun: deque[Batch] = field(default_factory=lambda: deque(maxlen=KEPT))  #: the last ones
    findings: deque[str] = field(default_factory=lambda: deque(maxlen=LINES))
    found: Counter[str] = field(default_factory=Counter)  #: lines about the training's health by their codes
    next_look: float = 0.0
    file: Path | None = None

    def beat(self, tokens: int, begins: bool = True) -> None:
        """A step of so many tokens begins. Never raises: a figure on a screen is not worth a training run.

        begins: whether there are no gradients yet, to which it adds its own.
        """
        now = time.perf_counter()
        self.steps += 1
        if self.steps > 1:  # the first one compiles
            self.begun.append(Batch(now, tokens, begins))
        if now < self.next_look:
            return
        self.next_look = now + EVERY
        with contextlib.suppress(Exception):
            if telemetry_files.requested():
                self.file = telemetry_files.write(self.status(), f"{os.getpid()}-{id(self):x}.json")

    @property
    def step_ms(self) -> float | None:
        """Milliseconds from one step's beginning to the next one's, optimizer and data included: the median, which
        pauses do not move.
        """
        apart = [after.when - batch.when for batch, after in itertools.pairwise(self._recent())]
        return 1e3 * statistics.median(apart) if apart else None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second over the last steps, without the one that has just begun; None before there are two."""
        if len(recent := self._recent()) < 2:
            return None
        return sum(batch.tokens for batch in recent[:-1]) / (recent[-1].when - recent[0].when)

    def _recent(self) -> list[Batch]:
        return list(self.begun)[-WINDOW - 1 :]

    def status(self) -> telemetry_files.Status:
        """All figures now."""
        rank = os.environ.get("RANK", "")
        return telemetry_files.Status(
            pid=os.getpid(),
            updated=time.time(),
            rank=int(rank) if rank.isdigit() else None,
            steps=self.steps,
            tokens_per_s=self.tokens_per_s,
            step_ms=self.step_ms,
            findings=list(self.findings),
            found=dict(self.found),
            **self.describe(),
        )

    def tell(self, findings: list[Note]) -> None:
        """Lines about the training's health, from `tunecompile.watch`, with what to do about each."""
        self.findings.extend(f"{each}. {KINDS[each.code].mend}" for each in findings)
        self.found.update(each.code for each in findings)
        self.next_look = 0.0

    def stop(self) -> None:
        """The model is no longer optimized."""
        if self.file is not None:
            self.file.unlink(missing_ok=True)


def describe(model: nn.Module, memory: Spec, budget: RuntimePlanner | None) -> dict:
    """The fields of a model's `Status` that `Telemetry` does not count. The host knows all of them: no wait for the
    device.
    """
    device = next((p.device for p in model.parameters() if p.device.type != "cpu"), torch.device("cpu"))
    on, plan = gauge_of(device), budget and budget.admitted
    peak = budget.progress.measured if budget else on.peak()[0]
    return {
        "model": type(model).__name__,
        "device": str(device),
        "gpu": _uuid(device),
        "memory": None if memory is None else str(memory),
        "budget": budget.memory.limit if budget and budget.memory.limit != "auto" else None,
        "predicted_peak": plan.peak if plan else None,
        "measured_peak": peak or None,
        "allocated": on.allocated() or None,
    }


def _uuid(device: torch.device) -> str | None:
    """The UUID by which NVML knows the device: numbers differ where CUDA_VISIBLE_DEVICES is set."""
    found = getattr(torch.cuda.get_device_properties(device), "uuid", None) if device.type == "cuda" else None
    return f"GPU-{found}" if found is not None else None
