"""Times of training steps, of a plain loop or as a trainer tells of them, as figures of a row."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from statistics import mean, median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

SETTLED = 2  #: steps, after which nothing should be compiled, and no step should be slow
SLOW = 2.0  #: medians that a slow step takes


class StepTimes:
    """What each step took, its tokens and loss, and how much was compiled, in all and after the first steps."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        self.ms: list[float] = []
        self.tokens: list[int] = []
        self.losses: list[float] = []
        self.before = self.settled = compilations()
        self.begin()

    def begin(self) -> None:
        """Begin a step, unless it begins where the last one ended."""
        self.begun = self._now()

    def end(self, tokens: int) -> None:
        """End a step on so many tokens."""
        now = self._now()
        self.ms.append(1e3 * (now - self.begun))
        self.begun = now
        self.tokens.append(tokens)
        if len(self.ms) == SETTLED:
            self.settled = compilations()

    def _now(self) -> float:
        if self.cuda:
            import torch

            torch.cuda.synchronize()
        return time.perf_counter()

    def figures(self, untimed: int) -> dict[str, Any]:
        """A row's figures. Steps differ in size: tokens a second are those of all timed steps together.

        Args:
            untimed: the first so many steps are not timed.
        """
        timed, compiled = self.ms[untimed:], compilations()
        step = {"median": median(timed), "min": min(timed), "max": max(timed), "mean": mean(timed)}
        return {
            "repeats": len(timed),
            "tokens_per_s": 1e3 * sum(self.tokens[untimed:]) / sum(timed),
            "step_ms": step,
            "all_step_ms": self.ms,
            "slow_steps": sum(took > SLOW * step["median"] for took in self.ms[SETTLED:]),
            "first_step_s": self.ms[0] / 1e3,
            "compilations": compiled - self.before,
            "late_compilations": compiled - self.settled,
            "losses": self.losses,
        }


def train(
    model: nn.Module, steps: Iterable[tuple[Callable[[], Tensor], int]], untimed: int, lr: float, device: str
) -> dict[str, Any]:
    """The row of a plain loop with AdamW.

    Args:
        model: whose parameters that require gradients are trained.
        steps: of each, what gives its loss, and its number of tokens.
        untimed: so many of them, the first ones, are not timed.
        lr: learning rate.
        device: "cuda" or "cpu".
    """
    import torch

    from tunecompile.cli.compare.meters import memory_figures, reset_memory

    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, times = torch.optim.AdamW(weights, lr=lr, fused=True), StepTimes(device)
    reset_memory(device)
    try:
        for forward, tokens in steps:
            times.begin()
            loss = forward()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            times.losses.append(loss.item())
            times.end(tokens)
    except torch.OutOfMemoryError:
        return {"status": "oom"}
    count = sum(weight.numel() for weight in weights)
    return {"status": "ok", **times.figures(untimed), "trainable_parameters": count, **memory_figures(device)}


def compilations() -> int:
    """How many graphs Dynamo has handed to a compiler, in this process, of whatever system."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def tell(row: dict[str, Any]) -> str:
    """A row in a line."""
    times = "{median:.1f} ms ({min:.1f} to {max:.1f})".format(**row["step_ms"])
    compiled = f"{row['compilations']} graphs, {row['late_compilations']} late"
    return (
        f"{times}, {row['slow_steps']} slow, first {row['first_step_s']:.1f} s, {row['peak_gib']:.1f} GiB, {compiled}"
    )
