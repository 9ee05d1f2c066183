"""Write the result to report.json, report.md and one self-contained report.html."""

from __future__ import annotations

import json
from pathlib import Path

from tunecompile.cli.compare import curves, plots
from tunecompile.cli.compare.gradients import families
from tunecompile.cli.compare.meters import median
from tunecompile.cli.compare.seeds import merge_seeds
from tunecompile.report.html import make_environment
from tunecompile.verification.tolerance import LIMIT, ORDER

COLUMNS = (  # heading, how to read it off a run
    ("version", lambda r: r.get("version") or ""),
    ("tokens/s", lambda r: f"{r['tokens_per_s']:,.0f}{spread(r, 'tokens_per_s', ',.0f')}"),
    ("step, ms", lambda r: f"{r['step_ms']['median']:,.1f}"),
    ("fastest to slowest", lambda r: f"{r['step_ms']['min']:,.1f} to {r['step_ms']['max']:,.1f}"),
    ("peak memory, GiB", lambda r: f"{r['peak_gib']:.2f}"),
    ("reserved, GiB", lambda r: number(r.get("peak_reserved_gib"), ".2f")),
    ("saved for backward, MiB", lambda r: number(r.get("saved_bytes"), ",.1f", 2**20)),
    ("first step, s", lambda r: f"{r['first_step_s']:.1f}"),
    ("compiling pays back after", lambda r: break_even_text(r)),  # noqa: PLW0108 (defined below)
    ("launches a step", lambda r: number(r.get("launches_per_step"), ",.0f")),
    ("host, ms a step", lambda r: number(r.get("host_ms_per_step"), ",.1f")),
    ("held-out loss", lambda r: held_out_text(r)),  # noqa: PLW0108 (defined below)
    ("last loss", lambda r: f"{r['losses'][-1]:.4f}{spread(r, 'last_loss', '.4f')}"),
)


def number(value: float | None, form: str, scale: float = 1) -> str:
    """The formatted value, divided by the scale; empty for None."""
    return "" if value is None else format(value / scale, form)


def spread(run: dict, figure: str, form: str) -> str:
    """The range of a figure over several seeds; empty for one seed."""
    if figure not in run.get("spread", {}):
        return ""
    low, high = run["spread"][figure]
    return f" ({low:{form}} to {high:{form}})"


def name_of(run: dict) -> str:
    """The system, with the number of its finished seeds if not all finished."""
    fine, all_of_them = run.get("seeds", (1, 1))
    return run["system"] if fine == all_of_them or not fine else f"{run['system']} ({fine} of {all_of_them} seeds)"


def break_even_text(run: dict) -> str:
    """The step at which compilation has paid for its time."""
    if "break_even_step" not in run:
        return ""
    step = run["break_even_step"]
    return "never" if step is None else f"step {step:,}"


def held_out_text(run: dict) -> str:
    """The held-out loss before and after."""
    if "held_out_after" not in run:
        return ""
    return f"{run['held_out_before']:.3f} → {run['held_out_after']:.3f}{spread(run, 'held_out_after', '.3f')}"


def run_table(runs: list[dict]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of the table of systems, without empty columns. A row that is not ok says why.

    runs: one for all seeds.
    """
    filled = [(name, read) for name, read in COLUMNS if any(r["status"] == "ok" and read(r) for r in runs)]
    several = len({r["shape"] for r in runs}) > 1
    head = ["system", *(["shape"] if several else []), *(name for name, _ in filled)]
    rows = []
    for run in runs:
        first = [name_of(run), *([run["shape"]] if several else [])]
        status = run["status"] + (f": {run['install']}" if run.get("install") else "")
        cells = [read(run) for _, read in filled] if run["status"] == "ok" else [status, *[""] * (len(filled) - 1)]
        rows.append(first + cells)
    return head, rows


def facts(result: dict) -> list[tuple[str, str]]:
    """The lines under the title: what was run, and on which machine."""
    settings, machine, run = result["settings"], result["machine"], result["runs"][0]
    where = f"{machine['gpu_count']} x {machine['gpu']}; {machine['cpu']}" if machine["gpu"] else machine["cpu"]
    how = {"qlora": "QLoRA: NF4 base, double-quantised, ", "lora": "LoRA, ", "full": "full fine-tuning, "}[
        settings["mode"]
    ]
    adapter = "" if settings["mode"] == "full" else f"r={settings['rank']}, alpha={settings['alpha']}, "
    shape = (
        ", ".join(settings["shapes"])
        if settings["shapes"]
        else (
            f"{settings['batch']} rows a step, at most {settings['seq_len']} tokens, "
            + (
                "packed into one without padding"
                if settings.get("batching") == "packed"
                else f"padded to multiples of {settings['pad_to']} for every system"
            )
        )
    )
    source = "random tokens" if settings["shapes"] else f"{settings['rows']:,} rows of {Path(settings['data']).name}"
    if settings["dropped_rows"]:
        source += f" ({settings['dropped_rows']} longer ones left out)"
    return [
        ("Model", f"{run['model']}. {how}{adapter}computed in {settings['dtype']}"),
        (
            "Training",
            f"{settings['steps']} steps by {trainer_text(settings)}, "
            f"lr {settings['lr']:g}, {seeds_text(settings)}"
            + (", gradient checkpointing" if settings["checkpointing"] else ""),
        ),
        ("Data", f"{source}; {shape}"),
        ("Machine", f"{where}; {machine['memory_gib']} GiB"),
        ("Versions", ", ".join(f"{name} {version}" for name, version in result["versions"].items())),
        (
            "Measured",
            f"{result['date']}"
            + (
                f", commit {result['commit'][:12]}{' with changes' if result['dirty'] else ''}"
                if result["commit"]
                else ""
            ),
        ),
    ]


def trainer_text(settings: dict) -> str:
    """The trainer by name."""
    dpo = settings.get("loss") == "dpo"
    if settings["trainer"] == "loop":
        return "a plain PyTorch loop" + (" with the loss of DPO" if dpo else "")
    return "TRL " + ("DPOTrainer" if dpo else "SFTTrainer")


def seeds_text(settings: dict) -> str:
    """The seed, or the range of seeds."""
    first, count = settings["seed"], settings.get("seeds", 1)
    return f"seed {first}" if count == 1 else f"seeds {first} to {first + count - 1}"


def method(result: dict) -> list[str]:
    """Sentences on how the figures were measured."""
    settings = result["settings"]
    turns = (
        "The systems' processes alternate step by step, so that other load on the machine affects all alike."
        if settings["turns"]
        else "The systems' processes run one after the other, each alone."
    )
    lines = [
        "Every system trains on the same batches in the same order, in its own process, from the same adapter values, "
        "with cold compiler caches. " + turns,
        "Step time is the median from the fourth step on; tokens/s counts real tokens, not padding.",
        "Saved for backward: storages that autograd keeps between forward and backward, without parameters; "
        "counted in one extra step that is not timed.",
    ]
    if any(r["system"] in ("hf", "hf-checkpoint") for r in result["runs"]):
        lines.insert(1, "hf is the unchanged Hugging Face model, run eagerly: the yardstick for speed and error.")
    if result["gradients"]:
        where = "a two-layer model of the same shape" if settings["shapes"] else "the model"
        lines.append(
            f"Gradient error is ‖g − r‖ / ‖r‖ for every trainable parameter of {where}, where r is computed in higher "
            "precision from the same (dequantised) weights. LoRA's B is set to small random values for this step: with "
            "B = 0 every gradient of A is zero."
        )
    if settings.get("loss") == "dpo":
        lines.append(
            "DPO's reference is the model without its adapter, run without gradients in every step; tokens/s counts "
            "the tokens of the pairs once."
        )
    if settings.get("seeds", 1) > 1:
        lines.append(
            "Each seed has its own processes, adapters, order of rows and dropout; held-out rows are the same. Figures "
            "are the median over the seeds, with the lowest and the highest; losses are the mean of each step, in a "
            "band from the lowest to the highest. Gradients are those of the first seed."
        )
    if any(r.get("peak_reserved_gib") is None and r["status"] == "ok" for r in result["runs"]):
        lines.append("Peak memory on a CPU is resident memory from the fourth step on, with Python and all libraries.")
    return lines


def curve_table(rows: list[dict]) -> list[list[str]]:
    """The table of distances between loss curves."""
    return [
        [
            row["system"],
            f"{row['mean_size']:.2e}",
            f"{row['mean']:+.2e}",
            f"{row['largest']:.2e}",
            f"{row['last']:+.2e}",
        ]
        for row in rows
    ]


ERROR_HEAD = (
    "parameters",
    "number",
    "eager's error, median",
    "{}'s, median",
    "nearer than eager by",
    "of eager's, median",
    "of eager's, worst",
    "with gradient",
)


def error_summary(gradients: list[dict]) -> list[list[str]]:
    """The table of gradient errors, for all parameters and by kind of parameter."""
    table = []
    for name, rows in ({"all": gradients} | families(gradients)).items() if gradients else ():
        ratios = [r["error"] / r["yardstick"] for r in rows]
        eager, ours = (median([r[key] for r in rows]) for key in ("eager_error", "error"))
        table.append(
            [
                name,
                str(len(rows)),
                f"{eager:.2e}",
                f"{ours:.2e}",
                nearer(eager, ours),
                f"{median(ratios):.3f}",
                f"{max(ratios):.3f}",
                f"{sum(r['has_gradient'] for r in rows)} of {len(rows)}",
            ]
        )
    return table


def nearer(eager: float, ours: float) -> str:
    """By how much our error is smaller than eager's. Errors below the rounding of fp32 sums do not count."""
    if max(eager, ours) <= ORDER:
        return "both are rounding"
    if ours <= eager:
        return f"{1 - ours / eager:.1%}"
    return f"no: {ours / eager:.2f}x as far" if eager else "no"


def against_title(result: dict) -> str:
    """The date and commit of the older result, and the packages whose versions changed."""
    old, new = result["against"]["versions"], result["versions"]
    moved = [
        f"{name} {old.get(name, 'none')} → {new.get(name, 'none')}"
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name)
    ]
    since = f"Since {result['against']['date'][:10]}" + (
        f", commit {result['against']['commit'][:12]}" if result["against"]["commit"] else ""
    )
    return since + (f": {', '.join(moved)}" if moved else "")


def against_table(rows: list[dict]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of the comparison with an older result."""
    head = ["system", "shape", "figure", "before", "now", "change", "verdict"]
    return head, [
        [
            row["system"],
            row["shape"],
            row["figure"],
            row["before"],
            row["now"],
            f"{row['change']:+.1%}" if "change" in row else "",
            row["verdict"],
        ]
        for row in rows
    ]


def figures(result: dict) -> list[tuple[str, str]]:
    """Captions and pictures."""
    together = merge_seeds(result["runs"])
    ok = [r for r in together if r["status"] == "ok"]
    if not ok:
        return []
    cuda = bool(result["machine"]["gpu"]) and ok[0].get("peak_reserved_gib") is not None
    shape = ok[0]["shape"]
    made = [
        (
            "Loss",
            plots.loss_curves([r for r in ok if r["shape"] == shape], result.get("reference")),
        )
    ]
    base = curves.base_of(together)
    if base and (others := [r for r in ok if r is not base and r["shape"] == base["shape"]]):
        made.append(
            (
                f"Loss minus that of {base['system']}",
                plots.loss_differences(others, base, curves.batch_noise(base["losses"])),
            )
        )
    if result["gradients"]:
        made.append(("Gradient error of every trainable parameter", plots.gradient_scatter(result["gradients"], LIMIT)))
    made.append(("Time of a step", plots.step_time_bars(ok)))
    made.append(("Peak memory", plots.memory_bars(ok, "peak_gib", 1, "GiB allocated" if cuda else "GiB resident")))
    if any(r.get("saved_bytes") is not None for r in ok):
        made.append(("Saved between forward and backward", plots.memory_bars(ok, "saved_bytes", 2**20, "MiB")))
    return made


def write_reports(result: dict, out: Path) -> dict[str, Path]:
    """Write the three files and return their paths by kind."""
    out.mkdir(parents=True, exist_ok=True)
    runs = merge_seeds(result["runs"])
    head, rows = run_table(runs)
    fields = {
        "result": result,
        "runs": runs,
        "facts": facts(result),
        "method": method(result),
        "head": head,
        "rows": rows,
        "errors": error_summary(result["gradients"]),
        "error_head": ERROR_HEAD,
        "reduced": error_summary(result.get("reduced_gradients", [])),
        "curves": curve_table(result.get("curves", [])),
        "passed": all(v["passed"] for v in result["verdicts"]),
        "worse": sum(row["worse"] for row in result.get("against", {}).get("rows", [])),
    }
    if "against" in result:
        since_head, since_rows = against_table(result["against"]["rows"])
        fields |= {"since": against_title(result), "since_head": since_head, "since_rows": since_rows}
    environment = make_environment("tunecompile.cli.compare")
    paths = {kind: out / f"report.{kind}" for kind in ("json", "md", "html")}
    paths["json"].write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    paths["md"].write_text(environment.get_template("report.md.jinja").render(fields), encoding="utf-8")
    html = environment.get_template("report.html.jinja").render(fields, figures=figures(result))
    paths["html"].write_text(html, encoding="utf-8")
    return paths
