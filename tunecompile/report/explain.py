"""`explain`: the report as an HTML page, with the graph of one layer of each kind before and after recognition."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from tunecompile.compiler.graph_dump import describe_change
from tunecompile.compiler.graph_snapshot import GraphSnapshot
from tunecompile.compiler.pass_manager import Context
from tunecompile.errors import MissingExtra
from tunecompile.notes import Note
from tunecompile.planner.device_memory import shown
from tunecompile.planner.solver import plan_lines
from tunecompile.report.graph_layout import Drawing, side_by_side
from tunecompile.report.html import make_environment
from tunecompile.report.report import RegionReport, saved_bytes, summarize
from tunecompile.runtime.layers.region import contexts_of
from tunecompile.runtime.model_state import State, state_of

COLOURS = ("#60a5fa", "#34d399", "#fbbf24", "#c084fc", "#f472b6", "#22d3ee", "#fb923c", "#a3e635", "#818cf8", "#2dd4bf")


@dataclass(frozen=True)
class Picture:
    """Drawings of one graph before and after recognition, at one scale."""

    before: Drawing
    after: Drawing
    calls: tuple[int, int]
    counts: dict[str, int]  #: number of ops, by label
    colours: dict[str, str]  #: colour of each label
    tints: dict[str, str]  #: colour of each box that an op replaced, by the name of the box


def explain(model: nn.Module, path: str | Path = "explain.html") -> Path:
    """Write the report of `model` as a page, with the graph of one layer of each kind before and after recognition.

    Pointing at an operation shows its shape, its dtype and the line of the model that it comes from; at an op, also the
    operations that it replaced. A near miss, an operation that looks like part of an op but is not, is red in both
    drawings, with what was expected and what was found.

    Args:
        model: a model that was given to `optimize`. The first training step fills the page, as it fills the report.
        path: the HTML file, which is overwritten. It needs no other file and no network.

    Returns:
        The path of the file.

    Raises:
        NotOptimized: `model` is not the object that was optimized.
        MissingExtra: jinja2 is not installed.
        OSError: the file cannot be written.
    """
    if importlib.util.find_spec("jinja2") is None:
        raise MissingExtra(what="explain", package="jinja2", extra="cli")
    state = state_of(model)
    page = make_environment("tunecompile.report").get_template("explain.html.jinja")
    path = Path(path)
    path.write_text(page.render(fields(state)), encoding="utf-8")
    return path


def fields(state: State) -> dict[str, Any]:
    """The variables of the page's template."""
    report = summarize(state)
    regions = [
        {
            "report": region,
            "facts": facts(region),
            "graphs": [about(context, region.layers) for context in graphs(contexts_of(compiled))],
        }
        for region, compiled in zip(report.regions, state.compiled(), strict=True)
    ]
    memory = report.memory or {}
    return {
        "model": type(state.base()).__name__,
        "report": report,
        "regions": regions,
        "tails": [head.tally for head in state.heads],
        "plans": plan_lines(memory["plans"]) if memory else [],
        "peaks": {
            name: shown(memory[f"{name}_peak"])
            for name in ("predicted", "measured")
            if memory and memory[f"{name}_peak"]
        },
    }


def facts(region: RegionReport) -> list[str]:
    """Facts of a region for one line."""
    return [
        f"{region.layers} layer{'s' * (region.layers != 1)}",
        f"compiled {region.compiles} time{'s' * (region.compiles != 1)}",
        f"{len(region.breaks)} graph break{'s' * (len(region.breaks) != 1)}" if region.breaks else "no graph breaks",
    ]


def graphs(contexts: Sequence[Context]) -> list[Context]:
    """The last context of each graph, the largest first. Graphs that differ in shapes or recomputation count as one."""
    known = {(c.before and c.before.outline, c.after and c.after.outline): c for c in contexts}
    return sorted(reversed(known.values()), key=lambda context: -context.before.calls if context.before else 0)


def about(context: Context, layers: int) -> dict[str, Any]:
    """The variables of one graph's section."""
    saved = saved_bytes(context.saved)
    return {
        "picture": picture(context.before, context.after) if context.before and context.after else None,
        "matches": context.tallies,
        "cached": cached(context),
        "saved": f"{shown(saved)} saved for the backward pass a layer, {shown(saved * layers)} in all" if saved else "",
        "providers": providers(context),
        "attention": attention(context),
        "changes": [
            {"change": change, "net": sum(change.operations.values()), "what": describe_change(change.operations)}
            for change in context.changes
        ],
    }


def picture(first: GraphSnapshot, recognised: GraphSnapshot) -> Picture:
    """Draw a graph before and after recognition; near misses, which recognition finds, are marked in both drawings."""
    missed = {box.name: box.missed for box in recognised.boxes}
    marked = GraphSnapshot(tuple(replace(box, missed=missed.get(box.name, "")) for box in first.boxes))
    before, after = side_by_side(marked, recognised)
    ops = [placed for placed in after.boxes if placed.box.kind == "op"]
    counts = Counter(placed.box.label for placed in ops)
    colours = {label: COLOURS[i % len(COLOURS)] for i, label in enumerate(counts)}
    tints = {name: colours[placed.box.label] for placed in ops for name in placed.replaces}
    return Picture(before, after, (first.calls, recognised.calls), dict(counts), colours, tints)


def cached(context: Context) -> str:
    """A sentence about the passes that did not run because the code came from torch's caches; empty if all ran."""
    left_out = [stage for stage in ("plan", "lower") if stage not in context.ran]
    if not left_out:
        return ""
    return (
        f"The code of this graph came from torch's caches, so the passes of {' and '.join(left_out)} did not run: "
        f"{'providers, saved bytes and ' if 'plan' in left_out else ''}the changes of these passes are not known. "
        "The drawings are from this run. "
        "TUNECOMPILE_DUMP=folder, or TORCHINDUCTOR_FORCE_DISABLE_CACHES=1, compiles without these caches."
    )


def providers(context: Context) -> list[dict[str, Any]]:
    """A row for each op and provider."""
    rows = []
    for name, count in sorted(context.providers.items()):
        op, _, provider = name.partition(": ")
        why = "; ".join(reason for reason in context.reasons[name] if reason)
        rows.append(
            {
                "op": op,
                "count": count,
                "provider": provider,
                "why": why or ("there is no other provider" if provider == "reference" else ""),
            }
        )
    return rows


def attention(context: Context) -> dict[str, Any] | None:
    """Measured kernels of attention by time, and why they are in this order; None if nothing was measured."""
    if not context.attention:
        return None
    told = (note for note in context.notes if isinstance(note, Note) and note.code == "attention-kernel")
    why = next((note.detail for note in told if note.subject == context.region), "")
    best = min(context.attention_ms.values(), default=0.0)
    return {
        "taken": next(iter(context.attention_ms), context.attention[0]),  # the fastest comes first
        "why": why,
        "rows": [{"kernel": name, "ms": ms, "times": ms / best} for name, ms in context.attention_ms.items()],
    }
