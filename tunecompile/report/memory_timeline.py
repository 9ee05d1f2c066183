"""`memory_timeline`: the plan under a budget as an HTML page, with predicted and measured memory."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from tunecompile.errors import NoPlan, need
from tunecompile.planner.device_memory import shown
from tunecompile.planner.solver import KEEP, KEEP_WEIGHTS, PlanOption, copies
from tunecompile.planner.step_plan import AdmittedPlan
from tunecompile.report.html import draw, make_environment
from tunecompile.runtime.memory.budget import RuntimePlanner
from tunecompile.runtime.memory.timeline_trace import Kind
from tunecompile.runtime.model_state import State, state_of
from tunecompile.runtime.parts import StepTelemetry

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "saves what is expensive": "#93c5fd",
    "recomputes": "#fcd34d",
    "offloads": "#86efac",
    "head and loss": "#d8b4fe",
}
BASE, INK, SOFT = "#e5e7eb", "#111827", "#6b7280"


@dataclass(frozen=True)
class Phase:
    """One part of a step: a layer's forward, head and loss, or a layer's backward.

    Predicted bytes do not include the resident ones (weights and optimizer); measured bytes do.
    """

    kind: Kind
    place: int | None  #: number of the layer, in running order
    before: int  #: predicted bytes when it begins
    after: int  #: predicted bytes when it ends
    most: int  #: predicted peak in bytes
    manner: str  #: one of COLOURS
    measured: int | None = None  #: bytes allocated when it began


def memory_timeline(model: nn.Module, path: str | Path = "memory.html") -> Path:
    """Write the memory plan of `model` as a page: a picture of memory over the step, and a table of the layers' plans.

    The page compares predicted and measured memory over the step, peak and milliseconds. Memory was sampled in the
    first steps of the plan, at no cost to later ones. On a CPU torch does not count the bytes of tensors, so the page
    shows predictions only.

    Args:
        model: a model that was given to `optimize(model, memory=...)` and has run a training step.
        path: the HTML file, which is overwritten. It needs no other file.

    Returns:
        The path of the file.

    Raises:
        NotOptimized: `model` is not the object that was optimized.
        NoPlan: the model has no budget, or no training step has run.
        MissingExtra: jinja2 or matplotlib is not installed.
        OSError: the file cannot be written.
    """
    need("memory_timeline", "cli", "jinja2", "matplotlib")
    state = state_of(model)
    page = make_environment("tunecompile.report").get_template("memory_timeline.html.jinja")
    parts = [
        {
            "device": str(budget.device),
            "picture": picture(budget),
            "totals": totals(budget, state.part(StepTelemetry).step_ms),
            "rows": rows(budget),
            "notes": notes(budget),
        }
        for budget in planned(state)
    ]
    html = page.render(model=type(state.base()).__name__, devices=parts)
    path = Path(path)
    path.write_text(html, encoding="utf-8")
    return path


def planned(state: State) -> list[RuntimePlanner]:
    """The planners of all devices that have a plan.

    Raises:
        NoPlan: no device has a plan; the message says why.
    """
    budget = state.step.budget
    if found := [each for each in state.step.budgets if each.admitted is not None]:
        return found
    if state.memory is None:
        reason = next((note for note in state.notes if note.code == "no-memory-plan"), None)
        raise NoPlan(
            reason=reason or 'there is no budget. Call tunecompile.optimize(model, memory="20GiB"); "auto" is for GPUs'
        )
    raise NoPlan(reason=budget.notes[-1] if budget is not None and budget.notes else "run a training step first")


def admitted(budget: RuntimePlanner) -> AdmittedPlan:
    """The plan of a budget that `planned` returned."""
    assert budget.admitted is not None
    return budget.admitted


def phases(budget: RuntimePlanner) -> list[Phase]:
    """The phases of a step in order: forwards, head and loss, backwards. The largest `most` is the predicted peak."""
    options = [budget.options.get(id(slot)) for slot in budget.layers]
    measured = {}
    for sample in budget.trace.samples:  # the first of each: a checkpoint around a layer repeats its forward
        measured.setdefault((sample.kind, sample.place), sample.allocated or None)
    held, forwards, backwards, gradients = 0, [], [], sum(option.gradients for option in options if option)
    for place, option in enumerate(options):
        keeps, ahead, back, own = (
            (option.held, option.forward, option.backward, option.gradients) if option else (0, 0, 0, 0)
        )
        moving = copies(options, place, admitted(budget).choice.ahead)
        manner = _manner(option)
        after = held + keeps
        forwards.append(
            Phase("forward", place, held, after, after + moving + ahead, manner, measured.get(("forward", place)))
        )
        gradients -= own  # the rest are those of later layers
        backwards.append(
            Phase(
                "backward",
                place,
                after + gradients,
                held + gradients + own,
                after + gradients + moving + back,
                manner,
                measured.get(("backward", place)),
            )
        )
        held = after
    tail = Phase(
        "tail",
        None,
        held,
        held,
        held + budget.memory.tail(admitted(budget).tokens),
        "head and loss",
        measured.get(("tail", None)),
    )
    return [*forwards, tail, *reversed(backwards)]


def _manner(option: PlanOption | None) -> str:
    if option is None or not (option.offloaded or option.plan not in (KEEP, KEEP_WEIGHTS)):
        return "saves what is expensive"
    return "offloads" if option.offloaded else "recomputes"


def picture(budget: RuntimePlanner) -> str:
    """Memory over the step, as an image in a data URI."""
    return draw(lambda axes: paint(axes, budget), width=10.4, height=4.6)


def paint(axes: Axes, budget: RuntimePlanner) -> None:
    """Stack resident bytes, bytes that layers hold, and bytes of the running part; draw lines for budget and peaks.

    Dots are samples.
    """
    parts, resident = phases(budget), admitted(budget).resident + admitted(budget).weights
    highest = max(part.most for part in parts) + resident
    unit, scale = ("GiB", 2**30) if highest >= 2**30 else ("MiB", 2**20) if highest >= 2**20 else ("KiB", 2**10)
    edges = range(len(parts) + 1)
    levels = [(resident + part.before) / scale for part in parts] + [(resident + parts[-1].after) / scale]
    axes.fill_between(edges, levels, color="#bfd3ee", linewidth=0, label="held for the backward pass, and gradients")
    if resident:
        axes.fill_between(edges, resident / scale, color=BASE, linewidth=0, label="resident: weights, optimizer")
    for i, part in enumerate(parts):
        label = f"while it runs: {part.manner if part.kind == 'tail' else 'a layer that ' + part.manner}"
        known = label in axes.get_legend_handles_labels()[1]
        axes.fill_between(
            [i, i + 1],
            levels[i : i + 2],
            (resident + part.most) / scale,
            color=COLOURS[part.manner],
            edgecolor="white",
            linewidth=0.6,
            label=None if known else label,
        )
    axes.plot(edges, levels, color="#2563eb", linewidth=1.6, label="predicted between layers")
    if seen := [(i, part.measured / scale) for i, part in enumerate(parts) if part.measured]:
        axes.plot(*zip(*seen), "o", color=INK, markersize=3.4, label=f"measured, step {budget.trace.step}")
    _lines(axes, budget, scale, len(parts), highest / scale)
    _label(axes, parts, budget.layers[0].place)
    axes.set(ylabel=unit, xlim=(0, len(parts)), ylim=(0, None))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3, fontsize=9)


def _lines(axes: Axes, budget: RuntimePlanner, scale: int, width: int, highest: float) -> None:
    """Draw budget and peaks. A budget far above the peak is not drawn: it would leave most of the picture empty."""
    found = [("predicted peak", admitted(budget).peak, "#2563eb", (0, (1, 1.5)))]
    found += [("measured peak", budget.progress.measured, INK, (0, (4, 2)))] if budget.progress.measured else []
    found += [("budget", limit, "#dc2626", "-")] if (limit := _limit(budget)) / scale < 1.6 * highest else []
    for name, nbytes, colour, dashes in found:
        axes.axhline(nbytes / scale, color=colour, linewidth=1.1, linestyle=dashes, label=f"{name}, {shown(nbytes)}")


def _limit(budget: RuntimePlanner) -> int:
    """Bytes of the budget, of which a plan was admitted."""
    summary = budget.summary()
    assert summary is not None
    return summary["budget"]


def _label(axes: Axes, parts: list[Phase], first: int) -> None:
    """Label as many layers as fit with their numbers, counted from `first`, and the three parts of the step above."""
    layers = len(parts) // 2
    every = max(1, round(layers / 14))
    ticks = [
        (i + 0.5, str(first + part.place))
        for i, part in enumerate(parts)
        if part.place is not None and part.place % every == 0
    ]
    axes.set_xticks([at for at, _ in ticks], [label for _, label in ticks], fontsize=8)
    axes.grid(axis="x", visible=False)
    axes.axvline(layers, color="#d1d5db", linewidth=0.8)
    axes.axvline(layers + 1, color="#d1d5db", linewidth=0.8)
    for middle, text in (
        (layers / 2, "forward, by layer"),
        (layers + 0.5, "head, loss"),
        (1.5 * layers + 1, "backward, by layer"),
    ):
        axes.annotate(
            text,
            (middle, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 5),
            textcoords="offset points",
            ha="center",
            color=SOFT,
        )


def rows(budget: RuntimePlanner) -> list[dict[str, Any]]:
    """A row for each run of consecutive layers with the same plan; bytes and milliseconds are those of one layer."""
    parts = {p.place: p for p in phases(budget) if p.kind == "forward" and p.place is not None}
    after = {place: part.measured for place in parts if (part := parts.get(place + 1)) is not None}
    table = []
    for (option, _), members in groupby(
        enumerate(budget.layers), key=lambda item: (budget.options.get(id(item[1])), item[1].region.name)
    ):
        places = [place for place, _ in members]
        if option is None:
            continue
        recomputed = budget.recomputed(budget.layers[places[0]], option.plan)
        grown = [end - begun for p in places if (end := after.get(p)) and (begun := parts[p].measured)]
        first, last = (budget.layers[place].place for place in (places[0], places[-1]))
        table.append(
            {
                "layers": f"{first} to {last}" if len(places) > 1 else str(first),
                "number": len(places),
                "region": budget.layers[places[0]].region.name,
                "recomputed": ", ".join(recomputed) or "only cheap values",
                "host": shown(option.offloaded) if option.offloaded else "",
                "held": shown(option.held),
                "grown": shown(sum(grown) // len(grown)) if grown else "",
                "forward": shown(option.forward),
                "backward": shown(option.backward),
                "ms": f"{option.ms:.2f}" if option.ms else "",
            }
        )
    return table


def totals(budget: RuntimePlanner, steps: float | None) -> list[tuple[str, str, str]]:
    """Rows of (name, predicted, measured). steps: measured milliseconds of a step."""
    plan = admitted(budget)
    own, added, kept = budget.step_ms(), plan.choice.ms, budget.memory.kept
    lines = [
        ("Budget, for tensors", shown(_limit(budget)), ""),
        (
            "Resident: weights, gradients, optimizer",
            shown(plan.resident),
            shown(budget.memory.others()) if budget.memory.present else "",
        ),
        *(
            [("Frozen weights kept dequantised", shown(plan.weights), shown(kept.bytes))]
            if plan.weights and kept is not None
            else []
        ),
        ("Peak", shown(plan.peak), shown(budget.progress.measured) if budget.progress.measured else ""),
        ("Step, ms", f"{own:,.1f}" if own else "", f"{steps:,.1f}" if steps else ""),
        ("Of it for the budget (recomputation, waiting), ms", f"{added:,.1f}", ""),
    ]
    if budget.offload is None or not budget.offloading:
        return lines
    copies = budget.offload.report()
    moved = sum(copies.get(name, 0.0) for name in ("copied_out_ms", "copied_back_ms"))
    waited = copies.get("exposed_ms", 0.0) + copies["blocked_ms"]
    return [
        *lines,
        (
            "Copied to the host and back",
            shown(sum(o.offloaded for stack in plan.choice.options for o in stack)),
            shown(copies["bytes_out"]),
        ),
        ("Copies, ms", "", f"{moved:,.1f}"),
        ("Of them hidden behind computation, ms", "", f"{max(0.0, moved - waited):,.1f}"),
        ("Waited for copies, ms", "", f"{waited:,.1f}"),
    ]


def notes(budget: RuntimePlanner) -> list[str]:
    """Sentences on how to read the page, as far as they apply to this model."""
    lines = [f"The plan is for {admitted(budget).tokens:,} tokens a batch."]
    if any(sample.allocated for sample in budget.trace.samples):
        lines.append(
            f"Measured: bytes in tensors when each layer begins, in step {budget.trace.step} "
            f"of {budget.trace.tokens:,} tokens. The measured peak is the allocator's, of the last step that set one. "
            "Peaks occur within layers, between the dots."
        )
    else:
        lines.append(
            "Nothing was measured: a CPU keeps no count of its tensors' bytes. The budget limits the bytes that layers "
            "save for the backward pass."
        )
    if budget.offloading:
        lines.append(
            "Tensors that are being copied count to the running layer, so dots lie above the line where layers are "
            "offloaded."
        )
    if budget.memory.replays is not None and budget.memory.replays.bytes:
        lines.append(
            f"Layers are replayed as CUDA graphs, which hold {shown(budget.memory.replays.bytes)} permanently: "
            "there the dots lie level."
        )
    lines.append(
        "The measured step time is the median, from one training forward to the next, with optimizer and data. "
        "The prediction covers kernels and AdamW, on a GPU only."
    )
    return lines + budget.report_notes()
