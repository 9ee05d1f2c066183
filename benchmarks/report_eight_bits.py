"""What 8 bits do to a training: tables and a picture of benchmarks/steps/eight_bits.py's results."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from report_tables import RESULTS, load_one, shown, to_markdown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CURVES, ERRORS = "eight-bits.json", "eight-bits-errors.json"  #: held-out losses; errors by layer
BASE = "tunecompile"  #: the system in the model's own precision


def curves(result: dict) -> dict[str, list[tuple[int, float, float, float]]]:
    """(step, mean, lowest, highest held-out loss of the seeds) of each system."""
    found: dict[str, dict[int, list[float]]] = {}
    for run in result["runs"]:
        for step, loss in run["held_out"]:
            found.setdefault(run["system"], {}).setdefault(step, []).append(loss)
    return {
        system: [(step, mean(losses), min(losses), max(losses)) for step, losses in sorted(points.items())]
        for system, points in found.items()
    }


def render_curves(folder: Path = RESULTS) -> str:
    """Held-out losses after the last step, by the precision they are judged in, beside those in the model's own."""
    if (result := load_one(CURVES, folder)) is None:
        return ""
    last = {system: points[-1] for system, points in curves(result).items()}
    plain = {
        system: mean(run["held_out_plain"] for run in result["runs"] if run["system"] == system) for system in last
    }
    rows = [
        [
            shown(system),
            step,
            f"{loss:.4f} ({low:.4f} to {high:.4f})",
            f"{100 * (loss / last[BASE][1] - 1):+.2f} %",
            f"{plain[system]:.4f}",
            f"{100 * (plain[system] / plain[BASE] - 1):+.2f} %",
        ]
        for system, (step, loss, low, high) in last.items()
    ]
    own = "held-out loss in its own precision, mean (seeds)"
    return to_markdown(("system", "steps", own, "beside bf16", "the same adapters in bf16", "beside bf16"), rows)


def render_errors(folder: Path = RESULTS) -> str:
    """The error of the median gradient in some layers, against the reference."""
    if (result := load_one(ERRORS, folder)) is None:
        return ""
    errors = result["errors_by_layer"]
    layers = range(0, len(errors[BASE]), 5)
    rows = [[shown(system), *(f"{found[layer]:.3f}" for layer in layers)] for system, found in errors.items()]
    return to_markdown(("system", *(f"layer {layer}" for layer in layers)), rows)


def draw_eight_bits(path: Path, folder: Path = RESULTS) -> None:
    """Held-out losses over the steps, and errors of gradients by layer: a panel for each that was measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from tunecompile.report.html import STYLE

    panels = [
        (found, paint) for name, paint in ((CURVES, _losses), (ERRORS, _errors)) if (found := load_one(name, folder))
    ]
    if not panels:
        return
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(
            1, len(panels), figsize=(5.4 * len(panels), 3.6), layout="constrained", squeeze=False
        )
        for place, (result, paint) in zip(axes.flat, panels):
            paint(place, result)
            place.legend()
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


def _losses(axes: Axes, result: dict) -> None:
    from tunecompile.cli.compare.plots import colour

    for system, points in curves(result).items():
        steps, means, low, high = zip(*points)
        axes.plot(steps, means, color=colour(system), label=shown(system).replace("*", ""))
        axes.fill_between(steps, low, high, color=colour(system), alpha=0.2)
    axes.set(xlabel="steps", ylabel="held-out loss, nats a token")


def _errors(axes: Axes, result: dict) -> None:
    from tunecompile.cli.compare.plots import colour

    for system, errors in result["errors_by_layer"].items():
        axes.plot(errors, color=colour(system), label=shown(system).replace("*", ""))
    axes.set(xlabel="layer", ylabel="error of the median gradient", ylim=(0, None))
