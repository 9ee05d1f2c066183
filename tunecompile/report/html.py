"""Shared by HTML reports: jinja2 environments, and matplotlib pictures as SVG in a data URI."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:  # of the extra `cli`
    from jinja2 import Environment
    from matplotlib.axes import Axes

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


def make_environment(package: str) -> Environment:
    """The jinja2 environment of the templates in the folder of a package."""
    from jinja2 import Environment, PackageLoader, select_autoescape

    return Environment(
        loader=PackageLoader(package, "."),
        autoescape=select_autoescape(["html.jinja", "html"]),
        trim_blocks=True,
        lstrip_blocks=True,
    )


def draw(paint: Callable[[Axes], None], width: float = 6.2, height: float = 3.4) -> str:
    """Call `paint(axes)` with the axes of a new figure, `width` x `height` inches, and return it as a data URI."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(cast(Any, STYLE)):
        figure, axes = pyplot.subplots(figsize=(width, height), layout="constrained")
        paint(axes)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
        pyplot.close(figure)
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()
