"""The table of what small cards train, from the files of `benchmarks/steps/cards.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from report_tables import RESULTS, complete, load_all, to_markdown

HEAD = (
    "model",
    "memory, GiB",
    "tokens/s, 1x2048",
    "longest row that was run",
    "its tokens/s",
    "peak of tensors, of the allocator, GiB",
)


def render_cards(folder: Path = RESULTS) -> str:
    """A row for each model and memory: its usual row, and its longest one."""
    rows = []
    for result in load_all("cards-*.json", folder):
        for budget in dict.fromkeys(run["budget_gib"] for run in result["runs"]):
            runs = [run for run in complete(result) if run["budget_gib"] == budget]
            if runs:
                rows.append(_row(runs[0], max(runs, key=_tokens), budget))
    return to_markdown(HEAD, rows) if rows else ""


def _row(usual: dict[str, Any], longest: dict[str, Any], budget: float) -> list[str]:
    how = [usual["mode"]]
    how += ["embedding on the host"] * usual["host_embedding"] + ["adapters on attention"] * (not usual["experts"])
    peak = f"{longest['peak_gib']:.1f}, {longest['peak_reserved_gib']:.1f}"
    figures = [f"{usual['tokens_per_s']:,.0f}", f"{_tokens(longest):,}", f"{longest['tokens_per_s']:,.0f}", peak]
    return [f"{usual['model']}, {', '.join(how)}", f"{budget:g}", *figures]


def _tokens(run: dict[str, Any]) -> int:
    return int(run["shape"].partition("x")[2])
