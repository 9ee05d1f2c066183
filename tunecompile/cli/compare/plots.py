"""Pictures of the report, drawn with matplotlib and returned as SVG in a data URI."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunecompile.cli.compare.curves import differences
from tunecompile.cli.compare.seeds import timed
from tunecompile.report.html import draw

if TYPE_CHECKING:  # matplotlib is imported where it draws
    from matplotlib.axes import Axes

COLOURS = {
    "hf": "#6b7280",
    "hf-checkpoint": "#6b7280",
    "compile": "#d97706",
    "compile-layers": "#fbbf24",
    "liger": "#7c3aed",
    "liger-checkpoint": "#7c3aed",
    "unsloth": "#059669",
    "unsloth-no-checkpoint": "#34d399",
    "unsloth-padding-free": "#34d399",
    "tunecompile": "#2563eb",
    "tunecompile-fp8": "#db2777",
    "reference": "#111827",
}


def colour(system: str) -> str:
    """The colour of a system; under a budget (tunecompile@20GiB) it is lighter."""
    return COLOURS.get(system, "#60a5fa" if system.startswith("tunecompile@") else "#9ca3af")


def loss_curves(runs: list[dict], reference: dict | None) -> str:
    """The curves of all systems with the bands of their seeds. Each is thinner than the one below, to show both."""

    def paint(axes: Axes) -> None:
        for run in runs:
            if band := run.get("band"):
                axes.fill_between(
                    range(1, len(band) + 1), *zip(*band), color=colour(run["system"]), alpha=0.12, linewidth=0
                )
        curves = [(r["system"], r["losses"]) for r in runs]
        if reference:
            curves.append(("reference", reference["losses"]))
        for rank, (name, losses) in enumerate(curves):
            label = f"reference ({reference['dtype']})" if reference and name == "reference" else name
            axes.plot(
                range(1, len(losses) + 1),
                losses,
                label=label,
                color=colour(name),
                linewidth=max(1.4, 5 - 1.8 * rank),
                linestyle=(0, (3, 2)) if name == "reference" else "-",
            )
        axes.set(xlabel="step", ylabel="training loss")
        axes.legend()

    return draw(paint)


def loss_differences(runs: list[dict], base: dict, noise: float) -> str:
    """Each system's loss minus that of the base, and the band of a batch's noise."""

    def paint(axes: Axes) -> None:
        steps = range(1, len(base["losses"]) + 1)
        axes.axhspan(-noise, noise, color="#e5e7eb", zorder=0, label="noise of a batch")
        for run in runs:
            apart = differences(run, base)
            axes.plot(steps[: len(apart)], apart, label=run["system"], color=colour(run["system"]), linewidth=1.4)
        axes.set(xlabel="step", ylabel=f"training loss, less that of {base['system']}")
        axes.legend()

    return draw(paint)


def bars(
    labels: list[str],
    systems: list[str],
    values: list[float],
    unit: str,
    errors: list[tuple[float, float]] | None = None,
) -> str:
    """Horizontal bars with their values."""

    def paint(axes: Axes) -> None:
        places = range(len(values))
        spread = list(zip(*errors)) if errors else None
        axes.barh(
            places,
            values,
            color=[colour(s) for s in systems],
            height=0.62,
            xerr=spread,
            error_kw={"ecolor": "#9ca3af", "elinewidth": 1, "capsize": 3},
        )
        axes.set_yticks(places, labels)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(unit)
        top = max(v + (e[1] if errors else 0) for v, e in zip(values, errors or [(0, 0)] * len(values)))
        axes.set_xlim(0, top * 1.18 or 1)
        for place, value in zip(places, values):
            past = value + (errors[place][1] if errors else 0)
            axes.text(past + top * 0.015, place, f"{value:,.4g}", va="center", color="#374151")

    return draw(paint, height=0.9 + 0.45 * len(values))


def step_time_bars(runs: list[dict]) -> str:
    """Medians with quartiles, since the slowest step on a shared machine would set the scale."""
    values = [r["step_ms"]["median"] for r in runs]
    spread = [quartile_distances(r) for r in runs]
    return bars(
        [label(r, runs) for r in runs],
        [r["system"] for r in runs],
        values,
        "ms a step (median, with quartiles)",
        spread,
    )


def quartile_distances(run: dict) -> tuple[float, float]:
    """Distances of the median step to the lower and the upper quartile, in milliseconds."""
    middle = run["step_ms"]["median"]
    times = sorted(timed(run))
    if not times:
        return middle - run["step_ms"]["min"], run["step_ms"]["max"] - middle
    lower, upper = times[len(times) // 4], times[(3 * len(times)) // 4 - (len(times) % 4 == 0)]
    return middle - min(middle, lower), max(middle, upper) - middle


def memory_bars(runs: list[dict], key: str, scale: float, unit: str) -> str:
    """Bars of a figure, divided by the scale, of the runs that have it."""
    kept = [r for r in runs if r.get(key) is not None]
    return bars([label(r, runs) for r in kept], [r["system"] for r in kept], [r[key] / scale for r in kept], unit)


def label(run: dict, runs: list[dict]) -> str:
    """The system, with the shape if there are several."""
    return f"{run['system']}  {run['shape']}" if len({r["shape"] for r in runs}) > 1 else run["system"]


def gradient_scatter(rows: list[dict], limit: float) -> str:
    """A dot for each parameter. Below the line it is nearer to the reference than eager's."""

    def paint(axes: Axes) -> None:
        smallest = min((v for r in rows for v in (r["error"], r["eager_error"]) if v > 0), default=1e-8)
        x = [max(r["eager_error"], smallest) for r in rows]
        y = [max(r["error"], smallest) for r in rows]
        low, high = min(x + y) * 0.7, max(x + y) * 1.4
        axes.plot([low, high], [low, high], color="#6b7280", linewidth=1, label="as exact as eager")
        axes.plot(
            [low, high],
            [low * limit, high * limit],
            color="#dc2626",
            linewidth=1,
            linestyle=":",
            label=f"{limit} times eager's error",
        )
        for kind, tone in (("lora_A", "#2563eb"), ("lora_B", "#0ea5e9"), ("", "#2563eb")):
            picked = [
                i for i, r in enumerate(rows) if (kind in r["parameter"] if kind else "lora_" not in r["parameter"])
            ]
            if picked:
                axes.scatter(
                    [x[i] for i in picked],
                    [y[i] for i in picked],
                    s=12,
                    color=tone,
                    alpha=0.6,
                    linewidths=0,
                    label=kind or "weights",
                    rasterized=False,
                )
        axes.set(
            xscale="log",
            yscale="log",
            xlim=(low, high),
            ylim=(low, high),
            xlabel="eager's error",
            ylabel="tunecompile's error",
        )
        axes.legend(loc="upper left")

    return draw(paint, width=5.2, height=4.4)
