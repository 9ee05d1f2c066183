"""The tables of what is right and supported: predictions, gradients, the support matrix, other packages' tests."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from report_tables import RESULTS, case, complete, load_all, measured_on, shown, to_markdown

#: notes as they were recorded -> the words that reports use today
WORDS = (
    (r"is compiled in pieces:", "has graph breaks:"),
    (
        r"put a parametrisation on others at every call, as adapters over experts do: they run as they are, "
        r"uncompiled, between compiled pieces of their layers",
        "parametrise other modules at every call (adapters over experts): they run eagerly, and their layers have "
        "graph breaks there",
    ),
    (
        r"gate and up are no group of adapted linears, or are read elsewhere too",
        "gate and up are not one group of adapted linears, or have another user",
    ),
    (r"or the activation is read elsewhere too", "or the activation has another user"),
    (r"a projection has a bias, or its adapter dropout", "a projection has a bias, or its adapter has dropout"),
    (
        r"logits are made: (\w+) reads them before any cross-entropy does",
        r"logits are computed: \1 uses them before the cross-entropy",
    ),
    (
        r"replaced the model's forward and computes the loss from its weight, which is left alone",
        "replaced the model's forward and computes the loss from the head's weight",
    ),
    (
        r"accelerate brings its weights from the host or a disk for each call",
        "accelerate loads its weights from the host or a disk for each call",
    ),
    (r"run as they are", "run eagerly"),
)


def render_predictions(folder: Path = RESULTS) -> str:
    """The prediction of `tunecompile.estimate` beside the measurement, of all runs in whose process it was made."""
    lines = set()
    for result in load_all("*.json", folder):
        for run in result.get("runs", ()):
            if run["status"] == "ok" and (told := run.get("predicted", {})).get("step_ms"):
                pairs = [
                    (told["peak_gib"], run["peak_gib"], ".2f"),
                    (told["step_ms"], run["step_ms"]["median"], ",.0f"),
                ]
                cells = [
                    cell
                    for said, was, form in pairs
                    for cell in (f"{said:{form}}", f"{was:{form}}", f"{100 * (said / was - 1):+.1f} %")
                ]
                lines.add((case(run), shown(run["system"]).replace("*", ""), *cells))
    if not lines:
        return ""
    head = ("case", "system", "peak predicted, GiB", "measured", "off by", "step predicted, ms", "measured", "off by")
    return to_markdown(head, sorted(lines, key=lambda cells: _by_number(" | ".join(cells))))


def _by_number(line: str) -> list[Any]:
    """10 GiB after 7."""
    return [float(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+(?:\.\d+)?)", line))]


def render_verified(folder: Path = RESULTS) -> str:
    """Gradients of whole models against fp32, and the price of verifying them."""
    rows = []
    for run in (run for result in load_all("verified-*.json", folder) for run in result["runs"]):
        own, eagers = (median(row[key] for row in run["gradients"]) for key in ("error", "eager_error"))
        worst = max(row["error"] / row["yardstick"] for row in run["gradients"])
        rows.append(
            [
                case(run),
                len(run["gradients"]),
                f"{own:.4f}",
                f"{eagers:.4f}",
                f"{worst:.2f}",
                f"{run['verify_s']:.1f}",
                f"{run['peak_gib']:.1f}",
                f"{run['training_peak_gib']:.1f}",
            ]
        )
    head = (
        "case",
        "parameters",
        "median error",
        "eager's",
        "worst ratio to eager's",
        "verified in, s",
        "peak, GiB",
        "training's peak",
    )
    return to_markdown(head, rows) if rows else ""


def render_families(folder: Path = RESULTS) -> str:
    """Gradients of each family in bf16 and under autocast: the median parameter's error, beside eager's."""
    found, results = {}, load_all("families*.json", folder)
    for run in (run for result in results for run in complete(result)):
        found.setdefault(run["family"], {})[run["precision"]] = run
    if not found:
        return ""
    rows = [
        [family, *(cell for name in ("bf16", "autocast") for cell in _error_cells(runs.get(name)))]
        for family, runs in found.items()
    ]
    return (
        to_markdown(("family", "bf16", "smaller by", "autocast", "smaller by"), rows)
        + f"\n{results[0]['shape']} tokens. "
        + measured_on(results, [])
    )


def render_shapes(folder: Path = RESULTS) -> str:
    """Families in batches of changing shapes: the median gradient's error as a part of eager's, graphs, seconds.

    A later run of a cell takes the place of an earlier one. Graphs and seconds are those of a family's last runs.
    """
    found, last = {}, {}
    results = sorted(load_all("shapes*.json", folder), key=lambda result: result["date"])
    for result in results:
        made = {}
        for run in (run for run in result["runs"] if run["status"] != "skipped"):
            made.setdefault(run["family"], {})[run["mode"]] = run
        for family, runs in made.items():
            found.setdefault(family, {}).update(runs)
            last[family] = runs
    if not found:
        return ""
    rows = [
        [family, *(_shape_cell(runs.get(mode)) for mode in SHAPE_MODES), *_graphs_and_seconds(last[family].values())]
        for family, runs in found.items()
    ]
    head = ("family", *SHAPE_MODES.values(), "graphs a kind of layer", "first step, s", "last step, s")
    return to_markdown(head, rows) + "\n" + measured_on(results, [("torch", "torch"), ("transformers", "transformers")])


SHAPE_MODES = {"lora": "LoRA", "nf4": "LoRA over NF4", "dora": "DoRA", "full": "all weights"}


def _shape_cell(run: dict | None) -> str:
    """What was wrong, a line; or how far gradients are from fp32, beside eager's."""
    if run is None:
        return ""
    if "error" not in run:
        return "failed"
    ratio = f"{run['error'] / max(run['eager_error'], 1e-12):.2f}"
    return ratio if run["status"] == "ok" else f"**{ratio}**"


def _graphs_and_seconds(runs: Iterable[dict]) -> list[str]:
    ran = [run for run in runs if "compiles" in run]
    if not ran:
        return ["", "", ""]
    most = [max(run["compiles"], default=0) for run in ran]
    first, last = (median(run["seconds"][at] for run in ran) for at in (0, -1))
    few = f"{min(most)}" if min(most) == max(most) else f"{min(most)} to {max(most)}"
    return [few, f"{first:.1f}", f"{last:.2f}"]


def _error_cells(run: dict | None) -> list[str]:
    from tunecompile.cli.compare.render import nearer

    return ["", ""] if run is None else [f"{run['error']:.4f}", nearer(run["eager_error"], run["error"])]


def render_support(result: dict | None) -> str:
    """A row a way to train: what was found in it, and what stays as it was."""
    if result is None:
        return ""
    found, rewritten = (sum(run[key] for run in result["runs"]) for key in ("found", "rewritten"))
    places = {"cuda": f"on {result['machine']['gpu']}", "cpu": "on a CPU, op by op"}
    versions = "transformers {transformers}, PEFT {peft}, TRL {trl}".format(**result["versions"])
    share = f"{rewritten:,} of {found:,} patterns are rewritten ({100 * rewritten / max(found, 1):.1f} %)"
    rows = []
    for section, runs in itertools.groupby(result["runs"], key=lambda run: run["section"]):
        for number, run in enumerate(runs):
            said = (
                briefly((run["notes"] or run["refused"]).partition("; ")[0])
                if run["status"] == "ok"
                else run["reason"].partition(": ")[2]
            )
            right = {"ok": "✓", "skipped": "not run"}.get(run["status"], "✗")
            right += "*" * (run.get("device", result["device"]) != result["device"])
            rows.append(["" if number else section, run["name"], right, f"{run['rewritten']} of {run['found']}", said])
    apart = "".join(f" Rows with * ran {place}." for device, place in places.items() if device in _devices(result))
    return f"Measured {places[result['device']]}, {versions}, {result['date'][:10]}. {share}.{apart}\n\n" + to_markdown(
        ("", "", "right", "patterns rewritten", "what is not rewritten"), rows
    )


def _devices(result: dict) -> set[str]:
    """Devices of single rows."""
    return {run["device"] for run in result["runs"] if "device" in run} - {result["device"]}


def briefly(text: str) -> str:
    """A recorded note in today's words, not longer than a cell."""
    for old, new in WORDS:
        text = re.sub(old, new, text)
    text = re.sub(r"\b(?:base_model_model_)?(?:model_)*layers_(\w+)", r"\1", text).replace("|", "/")
    return text if len(text) <= 140 else text[:137] + "..."


def render_suites(folder: Path = RESULTS) -> str:
    """A row a package whose own tests ran with every model optimized."""
    rows = []
    for result in load_all("suite-*.json", folder):
        ran = f"{result['sample']:,}" if result["sample"] else f"all, {len(result['classes'])} architectures"
        package, _, version = result["suite"].rpartition("-")
        anyway = sum(len(found["fail_anyway"]) for found in result["classes"].values())
        rows.append(
            [
                f"{package} {version}",
                ran,
                f"{result['plain']['passed']:,}",
                f"{result['optimized']['passed']:,}",
                f"{result['compiled']:,}",
                result["faults"],
                anyway,
            ]
        )
    head = (
        "package",
        "tests",
        "pass without optimize",
        "pass with it",
        "with compiled models",
        "fail only with it",
        "fail either way",
    )
    return to_markdown(head, rows) if rows else ""


def render_architectures(result: dict | None) -> str:
    """How many architectures of transformers are right, and which are not."""
    if result is None:
        return ""
    modes = {"full": "trained as a whole", "lora": "by adapters in all linears"}
    runs = {mode: [run for run in result["runs"] if run["mode"] == mode] for mode in modes}
    made = {mode: [run for run in runs[mode] if run["status"] != "not made"] for mode in modes}
    right = {mode: sum(run["status"] == "same" for run in made[mode]) for mode in modes}
    found, rewritten = (sum(run.get(key, 0) for mode in modes for run in made[mode]) for key in ("found", "rewritten"))
    broken = sum(
        any(re.search(r"compiled in pieces|graph break", note) for note in run.get("notes", ())) for run in made["full"]
    )
    wrong = [
        f"- {run['architecture']}, {modes[run['mode']]}: "
        + (run.get("reason") or "gradients off by {:.1e}".format(run["error"]))
        + "\n"
        for mode in modes
        for run in made[mode]
        if run["status"] != "same"
    ]
    said = ", ".join(f"{right[mode]} of {len(made[mode])} right {name}" for mode, name in modes.items())
    return (
        f"{len(runs['full'])} causal language models of transformers {result['versions']['transformers']}, "
        f"{result['date'][:10]}: {said}. The remaining ones cannot take such a small step without `optimize` either. "
        f"{rewritten:,} of {found:,} patterns are rewritten. Architectures whose layers have graph breaks: {broken}.\n"
        + "".join(["\n", *wrong] if wrong else [])
    )
