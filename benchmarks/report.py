"""The measured tables and pictures of the README and of the docs, made from the results beside this file.

    python benchmarks/report.py            # print the README's table
    python benchmarks/report.py --write    # put every table into its page, and draw the pictures
    python benchmarks/report.py --check    # exit with 1 where a page is not what --write makes of it

A page says where a table goes by two comments; what stands between them is replaced:

    <!-- table: speed -->
    <!-- /table -->
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # tests load this file by its path
from report_cards import render_cards
from report_eight_bits import draw_eight_bits, render_curves, render_errors
from report_support import (
    render_architectures,
    render_families,
    render_predictions,
    render_shapes,
    render_suites,
    render_support,
    render_verified,
)
from report_tables import (
    BUDGETS,
    KERNELS,
    load_one,
    load_results,
    median_runs,
    render_batches,
    render_kernels,
    render_longest,
    render_peaks,
    render_rivals,
    render_scaling,
    render_speed,
    render_speedups,
    shown,
)
from report_trainers import (
    render_evaluation,
    render_first_losses,
    render_generation,
    render_others,
    render_runs,
    render_trainers,
    render_vision,
)

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs" / "pages"
GUIDES = (DOCS / "guides" / "first-step.md", DOCS / "guides" / "trl.md")
PAGES = (ROOT / "README.md", *GUIDES, *sorted((DOCS / "results").glob("*.md")))
IMAGES = DOCS / "images"
COLUMNS = 3  #: panels side by side in the picture
TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- /table -->)", re.S)
TABLES: dict[str, Callable[[], str]] = {
    "rivals": render_rivals,
    "speed": render_speed,
    "cards": render_cards,
    "runs": render_runs,
    "trainers": render_trainers,
    "generation": render_generation,
    "vision": render_vision,
    "others": render_others,
    "evaluation": render_evaluation,
    "first": render_first_losses,
    "longest": render_longest,
    "batches": render_batches,
    "peaks": render_peaks,
    "predictions": render_predictions,
    "verified": render_verified,
    "families": render_families,
    "shapes": render_shapes,
    "curves": render_curves,
    "errors": render_errors,
    "speedups": render_speedups,
    "scaling": render_scaling,
    "kernels": lambda: render_kernels(load_one(KERNELS)),
    "support": lambda: render_support(load_one("support.json")),
    "suites": render_suites,
    "architectures": lambda: render_architectures(load_one("architectures.json")),
}


def filled(text: str) -> str:
    """A page with every table that it names."""
    return TABLE.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], text)


def outdated() -> list[Path]:
    """Pages whose tables are not those of the results."""
    return [page for page in PAGES if filled(page.read_text(encoding="utf-8")) != page.read_text(encoding="utf-8")]


def draw(results: list[dict], path: Path) -> None:
    """Tokens a second, one panel a case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from tunecompile.cli.compare.plots import colour
    from tunecompile.report.html import STYLE

    with pyplot.rc_context(STYLE):
        rows = -(-len(results) // COLUMNS)
        figure, panels = pyplot.subplots(
            rows, COLUMNS, figsize=(4.6 * COLUMNS, 2.6 * rows), layout="constrained", squeeze=False
        )
        for axes in panels.flat[len(results) :]:
            axes.remove()
        for axes, result in zip(panels.flat, results, strict=False):
            runs = [run for run in median_runs(result) if run["status"] == "ok"]
            bars = axes.barh(
                [shown(run["system"]).replace("*", "") for run in runs],
                [run["tokens_per_s"] for run in runs],
                color=[colour(run["system"]) for run in runs],
            )
            axes.bar_label(bars, fmt="{:,.0f}", padding=3)
            axes.margins(x=0.18)
            axes.grid(axis="y", visible=False)
            axes.set_title("{model}, {mode}, {shape}".format(**runs[0]), fontsize=10)
            axes.set_xlabel("tokens a second")
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


def draw_budgets(result: dict, path: Path) -> None:
    """Step time against peak memory: a curve over the budgets, a point for each other system."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from tunecompile.cli.compare.plots import colour
    from tunecompile.report.html import STYLE

    runs = [run for run in result["runs"] if run["status"] == "ok"]
    curve = sorted(
        (run["peak_gib"], run["step_ms"]["median"]) for run in runs if run["system"].startswith("tunecompile")
    )
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(6.8, 3.6), layout="constrained")
        axes.plot(*zip(*curve, strict=True), marker="o", color=colour("tunecompile"), label="tunecompile, memory=...")
        for run in runs:
            if not run["system"].startswith("tunecompile"):
                place = run["peak_gib"], run["step_ms"]["median"]
                axes.scatter(*place, color=colour(run["system"]), zorder=3)
                axes.annotate(shown(run["system"]), place, xytext=(6, 4), textcoords="offset points", fontsize=9)
        widest, longest = (
            max(run[key] if key == "peak_gib" else run[key]["median"] for run in runs)
            for key in ("peak_gib", "step_ms")
        )
        axes.set(
            xscale="log",
            xlabel="peak memory, GiB",
            ylabel="ms a step",
            ylim=(0, 1.1 * longest),
            xlim=(None, 1.5 * widest),
        )
        axes.set_title("{model}, {mode}, {shape}".format(**runs[0]), fontsize=10)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("{x:g}")
        axes.legend(loc="lower left")
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    if given.check:
        for page in (old := outdated()):
            print(f"{page.relative_to(ROOT)} is not what `python benchmarks/report.py --write` makes of it")
        return int(bool(old))
    if not given.write:
        print(TABLES["rivals"]())
        return 0
    for page in outdated():
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
    draw(load_results(), IMAGES / "speed.svg")
    if (budgets := load_one(BUDGETS)) is not None:
        draw_budgets(budgets, IMAGES / "memory.svg")
    draw_eight_bits(IMAGES / "eight-bits.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
