"""What HTML reports share: jinja2 environments, and matplotlib pictures as SVG in a data URI."""

from __future__ import annotations

import base64
import io

STYLE = {
    "font.size": 10,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9ca3af",
    "axes.labelcolor": "#374151",
    "xtick.color": "#6b7280",
    "ytick.color": "#6b7280",
    "axes.grid": True,
    "grid.color": "#eef0f3",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.fonttype": "path",
    "svg.hashsalt": "tunecompile",
}


def make_environment(package: str):
    """Of the templates that lie in this package."""
    from jinja2 import Environment, PackageLoader, select_autoescape

    return Environment(
        loader=PackageLoader(package, "."),
        autoescape=select_autoescape(["html.jinja", "html"]),
        trim_blocks=True,
        lstrip_blocks=True,
    )


def draw(paint, width: float = 6.2, height: float = 3.4) -> str:
    """Run `paint(axes)` on a fresh figure and return it as a data URI."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(width, height), layout="constrained")
        paint(axes)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
        pyplot.close(figure)
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()
