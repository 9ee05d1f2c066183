"""The README's tables and picture, made from the measured results beside this file.

    python benchmarks/report.py            # print the table
    python benchmarks/report.py --write    # put it into README.md, and draw docs/speed.svg and docs/memory.svg
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
KERNELS, BUDGETS = "kernels.json", "budgets.json"  #: what benchmarks/kernels.py and benchmarks/budgets.py measured
BEGIN, END = "<!-- results -->\n", "<!-- /results -->"
SUPPORT = "<!-- support -->\n", "<!-- /support -->"
SUITES = "<!-- suites -->\n", "<!-- /suites -->"
NAMES = {"hf": "HF + PEFT", "hf-checkpoint": "HF + PEFT, checkpointing", "compile": "torch.compile", "compile-layers": "torch.compile, layer by layer", "liger": "Liger",
         "liger-checkpoint": "Liger, checkpointing", "unsloth": "Unsloth", "unsloth-no-checkpoint": "Unsloth, checkpointing off",
         "unsloth-padding-free": "Unsloth, padding-free, checkpointing off",
         "tunecompile": "**tunecompile**", "tunecompile-fp8": "**tunecompile, FP8**"}


COLUMNS = 3  #: panels side by side in the picture
APART = "longest", "peaks", "verified", "batches", "families", "speedups", "support", "suite", "scaling", "architectures"  #: files that are not of training steps beside each other
PEERS = ("Liger", "Unsloth", "bitsandbytes")


def load_results(folder: Path = RESULTS) -> list[dict]:
    """Every result of training steps, in the order of its first run's model, mode and shape."""
    results = [json.loads(path.read_text()) for path in folder.glob("*.json") if path.name not in (KERNELS, BUDGETS) and not path.name.startswith(APART)]
    return sorted(results, key=lambda result: [result["runs"][0][key] for key in ("model", "mode", "shape")])


def median_runs(result: dict) -> list[dict]:
    """One row a system: of several rounds, the one whose median step is in the middle."""
    chosen = []
    for system in dict.fromkeys(run["system"] for run in result["runs"]):
        runs = [run for run in result["runs"] if run["system"] == system]
        fine = sorted((run for run in runs if run["status"] == "ok"), key=lambda run: run["step_ms"]["median"])
        chosen.append(fine[len(fine) // 2] if fine else runs[0])
    return sorted(chosen, key=lambda run: run.get("tokens_per_s", 0))


def shown(system: str) -> str:
    name, _, budget = system.partition("@")
    return NAMES.get(name, name) + (f", memory={budget}" if budget else "")


def first_steps(run: dict) -> str:
    warm = run.get("first_step_warm_s")
    return f"{run['first_step_s']:.1f}" + (f", {warm:.1f} warm" if warm else "")


def table(result: dict) -> list[str]:
    """Markdown rows of one file; ratios are only taken inside it."""
    rows, runs = [], median_runs(result)
    fine = [run for run in runs if run["status"] == "ok" and run["system"].split("@")[0] == "tunecompile"]
    ours = next((run for run in fine if run["system"] == "tunecompile"), fine[0] if fine else None)  # of budgets only, the slowest
    for run in runs:
        case = f"{run['model']}, {run['mode']}, {run['shape']}"
        if run["status"] != "ok":
            rows.append(f"| {case} | {shown(run['system'])} | {run['status']} | | | | |")
            continue
        ratio = f"{ours['tokens_per_s'] / run['tokens_per_s']:.2f}x" if ours and not run["system"].startswith("tunecompile") else ""
        low, high = run["step_ms"]["min"], run["step_ms"]["max"]
        rows.append(f"| {case} | {shown(run['system'])} | {run['tokens_per_s']:,.0f} | {run['step_ms']['median']:.1f} "
                    f"({low:.1f} to {high:.1f}) | {run['peak_gib']:.1f} | {first_steps(run)} | {ratio} |")
    return rows


def render(results: list[dict]) -> str:
    lines = ["| case | system | tokens/s | step, ms (median, spread) | peak, GiB | first step, s | tunecompile is faster by |",
             "|---|---|---|---|---|---|---|", *(row for result in results for row in table(result)), ""]
    for key in sorted({(r["machine"]["gpu"] or r["machine"]["cpu"], *(f"{n} {r['versions'].get(n, '?')}" for n in ("torch", "transformers", "bitsandbytes")),
                        r["date"][:10]) for r in results}):
        lines.append("Measured on " + ", ".join(key) + "; each case in one invocation, a process a system. The files are in `benchmarks/results/`.")
    return "\n".join(lines) + "\n"


def render_longest(folder: Path = RESULTS) -> str:
    """The longest row that went through a whole step, of each file of longest.py; ratios to nobody: no rival was run."""
    lines = []
    for result in sorted(load_all("longest-*.json", folder), key=lambda r: r["runs"][0]["budget_gib"]):
        fitted = [run for run in result["runs"] if run["status"] == "ok"]
        if fitted:
            run = max(fitted, key=lambda run: int(run["shape"][2:]))
            lines.append(f"| {run['model']}, {run['mode']} | {run['budget_gib']:.0f} | {int(run['shape'][2:]):,} | {run['peak_gib']:.1f} | "
                         f"{run['peak_reserved_gib']:.1f} | {run['first_step_s']:.0f} |")
    if not lines:
        return ""
    return "\n".join(["", "The longest rows that were tried and went through a whole step, with the process held to so much of the GPU; the first step, compilation and the",
                      "pinning of host memory included.", "", "| model | within, GiB | tokens | peak, GiB | reserved | step, s |", "|---|---|---|---|---|---|", *lines]) + "\n"


def render_batches(folder: Path = RESULTS) -> str:
    """More and more rows within one budget, of each file of end_to_end.py that is called so."""
    lines = []
    for result in load_all("batches-*.json", folder):
        runs = [run for run in result["runs"] if run["status"] == "ok"]
        figures = ", ".join(f"{run['tokens_per_s']:,.0f} tokens/s on {run['shape']} ({run['peak_gib']:.1f} GiB, {run['peak_reserved_gib']:.1f} reserved)" for run in runs)
        lines += ["", f"{runs[0]['model']}, {runs[0]['mode']}, one process within {runs[0]['budget_gib']:.0f} GiB, one shape after the other: {figures}."]
    return "\n".join(lines) + "\n" if lines else ""


def render_peaks(folder: Path = RESULTS) -> str:
    """What rows of other lengths take at least, of each file of `longest.py --lengths`, and the line through them."""
    lines = []
    for result in load_all("peaks-*.json", folder):
        runs = [run for run in result["runs"] if run["status"] == "ok"]
        if len(runs) < 2:
            continue
        slope, offset = linear_regression([int(run["shape"][2:]) for run in runs], [run["peak_gib"] for run in runs])
        points = ", ".join(f"{run['peak_gib']:.1f} GiB at {int(run['shape'][2:]):,} tokens" for run in runs)
        lines += ["", f"{runs[0]['model']}, {runs[0]['mode']}, one row, the plan that needs least: {points}. Prediction beyond, by the line through these: "
                  f"{offset:.1f} GiB and {1000 * slope:.3f} GiB for every 1,000 tokens, so that {(80 - offset) / slope:,.0f} tokens would take 80 GiB."]
    return "\n".join(lines) + "\n" if lines else ""


def render_predictions(folder: Path = RESULTS) -> str:
    """What `tunecompile.estimate` says of a step, beside what was measured: all runs in whose process it was asked."""
    lines = []
    for result in load_all("*.json", folder):
        for run in result.get("runs", ()):
            if run["status"] == "ok" and (told := run.get("predicted", {})).get("step_ms"):
                case, system = f"{run['model']}, {run['mode']}, {run['shape']}", shown(run["system"]).replace("*", "")
                pairs = [(told["peak_gib"], run["peak_gib"], ".2f"), (told["step_ms"], run["step_ms"]["median"], ",.0f")]
                lines.append(f"| {case} | {system} | " + " | ".join(f"{said:{form}} | {was:{form}} | {100 * (said / was - 1):+.1f} %" for said, was, form in pairs) + " |")
    if not lines:
        return ""
    return "\n".join(["", "What `tunecompile.estimate` says of a step before one is run, and what was measured. A step whose kernels are launched more slowly than they run takes longer.", "",
                      "| case | system | peak predicted, GiB | measured | off by | step predicted, ms | measured | off by |", "|---|---|---|---|---|---|---|---|", *sorted(set(lines), key=_by_number)]) + "\n"


def _by_number(line: str) -> list[Any]:
    """10 GiB after 7."""
    return [float(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+(?:\.\d+)?)", line))]


def render_verified(folder: Path = RESULTS) -> str:
    """Gradients of whole models, and what it took to verify them."""
    runs = [run for result in load_all("verified-*.json", folder) for run in result["runs"]]
    if not runs:
        return ""
    lines = ["", "Gradients of one step with small random adapters, against fp32 (`tunecompile.verify`, by `benchmarks/verification.py`): the relative error of the median parameter, and of",
             "the parameter that stands worst beside eager's.", "",
             "| case | parameters | median error | eager's | worst, of eager's | verified in, s | peak, GiB | training's peak |", "|---|---|---|---|---|---|---|---|"]
    for run in runs:
        own, eagers = (median(row[key] for row in run["gradients"]) for key in ("error", "eager_error"))
        worst = max(row["error"] / row["yardstick"] for row in run["gradients"])
        lines.append(f"| {run['model']}, {run['mode']}, {run['shape']} | {len(run['gradients'])} | {own:.4f} | {eagers:.4f} | {worst:.2f} | {run['verify_s']:.1f} | "
                     f"{run['peak_gib']:.1f} | {run['training_peak_gib']:.1f} |")
    return "\n".join(lines) + "\n"


def render_speedups(folder: Path = RESULTS) -> str:
    """A row a family: each system's median step, and how much shorter ours is."""
    lines = []
    for result in load_all("speedups*.json", folder):
        rows: dict[str, dict[str, dict]] = {}
        for run in (run for run in result["runs"] if run["status"] == "ok"):
            rows.setdefault(run["family"], {})[run["system"]] = run
        whole = {family: [row[name] for name in ("eager", "compiled layers", "tunecompile")] for family, row in rows.items() if len(row) == 3}
        ratios = {family: [other["step_ms"]["median"] / row[2]["step_ms"]["median"] for other in row[:2]] for family, row in whole.items()}
        if not whole:
            continue
        typical = [median(found) for found in zip(*ratios.values())]
        lines += ["", f"A step of {result['layers']} layers of each family's widths on {result['shape']} tokens, LoRA under autocast, on {result['machine']['gpu'] or result['machine']['cpu']} "
                  f"(`benchmarks/speedups.py`): {typical[0]:.2f}x over eager, {typical[1]:.2f}x over torch.compile of the same layers in the median.", "",
                  "| family | eager, ms | compiled layers | tunecompile | over eager | over compiled layers | eager, GiB | compiled layers | tunecompile |", "|---|---|---|---|---|---|---|---|---|"]
        for family, row in whole.items():
            cells = [*(f"{run['step_ms']['median']:.1f}" for run in row), *(f"{ratio:.2f}x" for ratio in ratios[family]), *(f"{run['peak_gib'] or 0:.1f}" for run in row)]
            lines.append(f"| {family} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n" if lines else ""


ENGINES = {"ddp": "DDP", "fsdp2": "FSDP2", "zero3": "ZeRO-3", "device_map": "device_map", "alone": "none, each alone"}
SCALING = ("case", "engine", "system", "GPUs", "tokens/s", "step, ms", "peak, GiB", "of as many single GPUs", "over HF", "over compiled layers")


def render_scaling(folder: Path = RESULTS) -> str:
    """Several GPUs beside one, or beside as many that trained alone at the same time, and beside rivals on as many, of each file of scaling.py."""
    lines = []
    for result in load_all("scaling-*.json", folder):
        fine = [run for run in result["runs"] if run["status"] == "ok"]
        rates = {(run["system"], run["gpus"], run["parallel"]): run["tokens_per_s"] for run in fine}
        for run in fine:
            system, gpus, parallel, rate = run["system"], run["gpus"], run["parallel"], run["tokens_per_s"]
            single = rates.get((system, gpus, "alone")) or gpus * rates.get((system, 1, None), 0)
            rivals = [next((rates[name, gpus, parallel] for name in names if (name, gpus, parallel) in rates), None) for names in (("hf", "hf-checkpoint"), ("compile-layers",))]
            cells = [f"{run['model']}, {run['mode']}, {run['shape']}" + " a GPU" * (parallel != "device_map"), ENGINES.get(parallel, ""), shown(system), gpus, f"{rate:,.0f}",
                     f"{run['step_ms']['median']:.1f}", f"{run['peak_gib']:.1f}", f"{100 * rate / single:.1f} %" if single and parallel not in (None, "alone") else "",
                     *(f"{rate / rival:.2f}x" if rival and system.startswith("tunecompile") else "" for rival in rivals)]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    if not lines:
        return ""
    return "\n".join(["", "Several GPUs (`benchmarks/scaling.py`); memory is the fullest GPU's. Compiled layers: torch.compile of each decoder layer.", "",
                      "| " + " | ".join(SCALING) + " |", "|---" * len(SCALING) + "|", *lines]) + "\n"


def render_families(folder: Path = RESULTS) -> str:
    """Gradients of each family in bf16 and under autocast: the median parameter's error, and by how much it is nearer to fp32 than eager's."""
    rows, results = {}, load_all("families*.json", folder)
    for run in (run for result in results for run in result["runs"] if run["status"] == "ok"):
        rows.setdefault(run["family"], {})[run["precision"]] = run
    if not rows:
        return ""
    on = results[0]["machine"]["gpu"] or results[0]["machine"]["cpu"]
    lines = ["", f"The same for two layers of each family of transformers under LoRA, {results[0]['shape']} tokens, on {on} (`benchmarks/families.py`): the error of the median parameter, "
                 "and by how much it is smaller than eager's.", "", "| family | bf16 | smaller by | autocast | smaller by |", "|---|---|---|---|---|"]
    for family, precisions in rows.items():
        cells = [cell for name in ("bf16", "autocast") for cell in _error_cells(precisions.get(name))]
        lines.append(f"| {family} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _error_cells(run: dict | None) -> list[str]:
    from tunecompile.cli.compare.render import nearer

    return ["", ""] if run is None else [f"{run['error']:.4f}", nearer(run["eager_error"], run["error"])]


def load_all(pattern: str, folder: Path) -> list[dict]:
    """The files of one benchmark, by name."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob(pattern))]


def load_one(name: str, folder: Path = RESULTS) -> dict | None:
    path = folder / name
    return json.loads(path.read_text()) if path.exists() else None


def render_kernels(result: dict | None) -> str:
    """A row a template: its time beside Inductor's, the fastest peer's, and the memory's limit. Empty without measurements."""
    cases: dict[str, dict[str, dict]] = {}
    for row in (result or {}).get("rows", []):
        if row.get("shown"):
            cases.setdefault(row["shown"], {})[row["system"]] = row
    lines = [line for name, systems in cases.items() if (line := _kernel_row(name, systems))]
    if not lines:
        return ""
    versions = ", ".join(f"{name} {result['versions'][key]}" for name, key in
                         (("torch", "torch"), ("triton", "triton"), ("Liger", "liger_kernel"), ("Unsloth", "unsloth"), ("bitsandbytes", "bitsandbytes"))
                         if key in result["versions"])
    return "\n".join([
        "", "The templates alone, in ms; caches cold, only what the GPU does. A peer that works in place had its copies made before the clock started.", "",
        "| kernel | case | template | reference under Inductor | fastest peer | of the memory's limit |", "|---|---|---|---|---|---|", *lines, "",
        f"Measured on {result['machine']['gpu']}, {versions}, {result['date'][:10]}; the limit is a copy's {result['copy_gbps'] / 1000:.2f} TB/s."]) + "\n"


def _kernel_row(name: str, systems: dict[str, dict]) -> str | None:
    ours = systems.get("template")
    if ours is None or "ms" not in ours:
        return None
    peers = [row for row in systems.values() if row["system"].startswith(PEERS) and "ms" in row]
    best = min(peers, key=lambda row: row["ms"], default=None)
    inductor = systems.get("Inductor", {}).get("ms")

    def ms(value: float | None) -> str:
        return "" if value is None else f"{value:.3f}"

    rival = "" if best is None else f"{ms(best['ms'])} ({best['system']})"
    return f"| {name} | {ours['case']} | {ms(ours['ms'])} | {ms(inductor)} | {rival} | {ours['percent']:.0f} % |"


def render_support(result: dict | None) -> str:
    """A row a way to train: what was found in it, and what stays as it was."""
    if result is None:
        return ""
    found, rewritten = (sum(run[key] for run in result["runs"]) for key in ("found", "rewritten"))
    how = f"on {result['machine']['gpu']}" if result["device"] == "cuda" else "on a CPU, op by op"
    lines = ["Losses and gradients of a few batches of a small model, and of trainers and loops all that they log and the change of every weight, beside those without `optimize`, "
             f"{how} (`benchmarks/support.py`, transformers {result['versions']['transformers']}, PEFT {result['versions']['peft']}, TRL {result['versions']['trl']}, {result['date'][:10]}). "
             f"With dropout gradients are compared in the mean of 100 steps. {rewritten:,} of {found:,} patterns are rewritten ({100 * rewritten / max(found, 1):.1f} %). What is not rewritten runs as torch.compile, or eager code, runs it.", "",
             "| | | right | patterns rewritten | what stays as it was |", "|---|---|---|---|---|"]
    for section, runs in itertools.groupby(result["runs"], key=lambda run: run["section"]):
        for number, run in enumerate(runs):
            said = _briefly((run["notes"] or run["refused"]).partition("; ")[0]) if run["status"] == "ok" else run["reason"].partition(": ")[2]
            right = {"ok": "✓", "skipped": "not run"}.get(run["status"], "✗")
            lines.append(f"| {'' if number else section} | {run['name']} | {right} | {run['rewritten']} of {run['found']} | {said} |")
    return "\n".join(lines) + "\n"


def render_suites(folder: Path = RESULTS) -> str:
    """A row a package whose own tests ran with every model optimized."""
    results = load_all("suite-*.json", folder)
    if not results:
        return ""
    lines = ["Packages' own tests, as they are and with every model optimized, in training and in evaluation, on a CPU, op by op (`benchmarks/suites.py`). Of transformers the tests that hold for every model, with",
             "all heads of each architecture, and that gradients, checkpointed too, are those without `optimize`; without those that count how often a checkpoint calls its layer, which a compiled one never does. Of PEFT tests of LoRA, drawn at random.", "",
             "| package | tests | pass as they are | pass optimized | with compiled models | fail only when optimized | fail either way |", "|---|---|---|---|---|---|---|"]
    for result in results:
        ran = f"{result['sample']:,}" if result["sample"] else f"all, {len(result['classes'])} architectures"
        package, _, version = result["suite"].rpartition("-")
        anyway = sum(len(found["fail_anyway"]) for found in result["classes"].values())
        lines.append(f"| {package} {version} | {ran} | {result['plain']['passed']:,} | {result['optimized']['passed']:,} | {result['compiled']:,} | {result['faults']} | {anyway} |")
    return "\n".join(lines) + "\n"


def others_models() -> str:
    """What ran of packages' own tests, and of their models."""
    return "\n".join(filter(None, (render_suites(), render_architectures(load_one("architectures.json")))))


def render_architectures(result: dict | None) -> str:
    """How many are right, and which are not."""
    if result is None:
        return ""
    modes = {"full": "trained as a whole", "lora": "by adapters in all linears"}
    runs = {mode: [run for run in result["runs"] if run["mode"] == mode] for mode in modes}
    made = {mode: [run for run in runs[mode] if run["status"] != "not made"] for mode in modes}
    right = {mode: sum(run["status"] == "same" for run in made[mode]) for mode in modes}
    found, rewritten = (sum(run.get(key, 0) for mode in modes for run in made[mode]) for key in ("found", "rewritten"))
    pieces = sum(any("in pieces" in note for note in run.get("notes", ())) for run in made["full"])
    wrong = [f"{run['architecture']}, {modes[run['mode']]}: {run.get('reason') or 'gradients off by {:.1e}'.format(run['error'])}" for mode in modes for run in made[mode] if run["status"] != "same"]
    lines = [f"All {len(runs['full'])} causal language models that transformers {result['versions']['transformers']} lists, as small as their configs allow, one step in fp32 beside the same without `optimize` "
             f"(`benchmarks/architectures.py`, a CPU, op by op, {result['date'][:10]}): " + ", ".join(f"{right[mode]} of {len(made[mode])} right {said}" for mode, said in modes.items())
             + f" (the others cannot take a step so small without `optimize` either). {rewritten:,} of {found:,} patterns are rewritten; layers of {pieces} architectures compile in pieces."]
    return "\n".join([*lines, *(f"- {said}" for said in wrong)]) + "\n"


def _briefly(text: str) -> str:
    """A note that is not longer than a cell."""
    text = re.sub(r"\b(?:base_model_model_)?(?:model_)*layers_(\w+)", r"\1", text).replace("|", "/")
    return text if len(text) <= 140 else text[:137] + "..."


def section() -> str:
    """All that the README shows of the results."""
    return render(load_results()) + render_longest() + render_batches() + render_peaks() + render_predictions() + render_verified() + render_families() + render_speedups() + render_scaling() + render_kernels(load_one(KERNELS))


def draw(results: list[dict], path: Path) -> None:
    """Tokens a second, one panel a case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from tunecompile.cli.compare.plots import STYLE, colour

    with pyplot.rc_context(STYLE):
        rows = -(-len(results) // COLUMNS)
        figure, panels = pyplot.subplots(rows, COLUMNS, figsize=(4.6 * COLUMNS, 2.6 * rows), layout="constrained", squeeze=False)
        for axes in panels.flat[len(results):]:
            axes.remove()
        for axes, result in zip(panels.flat, results):
            runs = [run for run in median_runs(result) if run["status"] == "ok"]
            bars = axes.barh([shown(run["system"]).replace("*", "") for run in runs], [run["tokens_per_s"] for run in runs],
                             color=[colour(run["system"]) for run in runs])
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

    from tunecompile.cli.compare.plots import STYLE, colour

    runs = [run for run in result["runs"] if run["status"] == "ok"]
    curve = sorted((run["peak_gib"], run["step_ms"]["median"]) for run in runs if run["system"].startswith("tunecompile"))
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(6.8, 3.6), layout="constrained")
        axes.plot(*zip(*curve), marker="o", color=colour("tunecompile"), label="tunecompile, memory=...")
        for run in runs:
            if not run["system"].startswith("tunecompile"):
                place = run["peak_gib"], run["step_ms"]["median"]
                axes.scatter(*place, color=colour(run["system"]), zorder=3)
                axes.annotate(shown(run["system"]), place, xytext=(6, 4), textcoords="offset points", fontsize=9)
        widest, longest = (max(run[key] if key == "peak_gib" else run[key]["median"] for run in runs) for key in ("peak_gib", "step_ms"))
        axes.set(xscale="log", xlabel="peak memory, GiB", ylabel="ms a step", ylim=(0, 1.1 * longest), xlim=(None, 1.5 * widest))
        axes.set_title("{model}, {mode}, {shape}".format(**runs[0]), fontsize=10)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("{x:g}")
        axes.legend(loc="lower left")
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


def placed(text: str, begin: str, end: str, made: str) -> str:
    """The text with what is made between its two marks."""
    before, _, rest = text.partition(begin)
    return before + begin + made + end + rest.partition(end)[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    results, text = load_results(), section()
    if not given.write:
        print(text)
        return
    readme = ROOT / "README.md"
    for begin, end, made in ((BEGIN, END, text), (*SUPPORT, render_support(load_one("support.json"))), (*SUITES, others_models())):
        readme.write_text(placed(readme.read_text(), begin, end, made))
    draw(results, ROOT / "docs" / "speed.svg")
    if (budgets := load_one(BUDGETS)) is not None:
        draw_budgets(budgets, ROOT / "docs" / "memory.svg")


if __name__ == "__main__":
    main()
