"""`explain`: the report as an HTML page, with the graph of one layer of each kind before and after recognition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from tunecompile.compiler.graph_dump import describe_change
from tunecompile.compiler.graph_snapshot import Box, GraphSnapshot
from tunecompile.compiler.pass_manager import Context
from tunecompile.errors import need
from tunecompile.notes import Note
from tunecompile.planner.device_memory import shown
from tunecompile.planner.solver import plan_lines
from tunecompile.report.html import make_environment
from tunecompile.report.report import RegionReport, saved_bytes, summarize
from tunecompile.runtime.layers.region import contexts_of
from tunecompile.runtime.model_state import State, state_of


@dataclass(frozen=True)
class Row:
    """What stands in the place of what."""

    before: tuple[Box, ...]  #: of the graph as the model computes it
    after: Box | None  #: None where nothing does


@dataclass(frozen=True)
class Comparison:
    """One graph before and after recognition, in the order in which it runs."""

    rows: list[Row]
    calls: tuple[int, int]
    counts: dict[str, int]  #: number of ops, by label
    missed: dict[str, str]  #: why boxes were not rewritten that look like a part of an op, by their names


def explain(model: nn.Module, path: str | Path = "explain.html") -> Path:
    """Write the report of `model` as a page, with the graph of one layer of each kind before and after recognition.

    Operations stand in the order in which they run, with shape, dtype and the line of the model that they come from.
    Beside each op are those that it replaced. A near miss, an operation that looks like part of an op but is not, is
    red, with what was expected and what was found.

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
    need("explain", "cli", "jinja2")
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
        "comparison": compare(context.before, context.after) if context.before and context.after else None,
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


def compare(before: GraphSnapshot, after: GraphSnapshot) -> Comparison:
    """Put each operation of a graph beside those of the graph before recognition that it took the place of."""
    old, took = {box.name: box for box in before.boxes}, replaced(before, after)
    ops = {name for box in after.boxes if box.kind == "op" for name in took.get(box.name, ())}
    rows = [
        Row(tuple(old[name] for name in took.get(box.name, (box.name,)) if box.kind == "op" or name not in ops), box)
        for box in after.boxes
    ]
    known = {box.name for row in rows for box in row.before}
    if gone := tuple(box for box in before.boxes if box.name not in known):
        rows.append(Row(gone, None))
    counts = Counter(box.label for box in after.boxes if box.kind == "op")
    missed = {box.name: box.missed for box in after.boxes if box.missed}  # recognition finds them
    return Comparison(rows, (before.calls, after.calls), dict(counts), missed)


def replaced(before: GraphSnapshot, after: GraphSnapshot) -> dict[str, tuple[str, ...]]:
    """For each new box of `after`, the boxes of `before` that it replaces.

    These are the removed boxes on the way from the values that the new box computes back to values that `after` has.
    """
    old, new = ({box.name: box for box in graph.boxes} for graph in (before, after))
    there = {name for box in after.boxes for name in (box.name, *box.gives)}
    found: dict[str, tuple[str, ...]] = {}
    for box in reversed(after.boxes):
        if box.name in old:
            continue
        pending, seen = [name for name in box.gives if name in old and name not in new], set()
        while pending:
            name = pending.pop()
            seen.add(name)
            pending += [n for n in old[name].inputs if n not in seen and n not in there]
        if not seen:  # several views of one result are behind it: take those of its readers
            seen = {name for user in after.boxes if box.name in user.inputs for name in found.get(user.name, ())}
        found[box.name] = tuple(name for name in old if name in seen and name not in new)
    return found


def cached(context: Context) -> str:
    """A sentence about the passes that did not run because the code came from torch's caches; empty if all ran."""
    left_out = [stage for stage in ("plan", "lower") if stage not in context.ran]
    if not left_out:
        return ""
    return (
        f"The code of this graph came from torch's caches, so the passes of {' and '.join(left_out)} did not run: "
        f"{'providers, saved bytes and ' if 'plan' in left_out else ''}the changes of these passes are not known. "
        "The graphs are from this run. "
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
