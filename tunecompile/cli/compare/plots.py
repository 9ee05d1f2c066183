"""Pictures of the report, drawn with matplotlib and returned as SVG in a data URI."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunecompile.cli.compare.curves import batch_noise, differences, timed
from tunecompile.report.html import draw

if TYPE_CHECKING:  # matplotlib is imported where it draws
    from matplotlib.axes import Axes

COLOURS = {
    "hf": "#6b7280",
    "compile": "#d97706",
    "compile-layers": "#fbbf24",
    "liger": "#7c3aed",
    "unsloth": "#059669",
    "unsloth-no-checkpoint": "#34d399",
    "unsloth-padding-free": "#34d399",
    "tunecompile": "#2563eb",
    "tunecompile-fp8": "#db2777",
    "tunecompile-int8": "#ea580c",
    "reference": "#111827",
}


def colour(system: str) -> str:
    """The colour of a system, with and without checkpointing; under a budget (tunecompile@20GiB) it is lighter."""
    other = "#60a5fa" if system.startswith("tunecompile@") else "#9ca3af"
    return COLOURS.get(system, COLOURS.get(system.removesuffix("-checkpoint"), other))


def loss_curves(runs: list[dict], reference: dict | None) -> str:
    """The curves of all systems with the bands of their seeds. Each is thinner than the one below, to show both."""

    def paint(axes: Axes) -> None:
        for rank, run in enumerate(runs):
            steps, tone = range(1, len(run["losses"]) + 1), colour(run["system"])
            if band := run.get("band"):
                axes.fill_between(steps, *zip(*band), color=tone, alpha=0.12, linewidth=0)
            axes.plot(steps, run["losses"], label=run["system"], color=tone, linewidth=max(1.4, 5 - 1.8 * rank))
        if reference:
            label, losses = f"reference ({reference['dtype']})", reference["losses"]
            axes.plot(range(1, len(losses) + 1), losses, "--", label=label, color=colour("reference"), linewidth=1.4)
        axes.set(xlabel="step", ylabel="training loss")
        axes.legend()

    return draw(paint)


def loss_differences(runs: list[dict], base: dict) -> str:
    """Each system's loss minus that of the base, and the band of a batch's noise."""

    def paint(axes: Axes) -> None:
        noise = batch_noise(base["losses"])
        axes.axhspan(-noise, noise, color="#e5e7eb", zorder=0, label="noise of a batch")
        for run in runs:
            apart = differences(run, base)
            axes.plot(range(1, len(apart) + 1), apart, label=run["system"], color=colour(run["system"]), linewidth=1.4)
        axes.set(xlabel="step", ylabel=f"training loss, less that of {base['system']}")
        axes.legend()

    return draw(paint)


def bars(runs: list[dict], values: list[float], unit: str, errors: list[tuple[float, float]] | None = None) -> str:
    """Horizontal bars with their values, one for each run, named by its system, with its shape if there are several.

    errors: distances of each value to the lower and the upper end of its spread.
    """
    several = len({run["shape"] for run in runs}) > 1
    labels = [f"{run['system']}  {run['shape']}" if several else run["system"] for run in runs]

    def paint(axes: Axes) -> None:
        drawn = axes.barh(
            labels,
            values,
            color=[colour(run["system"]) for run in runs],
            height=0.62,
            xerr=list(zip(*errors)) if errors else None,
            error_kw={"ecolor": "#9ca3af", "elinewidth": 1, "capsize": 3},
        )
        axes.bar_label(drawn, fmt="{:,.4g}", padding=4, color="#374151")
        axes.margins(x=0.18)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(unit)

    return draw(paint, height=0.9 + 0.45 * len(values))


def step_time_bars(runs: list[dict]) -> str:
    """Medians with quartiles, since the slowest step on a shared machine would set the scale."""
    medians, quartiles = [run["step_ms"]["median"] for run in runs], [quartile_distances(run) for run in runs]
    return bars(runs, medians, "ms a step (median, with quartiles)", quartiles)


def quartile_distances(run: dict) -> tuple[float, float]:
    """Distances of the median step to the lower and the upper quartile, in milliseconds."""
    middle = run["step_ms"]["median"]
    times = sorted(timed(run))
    if not times:
        return middle - run["step_ms"]["min"], run["step_ms"]["max"] - middle
    lower, upper = times[len(times) // 4], times[(3 * len(times)) // 4 - (len(times) % 4 == 0)]
    return middle - min(middle, lower), max(middle, upper) - middle


def gradient_scatter(rows: list[dict], limit: float) -> str:
    """A dot for each parameter. Below the line it is nearer to the reference than eager's."""
    errors = [(row["eager_error"], row["error"]) for row in rows]
    smallest = min((value for pair in errors for value in pair if value > 0), default=1e-8)
    errors = [(max(eager, smallest), max(ours, smallest)) for eager, ours in errors]
    ends = min(map(min, errors)) * 0.7, max(map(max, errors)) * 1.4

    def paint(axes: Axes) -> None:
        axes.plot(ends, ends, color="#6b7280", linewidth=1, label="as exact as eager")
        bound = [limit * end for end in ends]
        axes.plot(ends, bound, ":", color="#dc2626", linewidth=1, label=f"{limit} times eager's error")
        for kind, tone in (("lora_A", "#2563eb"), ("lora_B", "#0ea5e9"), ("weights", "#2563eb")):
            kinds = [next((k for k in ("lora_A", "lora_B") if k in row["parameter"]), "weights") for row in rows]
            if picked := [pair for pair, found in zip(errors, kinds) if found == kind]:
                axes.scatter(*zip(*picked), s=12, color=tone, alpha=0.6, linewidths=0, label=kind)
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
        axes.set(xlabel="eager's error", ylabel="tunecompile's error")
        axes.legend(loc="upper left")

    return draw(paint, width=5.2, height=4.4)
