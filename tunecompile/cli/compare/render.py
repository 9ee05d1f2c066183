"""Write the result to report.json, report.md and one self-contained report.html."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tunecompile.cli.compare import curves, plots
from tunecompile.cli.compare.curves import merge_seeds
from tunecompile.cli.compare.gradients import families
from tunecompile.report.html import make_environment
from tunecompile.verification.tolerance import LIMIT, ORDER

BESIDE_EAGER = ("parameters", "number", "eager's error, median", "{}'s, median", "nearer than eager by")
ERROR_HEAD = (*BESIDE_EAGER, "of eager's, median", "of eager's, worst", "with gradient")
AGAINST_HEAD = ("system", "shape", "figure", "before", "now", "change", "verdict")
MODES = {"qlora": "QLoRA: NF4 base, double-quantised, ", "lora": "LoRA, ", "full": "full fine-tuning, "}

METHOD = {  # sentences on how figures are measured
    "every": "Every system trains on the same batches in the same order, in its own process, from the same adapter "
    "values, with cold compiler caches.",
    "turns": "The systems' processes alternate step by step, so that other load on the machine affects all alike.",
    "alone": "The systems' processes run one after the other, each alone.",
    "hf": "hf is the unchanged Hugging Face model, run eagerly: the yardstick for speed and error.",
    "figures": "Step time is the median from the fourth step on; tokens/s counts real tokens, not padding. Saved for "
    "backward: storages that autograd keeps between forward and backward, without parameters; counted in one extra "
    "step that is not timed.",
    "gradients": "Gradient error is ‖g − r‖ / ‖r‖ for every trainable parameter of {model}, where r is computed in "
    "higher precision from the same (dequantised) weights. LoRA's B is set to small random values for this step: with "
    "B = 0 every gradient of A is zero.",
    "dpo": "DPO's reference is the model without its adapter, run without gradients in every step; tokens/s counts the "
    "tokens of the pairs once.",
    "seeds": "Each seed has its own processes, adapters, order of rows and dropout; held-out rows are the same. "
    "Figures are the median over the seeds, with the lowest and the highest; losses are the mean of each step, in a "
    "band from the lowest to the highest. Gradients are those of the first seed.",
    "resident": "Peak memory on a CPU is resident memory from the fourth step on, with Python and all libraries.",
}


@dataclass(frozen=True)
class Table:
    """A table of the report. A row without a last cell is one of a run that failed."""

    title: str
    head: Sequence[str]
    rows: list[list[str]]
    notes: Sequence[str] = ()  #: what is said below it
    folded: bool = False  #: of the page alone, shown on demand


# ---------------------------------------------------------------- the table of systems


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
    return "never" if run["break_even_step"] is None else f"step {run['break_even_step']:,}"


def held_out_text(run: dict) -> str:
    """The held-out loss before and after."""
    if "held_out_after" not in run:
        return ""
    return f"{run['held_out_before']:.3f} → {run['held_out_after']:.3f}{spread(run, 'held_out_after', '.3f')}"


COLUMNS = (  # heading, how to read it off a run
    ("version", lambda r: r.get("version") or ""),
    ("tokens/s", lambda r: f"{r['tokens_per_s']:,.0f}{spread(r, 'tokens_per_s', ',.0f')}"),
    ("step, ms", lambda r: f"{r['step_ms']['median']:,.1f}"),
    ("fastest to slowest", lambda r: f"{r['step_ms']['min']:,.1f} to {r['step_ms']['max']:,.1f}"),
    ("peak memory, GiB", lambda r: f"{r['peak_gib']:.2f}"),
    ("reserved, GiB", lambda r: number(r.get("peak_reserved_gib"), ".2f")),
    ("saved for backward, MiB", lambda r: number(r.get("saved_bytes"), ",.1f", 2**20)),
    ("first step, s", lambda r: f"{r['first_step_s']:.1f}"),
    ("compiling pays back after", break_even_text),
    ("launches a step", lambda r: number(r.get("launches_per_step"), ",.0f")),
    ("host, ms a step", lambda r: number(r.get("host_ms_per_step"), ",.1f")),
    ("held-out loss", held_out_text),
    ("last loss", lambda r: f"{r['losses'][-1]:.4f}{spread(r, 'last_loss', '.4f')}"),
)


def run_table(runs: list[dict]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of the table of systems, without empty columns. A row that is not ok says why.

    runs: one for all seeds.
    """
    filled = [(name, read) for name, read in COLUMNS if any(r["status"] == "ok" and read(r) for r in runs)]
    several = len({r["shape"] for r in runs}) > 1
    rows = []
    for run in runs:
        status = run["status"] + (f": {run['install']}" if run.get("install") else "")
        cells = [read(run) for _, read in filled] if run["status"] == "ok" else [status, *[""] * (len(filled) - 1)]
        rows.append([name_of(run), *[run["shape"]] * several, *cells])
    return ["system", *["shape"] * several, *(name for name, _ in filled)], rows


# ---------------------------------------------------------------- the other tables


def error_summary(gradients: list[dict]) -> list[list[str]]:
    """The table of gradient errors, for all parameters and by kind of parameter."""
    table = []
    for name, rows in ({"all": gradients} | families(gradients)).items() if gradients else ():
        ratios = [r["error"] / r["yardstick"] for r in rows]
        eager, ours = (median([r[key] for r in rows]) for key in ("eager_error", "error"))
        beside = [f"{eager:.2e}", f"{ours:.2e}", nearer(eager, ours), f"{median(ratios):.3f}", f"{max(ratios):.3f}"]
        table.append([name, str(len(rows)), *beside, f"{sum(r['has_gradient'] for r in rows)} of {len(rows)}"])
    return table


def nearer(eager: float, ours: float) -> str:
    """By how much our error is smaller than eager's. Errors below the rounding of fp32 sums do not count."""
    if max(eager, ours) <= ORDER:
        return "both are rounding"
    if ours <= eager:
        return f"{1 - ours / eager:.1%}"
    return f"no: {ours / eager:.2f}x as far" if eager else "no"


def against_table(against: dict, versions: dict[str, str]) -> Table:
    """What changed since an older result, under its date and commit, and the packages whose versions changed."""
    old, rows = against["versions"], against["rows"]
    moved = [
        f"{name} {old.get(name, 'none')} → {versions.get(name, 'none')}"
        for name in dict.fromkeys([*old, *versions])
        if old.get(name) != versions.get(name)
    ]
    commit = f", commit {against['commit'][:12]}" if against["commit"] else ""
    title = f"Since {against['date'][:10]}{commit}" + (f": {', '.join(moved)}" if moved else "")
    worse = sum(row["worse"] for row in rows)
    shown = [row | {"change": f"{row['change']:+.1%}" if "change" in row else ""} for row in rows]
    note = f"{worse or 'No'} figure{'s' * (worse != 1)} worse, by more than both results' spread."
    return Table(title, AGAINST_HEAD, [[row[name] for name in AGAINST_HEAD] for row in shown], [note])


def curve_table(rows: list[dict]) -> Table:
    """Distances between loss curves."""
    forms = {"mean_size": ".2e", "mean": "+.2e", "largest": ".2e", "last": "+.2e"}
    cells = [[row["system"], *(format(row[name], form) for name, form in forms.items())] for row in rows]
    head = ("system", "mean distance", "mean with sign", "largest", "last step")
    return Table(f"Loss beside {rows[0]['base']}'s" if rows else "", head, cells)


def compiler_table(result: dict) -> Table:
    """What the compiler found, and its notes."""
    compiler = result["compiler"]
    regions = [
        f"{region['name']} ({region['layers']} layer{'s' * (region['layers'] != 1)}, compiled {region['compiles']}x)"
        for region in compiler.get("regions") or ()
    ]
    notes = [f"{compiler['compiles']} compilations: {', '.join(regions)}"] if regions else []
    rows = [
        [m["family"], str(m["found"]), str(m["rewritten"]), "; ".join(dict.fromkeys(m["refused"])) or "–"]
        for m in result["matches"]
    ]
    head = ("family", "found", "rewritten", "refused")
    return Table("What the compiler found", head, rows, [*notes, *(compiler.get("notes") or ())])


def error_tables(title: str, system: str, gradients: list[dict]) -> list[Table]:
    """Gradient errors by kind of parameter, and of every parameter."""
    every = [
        [g["parameter"], f"{g['eager_error']:.3e}", f"{g['error']:.3e}", f"{g['norm_ratio']:.5f}"] for g in gradients
    ]
    head = ("parameter", "eager's error", f"{system}'s error", "norm, of the reference's")
    return [
        Table(title, [name.format(system) for name in ERROR_HEAD], error_summary(gradients)),
        Table(f"All {len(every)} parameters", head, every, folded=True),
    ]


def tables(result: dict) -> tuple[list[Table], list[Table]]:
    """The tables before the pictures, and those behind them."""
    first = [Table("Systems", *run_table(merge_seeds(result["runs"])))]
    if "against" in result:
        first.append(against_table(result["against"], result["versions"]))
    more = [
        curve_table(result.get("curves", [])),
        compiler_table(result),
        *error_tables("Gradients", "tunecompile", result["gradients"]),
        *error_tables("Gradients in 8 bits, not judged", "8 bits", result.get("reduced_gradients", [])),
    ]
    return first, [table for table in more if table.rows or table.notes]


# ---------------------------------------------------------------- conditions


def facts(result: dict) -> list[tuple[str, str]]:
    """What was run, and on which machine."""
    settings, machine, run = result["settings"], result["machine"], result["runs"][0]
    adapter = "" if settings["mode"] == "full" else f"r={settings['rank']}, alpha={settings['alpha']}, "
    padding = f"padded to multiples of {settings['pad_to']} for every system"
    if settings.get("batching") == "packed":
        padding = "packed into one without padding"
    shape = f"{settings['batch']} rows a step, at most {settings['seq_len']} tokens, {padding}"
    if settings["shapes"]:
        source, shape = "random tokens", ", ".join(settings["shapes"])
    else:
        source = f"{settings['rows']:,} rows of {Path(settings['data']).name}"
    if settings["dropped_rows"]:
        source += f" ({settings['dropped_rows']} longer ones left out)"
    dpo, seed, seeds = settings.get("loss") == "dpo", settings["seed"], settings.get("seeds", 1)
    trainer = "TRL " + ("DPOTrainer" if dpo else "SFTTrainer")
    if settings["trainer"] == "loop":
        trainer = "a plain PyTorch loop" + " with the loss of DPO" * dpo
    drawn = f"seed {seed}" if seeds == 1 else f"seeds {seed} to {seed + seeds - 1}"
    training = f"{settings['steps']} steps by {trainer}, lr {settings['lr']:g}, {drawn}"
    where = f"{machine['gpu_count']} x {machine['gpu']}; {machine['cpu']}" if machine["gpu"] else machine["cpu"]
    commit = f", commit {result['commit'][:12]}{' with changes' * result['dirty']}" if result["commit"] else ""
    return [
        ("Model", f"{run['model']}. {MODES[settings['mode']]}{adapter}computed in {settings['dtype']}"),
        ("Training", training + ", gradient checkpointing" * settings["checkpointing"]),
        ("Data", f"{source}; {shape}"),
        ("Machine", f"{where}; {machine['memory_gib']} GiB"),
        ("Versions", ", ".join(f"{name} {version}" for name, version in result["versions"].items())),
        ("Measured", f"{result['date']}{commit}"),
    ]


def method(result: dict) -> list[str]:
    """Sentences on how the figures were measured."""
    settings, runs = result["settings"], result["runs"]
    model = "a two-layer model of the same shape" if settings["shapes"] else "the model"
    holds = {
        "every": True,
        "turns": settings["turns"],
        "alone": not settings["turns"],
        "hf": any(run["system"] in ("hf", "hf-checkpoint") for run in runs),
        "figures": True,
        "gradients": bool(result["gradients"]),
        "dpo": settings.get("loss") == "dpo",
        "seeds": settings.get("seeds", 1) > 1,
        "resident": any(run.get("peak_reserved_gib") is None and run["status"] == "ok" for run in runs),
    }
    return [METHOD[name].format(model=model) for name, said in holds.items() if said]


# ---------------------------------------------------------------- the files


def pictures(result: dict) -> list[tuple[str, str]]:
    """Captions and pictures."""
    together = merge_seeds(result["runs"])
    ok = [r for r in together if r["status"] == "ok"]
    if not ok:
        return []
    alike = [r for r in ok if r["shape"] == ok[0]["shape"]]
    made = [("Loss", plots.loss_curves(alike, result.get("reference")))]
    base = curves.base_of(together)
    if base and (others := [r for r in ok if r is not base and r["shape"] == base["shape"]]):
        made.append((f"Loss minus that of {base['system']}", plots.loss_differences(others, base)))
    if result["gradients"]:
        made.append(("Gradient error of every trainable parameter", plots.gradient_scatter(result["gradients"], LIMIT)))
    cuda = bool(result["machine"]["gpu"]) and ok[0].get("peak_reserved_gib") is not None
    memory = [r["peak_gib"] for r in ok]
    made.append(("Time of a step", plots.step_time_bars(ok)))
    made.append(("Peak memory", plots.bars(ok, memory, "GiB allocated" if cuda else "GiB resident")))
    if counted := [r for r in ok if r.get("saved_bytes") is not None]:
        saved = [r["saved_bytes"] / 2**20 for r in counted]
        made.append(("Saved between forward and backward", plots.bars(counted, saved, "MiB")))
    return made


def write_reports(result: dict, out: Path) -> dict[str, Path]:
    """Write the three files and return their paths by kind."""
    out.mkdir(parents=True, exist_ok=True)
    passed = all(v["passed"] for v in result["verdicts"])
    fields = {"result": result, "facts": facts(result), "method": method(result), "passed": passed}
    fields["first"], fields["more"] = tables(result)
    environment = make_environment("tunecompile.cli.compare")
    paths = {kind: out / f"report.{kind}" for kind in ("json", "md", "html")}
    paths["json"].write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for kind in ("md", "html"):
        fields["pictures"] = pictures(result) if kind == "html" else []
        text = environment.get_template(f"report.{kind}.jinja").render(fields)
        paths[kind].write_text(text, encoding="utf-8")
    return paths
