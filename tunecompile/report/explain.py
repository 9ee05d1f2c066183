"""`explain`: what the report knows as a page, with the graph of one layer of each kind before and after."""

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
from tunecompile.runtime.model_state import State, state_of
from tunecompile.runtime.region import contexts_of

COLOURS = ("#60a5fa", "#34d399", "#fbbf24", "#c084fc", "#f472b6", "#22d3ee", "#fb923c", "#a3e635", "#818cf8", "#2dd4bf")


@dataclass(frozen=True)
class Picture:
    """One graph twice, as it came and as it was recognised, in drawings of one scale."""

    before: Drawing
    after: Drawing
    calls: tuple[int, int]
    counts: dict[str, int]  #: ops by their labels
    colours: dict[str, str]  #: of each label
    tints: dict[str, str]  #: of the boxes that ops replaced, by their names


def explain(model: nn.Module, path: str | Path = "explain.html") -> Path:
    """Write what became of `model` as a page: all that `report` tells, and the graph of one layer of each kind, as it came beside as it was recognised.

    Pointing at an operation shows its shape, its dtype and the model's line it stems from; at an op, also what it replaced. An operation
    that looks like part of an op, and is none, is red in both drawings, with what was expected there and found.

    Args:
        model: one that was given to `optimize`. The page is filled by the first training step, as the report is.
        path: of the HTML file. It is written anew and needs no other file, and no network.

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
    """What the page shows."""
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
    """Of a region, in a line."""
    return [
        f"{region.layers} layer{'s' * (region.layers != 1)}",
        f"compiled {region.compiles} time{'s' * (region.compiles != 1)}",
        f"{len(region.breaks)} graph break{'s' * (len(region.breaks) != 1)}" if region.breaks else "no graph breaks",
    ]


def graphs(contexts: Sequence[Context]) -> list[Context]:
    """The last compiled of each graph, those that differ in shapes or in what is computed again being one. The largest comes first."""
    known = {(c.before and c.before.outline, c.after and c.after.outline): c for c in contexts}
    return sorted(reversed(known.values()), key=lambda context: -context.before.calls if context.before else 0)


def about(context: Context, layers: int) -> dict[str, Any]:
    """What is known of a graph."""
    saved = saved_bytes(context.saved)
    return {
        "picture": picture(context) if context.before and context.after else None,
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


def picture(context: Context) -> Picture:
    missed = {box.name: box.missed for box in context.after.boxes}
    first = GraphSnapshot(tuple(replace(box, missed=missed.get(box.name, "")) for box in context.before.boxes))
    before, after = side_by_side(first, context.after)
    ops = [placed for placed in after.boxes if placed.box.kind == "op"]
    counts = Counter(placed.box.label for placed in ops)
    colours = {label: COLOURS[i % len(COLOURS)] for i, label in enumerate(counts)}
    tints = {name: colours[placed.box.label] for placed in ops for name in placed.replaces}
    return Picture(before, after, (context.before.calls, context.after.calls), dict(counts), colours, tints)


def cached(context: Context) -> str:
    """Which passes did not run, since torch had the code."""
    left_out = [stage for stage in ("plan", "lower") if stage not in context.ran]
    if not left_out:
        return ""
    return (
        f"The code of this graph came from torch's caches, for which the passes of {' and '.join(left_out)} do not run: what they did, "
        f"{'which code runs each op and what is saved, ' if 'plan' in left_out else ''}is not known here. The drawings are this run's. "
        "TUNECOMPILE_DUMP=folder, or TORCHINDUCTOR_FORCE_DISABLE_CACHES=1, compiles anew."
    )


def providers(context: Context) -> list[dict[str, Any]]:
    """A row for each op and the code that runs it."""
    rows = []
    for name, count in sorted(context.providers.items()):
        op, _, provider = name.partition(": ")
        why = "; ".join(reason for reason in context.reasons[name] if reason)
        rows.append(
            {
                "op": op,
                "count": count,
                "provider": provider,
                "why": why or ("there is no other for it" if provider == "reference" else ""),
            }
        )
    return rows


def attention(context: Context) -> dict[str, Any] | None:
    """What attention's clock said: the kernels by time, and why they come in that order. None where the graph has none, or the device one kernel."""
    if not context.attention:
        return None
    told = (note for note in context.notes if isinstance(note, Note) and note.code == "attention-kernel")
    why = next((note.detail for note in told if note.subject == context.region), "")
    best = min(context.attention_ms.values(), default=0.0)
    return {
        "taken": context.attention[0],
        "why": why,
        "rows": [{"kernel": name, "ms": ms, "times": ms / best} for name, ms in context.attention_ms.items()],
    }
