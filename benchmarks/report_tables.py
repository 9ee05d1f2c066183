"""The tables of what was measured, as Markdown: one function each, from the files in `benchmarks/results/`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

RESULTS = Path(__file__).parent / "results"
KERNELS, BUDGETS = "kernels.json", "budgets.json"  #: what benchmarks/kernels and benchmarks/steps/budgets.py measured
#: files that do not compare training steps of several systems begin with one of these
APART = ("longest", "cards", "peaks", "verified", "batches", "families", "speedups", "support", "suite")
APART += ("scaling", "architectures", "shapes", "trainers", "generation", "vision", "first-loss", "run-", "eight-bits")
APART += ("embeddings", "encoders", "diffusion")
NAMES = {
    "hf": "HF + PEFT",
    "hf-checkpoint": "HF + PEFT, checkpointing",
    "compile": "torch.compile",
    "compile-layers": "torch.compile, layer by layer",
    "compile-blocks": "torch.compile, block by block",
    "liger": "Liger",
    "liger-checkpoint": "Liger, checkpointing",
    "unsloth": "Unsloth",
    "unsloth-no-checkpoint": "Unsloth, checkpointing off",
    "unsloth-padding-free": "Unsloth, padding-free, checkpointing off",
    "tunecompile": "**tunecompile**",
    "tunecompile-fp8": "**tunecompile, FP8**",
    "tunecompile-int8": "**tunecompile, INT8**",
}
ENGINES = {"ddp": "DDP", "fsdp2": "FSDP2", "zero3": "ZeRO-3", "device_map": "device_map", "alone": "none, each alone"}
PEERS = ("Liger", "Unsloth", "bitsandbytes")
PACKAGES = (
    ("torch", "torch"),
    ("triton", "triton"),
    ("Liger", "liger_kernel"),
    ("Unsloth", "unsloth"),
    ("bitsandbytes", "bitsandbytes"),
)
#: the README's rows: a file, and the system of it that stands for tunecompile
RIVALS = (
    ("llama-3.1-8b-qlora-4x2048-rivals", "tunecompile"),
    ("llama-3.1-8b-qlora-4x2048-memory", "tunecompile@9.4GiB"),
    ("llama-3.1-8b-lora-4x2048", "tunecompile"),
    ("llama-3.1-8b-full-4x2048", "tunecompile"),
    ("llama-3.3-70b-qlora-4x2048", "tunecompile@auto"),
    ("gpt-oss-20b-6-layers-lora-2x2048", "tunecompile"),
)
RUN = "run-llama-3.1-8b-qlora"  #: the README's row of whole runs, and its cells
RUN_CELLS = ("hf cold", "unsloth cold", "tunecompile cold", "tunecompile warm")
GRPO = "trainers-llama-3.1-8b-qlora-grpo-rollouts"  #: its row of a whole GRPO step


def to_markdown(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table, one line a row."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(map(str, cells)) + " |\n" for cells in lines)


def load_all(pattern: str, folder: Path = RESULTS) -> list[dict]:
    """The whole files of one benchmark, by name; those of runs that were cut off are left out."""
    results = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(pattern))]
    return [result for result in results if not result.get("incomplete")]


def load_one(name: str, folder: Path = RESULTS) -> dict | None:
    """One file, or None where it is missing or incomplete."""
    return next(iter(load_all(name, folder)), None)


def load_results(folder: Path = RESULTS) -> list[dict]:
    """Every comparison of training steps, by its first run's model, mode and shape."""
    paths = sorted(folder.glob("*.json"))
    names = [path.name for path in paths if path.name not in (KERNELS, BUDGETS) and not path.name.startswith(APART)]
    results = [result for name in names for result in load_all(name, folder)]
    return sorted(
        results, key=lambda result: ([result["runs"][0][key] for key in ("model", "mode", "shape")], result["date"])
    )


def complete(result: dict) -> list[dict]:
    """The runs of a file that ended well."""
    return [run for run in result["runs"] if run["status"] == "ok"]


def median_runs(result: dict) -> list[dict]:
    """One run a system: of several rounds, the one whose median step is in the middle."""
    chosen = []
    for system in dict.fromkeys(run["system"] for run in result["runs"]):
        runs = [run for run in result["runs"] if run["system"] == system]
        fine = sorted((run for run in runs if run["status"] == "ok"), key=lambda run: run["step_ms"]["median"])
        chosen.append(fine[len(fine) // 2] if fine else runs[0])
    return sorted(chosen, key=lambda run: run.get("tokens_per_s", 0))


def shown(system: str) -> str:
    """A system as tables call it."""
    name, _, budget = system.partition("@")
    return NAMES.get(name, name) + (f", memory={budget}" if budget else "")


def case(run: dict) -> str:
    """Model, mode and shape of a run, and what of the model took part."""
    parts = [run["model"]]
    if run.get("layers"):
        parts[0] += f" ({run['layers']} layers)"
    if "experts" in run:
        parts.append(f"{run['mode']} {'with' if run['experts'] else 'without'} experts")
    else:
        parts.append(run["mode"])
    if "rank" in run:
        parts.append(f"rank {run['rank']}")
    return ", ".join((*parts, run["shape"]))


def measured_on(results: Sequence[dict], packages: Sequence[tuple[str, str]]) -> str:
    """GPU, versions and days of some results, one line for each set of versions."""
    days: dict[str, list[str]] = {}
    for result in results:
        versions = [f"{name} {result['versions'][key]}" for name, key in packages if key in result["versions"]]
        days.setdefault(", ".join([result["machine"]["gpu"] or result["machine"]["cpu"], *versions]), []).append(
            result["date"][:10]
        )
    lines = []
    for key, dates in sorted(days.items()):
        spread = min(dates) if min(dates) == max(dates) else f"{min(dates)} to {max(dates)}"
        lines.append(f"Measured on {key}, {spread}.")
    return "\n".join(lines) + "\n"


def render_rivals(folder: Path = RESULTS) -> str:
    """The README's table: tokens/s and peak GiB of a few cases, side by side."""
    head = ("tokens/s (peak GiB)", "HF + PEFT", "torch.compile", "Liger", "Unsloth", "**tunecompile**")
    rows, results = [], []
    for name, ours in RIVALS:
        result = load_one(f"{name}.json", folder)
        if result is None:
            continue
        results.append(result)
        runs = {run["system"]: run for run in median_runs(result) if run["status"] == "ok"}
        checkpointed = "unsloth-no-checkpoint" not in runs
        unsloth = runs.get("unsloth" if checkpointed else "unsloth-no-checkpoint")
        budget = shown(ours).partition(", ")[2]
        cells = [_speed(runs.get(system)) for system in ("hf", "compile", "liger")]
        cells += [_speed(unsloth) + " ¹" * (unsloth is not None and checkpointed), f"**{_speed(runs[ours])}**"]
        rows.append([case(runs[ours]) + (f", `{budget}`" if budget else ""), *cells])
    if (result := load_one(f"{RUN}.json", folder)) is not None and (row := _run_row(result)):
        results.append(result)
        rows.append(row)
    if (result := load_one(f"{GRPO}.json", folder)) is not None:
        results.append(result)
        rows.append(_grpo_row(result))
    packages = (*PACKAGES, ("transformers", "transformers"))
    note = (
        "¹ with Unsloth's gradient checkpointing, its default; the other Unsloth cells are without, which is faster. "
        "Empty: not measured.\n"
    )
    return (
        to_markdown(head, rows)
        + "\n"
        + note
        + measured_on(results, [package for package in packages if package[0] != "triton"])
    )


def _run_row(result: dict) -> list[str]:
    """Seconds of a whole run, or nothing where tunecompile's did not end well."""
    runs = {(run["system"], run["caches"]): run for run in complete(result)}
    if (ours := runs.get(("tunecompile", "cold"))) is None:
        return []
    cells = {key: f"{run['wall_s']:.0f} s ({run['peak_gib']:.1f})" for key, run in runs.items()}
    hf, unsloth, own, warm = (cells.get((*key.split(),), "") for key in RUN_CELLS)
    about = f"{case(ours)} x {ours['accumulation']}, {ours['steps']} steps from process start to saved adapter"
    return [about, hf, "", "", unsloth and f"{unsloth} ¹", f"**{own}**" + (warm and f", caches warm {warm}")]


def _grpo_row(result: dict) -> list[str]:
    """Seconds of a whole step of GRPO."""
    runs = {run["system"]: run for run in complete(result)}
    hf, unsloth, ours = (
        f"{runs[name]['step_ms']['median'] / 1e3:.1f} s ({runs[name]['peak_gib']:.1f})" if name in runs else ""
        for name in ("hf", "unsloth", "tunecompile")
    )
    about = f"{case(runs['tunecompile'])}, a GRPO step of TRL: generate, score, train"
    return [about, hf, "", "", unsloth and f"{unsloth} ¹", f"**{ours}**"]


def _speed(run: dict | None) -> str:
    return "" if run is None else f"{run['tokens_per_s']:,.0f} ({run['peak_gib']:.1f})"


def render_speed(results: Sequence[dict] | None = None) -> str:
    """Every comparison of training steps; ratios are only taken inside one file."""
    results = load_results() if results is None else results
    head = (
        "case",
        "system",
        "tokens/s",
        "step, ms (median, spread)",
        "peak, GiB",
        "first step, s",
        "tunecompile is faster by",
        "date",
    )
    rows = [row for result in results for row in _speed_rows(result)]
    packages = [("torch", "torch"), ("transformers", "transformers"), ("bitsandbytes", "bitsandbytes")]
    return to_markdown(head, rows) + "\n" + measured_on(results, packages)


def _speed_rows(result: dict) -> list[list[str]]:
    rows = []
    runs = [run for run in median_runs(result) if not run["status"].startswith("left out")]
    fine = [run for run in runs if run["status"] == "ok" and run["system"].split("@")[0] == "tunecompile"]
    ours = next(
        (run for run in fine if run["system"] == "tunecompile"), fine[0] if fine else None
    )  # of budgets only, the slowest
    for run in runs:
        if run["status"] != "ok":
            rows.append([case(run), shown(run["system"]), run["status"], "", "", "", "", result["date"][:10]])
            continue
        ratio = (
            f"{ours['tokens_per_s'] / run['tokens_per_s']:.2f}x"
            if ours and not run["system"].startswith("tunecompile")
            else ""
        )
        step = "{median:.1f} ({min:.1f} to {max:.1f})".format(**run["step_ms"])
        rows.append(
            [
                case(run),
                shown(run["system"]),
                f"{run['tokens_per_s']:,.0f}",
                step,
                f"{run['peak_gib']:.1f}",
                _first_step(run),
                ratio,
                result["date"][:10],
            ]
        )
    return rows


def _first_step(run: dict) -> str:
    warm = run.get("first_step_warm_s")
    return f"{run['first_step_s']:.1f}" + (f", {warm:.1f} warm" if warm else "")


def render_longest(folder: Path = RESULTS) -> str:
    """The longest row that went through a whole step, of each file of longest.py. No rival was run."""
    rows = []
    for result in sorted(load_all("longest-*.json", folder), key=lambda r: r["runs"][0]["budget_gib"]):
        if fitted := complete(result):
            run = max(fitted, key=lambda run: int(run["shape"][2:]))
            rows.append(
                [
                    f"{run['model']}, {run['mode']}",
                    f"{run['budget_gib']:.0f}",
                    f"{int(run['shape'][2:]):,}",
                    f"{run['peak_gib']:.1f}",
                    f"{run['peak_reserved_gib']:.1f}",
                    f"{run['first_step_s']:.0f}",
                ]
            )
    return (
        to_markdown(("model", "limit, GiB", "tokens", "peak, GiB", "reserved, GiB", "first step, s"), rows)
        if rows
        else ""
    )


def render_batches(folder: Path = RESULTS) -> str:
    """More and more rows within one budget, of each file of end_to_end.py that is called so."""
    rows = []
    for result in load_all("batches-*.json", folder):
        rows += [
            [
                f"{run['model']}, {run['mode']}",
                f"{run['budget_gib']:.0f}",
                run["shape"],
                f"{run['tokens_per_s']:,.0f}",
                f"{run['peak_gib']:.1f}",
                f"{run['peak_reserved_gib']:.1f}",
            ]
            for run in complete(result)
        ]
    return to_markdown(("model", "limit, GiB", "batch", "tokens/s", "peak, GiB", "reserved, GiB"), rows) if rows else ""


def render_peaks(folder: Path = RESULTS) -> str:
    """The smallest plan's peak by row length, of each file of `longest.py --lengths`, and the line through them."""
    lines = []
    for result in load_all("peaks-*.json", folder):
        runs = complete(result)
        if len(runs) < 2:  # a line needs two points
            continue
        slope, offset = linear_regression([int(run["shape"][2:]) for run in runs], [run["peak_gib"] for run in runs])
        points = ", ".join(f"{run['peak_gib']:.1f} GiB at {int(run['shape'][2:]):,} tokens" for run in runs)
        lines += [
            f"{runs[0]['model']}, {runs[0]['mode']}, one row, under the plan that needs least memory: {points}. "
            f"The line through these points is {offset:.1f} GiB plus {1000 * slope:.3f} GiB for every 1,000 tokens. "
            f"It predicts 80 GiB at {(80 - offset) / slope:,.0f} tokens, which was not measured.\n"
        ]
    return "\n".join(lines)


def render_speedups(folder: Path = RESULTS) -> str:
    """A row a family: each system's median step, and the ratio to tunecompile's."""
    parts = []
    for result in load_all("speedups*.json", folder):
        by_family: dict[str, dict[str, dict]] = {}
        for run in complete(result):
            by_family.setdefault(run["family"], {})[run["system"]] = run
        systems = ("eager", "compiled layers", "tunecompile")
        whole = {
            family: [runs[name] for name in systems] for family, runs in by_family.items() if len(runs) == len(systems)
        }
        if not whole:
            continue
        ratios = {
            family: [other["step_ms"]["median"] / runs[2]["step_ms"]["median"] for other in runs[:2]]
            for family, runs in whole.items()
        }
        typical = [median(column) for column in zip(*ratios.values(), strict=True)]
        rows = [
            [
                family,
                *(f"{run['step_ms']['median']:.1f}" for run in runs),
                *(f"{ratio:.2f}x" for ratio in ratios[family]),
                *(f"{run['peak_gib'] or 0:.1f}" for run in runs),
            ]
            for family, runs in whole.items()
        ]
        head = (
            "family",
            "eager, ms",
            "compiled layers",
            "tunecompile",
            "over eager",
            "over compiled layers",
            "eager, GiB",
            "compiled layers",
            "tunecompile",
        )
        parts.append(
            f"{result['layers']} layers, {result['shape']} tokens, LoRA under autocast, "
            f"{result['machine']['gpu'] or result['machine']['cpu']}. In the median tunecompile is "
            f"{typical[0]:.2f}x as fast as eager and {typical[1]:.2f}x as fast as torch.compile of the same layers.\n\n"
            + to_markdown(head, rows)
        )
    return "\n".join(parts)


def render_scaling(folder: Path = RESULTS) -> str:
    """Several GPUs beside one, or beside as many that trained alone at the same time, and beside rivals on as many."""
    rows = []
    for result in load_all("scaling-*.json", folder):
        fine = complete(result)
        rates = {(run["system"], run["gpus"], run["parallel"]): run["tokens_per_s"] for run in fine}
        for run in fine:
            system, gpus, parallel, rate = run["system"], run["gpus"], run["parallel"], run["tokens_per_s"]
            single = rates.get((system, gpus, "alone")) or gpus * rates.get((system, 1, None), 0)
            rivals = [
                next((rates[name, gpus, parallel] for name in names if (name, gpus, parallel) in rates), None)
                for names in (("hf", "hf-checkpoint"), ("compile-layers",))
            ]
            rows.append(
                [
                    case(run) + " a GPU" * (parallel != "device_map"),
                    ENGINES.get(parallel, ""),
                    shown(system),
                    gpus,
                    f"{rate:,.0f}",
                    f"{run['step_ms']['median']:.1f}",
                    f"{run['peak_gib']:.1f}",
                    f"{100 * rate / single:.1f} %" if single and parallel not in (None, "alone") else "",
                    *(f"{rate / rival:.2f}x" if rival and system.startswith("tunecompile") else "" for rival in rivals),
                ]
            )
    head = (
        "case",
        "engine",
        "system",
        "GPUs",
        "tokens/s",
        "step, ms",
        "peak, GiB",
        "of as many single GPUs",
        "over HF",
        "over compiled layers",
    )
    return to_markdown(head, rows) if rows else ""


def render_kernels(result: dict | None) -> str:
    """A row a template: its time beside Inductor's, the fastest peer's and the memory's limit; or nothing."""
    cases: dict[str, dict[str, dict]] = {}
    for row in (result or {}).get("rows", []):
        if row.get("shown"):
            cases.setdefault(row["shown"], {})[row["system"]] = row
    rows = [row for name, systems in cases.items() if (row := _kernel_row(name, systems))]
    if not rows:
        return ""
    head = ("kernel", "case", "template", "reference under Inductor", "fastest peer", "of the memory's limit")
    limit = f"The memory's limit is a copy's rate, {result['copy_gbps'] / 1000:.2f} TB/s. "
    return to_markdown(head, rows) + "\n" + limit + measured_on([result], PACKAGES)


def _kernel_row(name: str, systems: dict[str, dict]) -> list[str] | None:
    ours = systems.get("template")
    if ours is None or "ms" not in ours:
        return None
    peers = [row for row in systems.values() if row["system"].startswith(PEERS) and "ms" in row]
    best = min(peers, key=lambda row: row["ms"], default=None)
    inductor = systems.get("Inductor", {}).get("ms")
    rival = "" if best is None else f"{best['ms']:.3f} ({best['system']})"
    return [
        name,
        ours["case"],
        f"{ours['ms']:.3f}",
        "" if inductor is None else f"{inductor:.3f}",
        rival,
        f"{ours['percent']:.0f} %",
    ]
