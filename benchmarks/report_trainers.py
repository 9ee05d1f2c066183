"""The tables of trainers, of images, other transformers, generation and evaluation, from the files of `benchmarks/steps/`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from report_tables import RESULTS, complete, load_all, measured_on, shown, to_markdown

HEAD = ("trainer, batch", "system", "tokens/s", "step, ms", "peak, GiB", "first step, s", "tunecompile is faster by")
GENERATION = (
    "model, rows x prompt + new tokens",
    "HF + PEFT, ms a token",
    "**tunecompile**, ms a token",
    "as fast",
    "tokens/s",
    "first call, s",
    "GiB beside the model",
    "nats from scoring (HF's)",
)
#: packages whose versions stand below a table, and their names in results
ALONE = (("torch", "torch"), ("transformers", "transformers"))
IN_TRAINERS = (*ALONE, ("TRL", "trl"), ("Unsloth", "unsloth"))
IN_LOOPS = (*ALONE, ("PEFT", "peft"), ("Unsloth", "unsloth"))
STEPS = (
    "model, batches",
    "system",
    "tokens/s",
    "step, ms (median, spread)",
    "slow steps",
    "compiled late",
    "peak, GiB",
    "first step, s",
    "tunecompile is faster by",
)
EVALUATION = (
    "model, batch",
    "system",
    "evaluation, ms",
    "its peak, GiB",
    "training step, ms",
    "its peak, GiB",
    "first evaluation, s",
    "tunecompile evaluates faster by",
)
FIRST = (
    "model, batches in turn",
    "run",
    "first loss, s",
    "all steps, s",
    "a step at the end, ms",
)
RUNS = (
    "run",
    "system",
    "caches",
    "to the saved adapter, s",
    "first step ends, s",
    "tenth, s",
    "a step then, s",
    "slow steps",
    "graphs captured in step",
    "peak, GiB",
    "tunecompile takes",
)
WAYS = {
    "eager": "eager",
    "cold": "**tunecompile**, caches empty",
    "warm": "**tunecompile**, caches warm",
}
OTHERS = ("embeddings", "encoders", "diffusion")
TITLES = {"sft": "SFTTrainer", "dpo": "DPOTrainer", "grpo": "GRPOTrainer"}


def _table(
    kinds: Sequence[str],
    folder: Path,
    rows_of: Callable[[list[dict[str, Any]]], list[list[str]]],
    head: Sequence[str],
    packages: Sequence[tuple[str, str]],
    text: str = "",
) -> str:
    """The rows of all files of some kinds, below `text`, and where they were measured; nothing where there are none."""
    results = [result for kind in kinds for result in load_all(f"{kind}-*.json", folder)]
    rows = [row for result in results for row in rows_of(complete(result))]
    return text + to_markdown(head, rows) + "\n" + measured_on(results, packages) if rows else ""


def render_trainers(folder: Path = RESULTS) -> str:
    """A row for each trainer and system; ratios are only taken inside one file."""
    return _table(("trainers",), folder, _rows, HEAD, IN_TRAINERS)


def _rows(runs: list[dict[str, Any]]) -> list[list[str]]:
    budgeted = {run["trainer"]: run for run in runs if run["system"].startswith("tunecompile@")}
    ours = budgeted | {run["trainer"]: run for run in runs if run["system"] == "tunecompile"}
    rows = []
    for run in sorted(runs, key=lambda run: (run["trainer"], run["tokens_per_s"])):
        best = ours.get(run["trainer"])
        ratio = best["tokens_per_s"] / run["tokens_per_s"] if best and best is not run else None
        rows.append(
            [
                f"{TITLES[run['trainer']]}, {_case(run)}",
                shown(run["system"])
                + ", checkpointing" * (bool(run.get("checkpointing")) and run["system"] in ("hf", "tunecompile")),
                f"{run['tokens_per_s']:,.0f}",
                f"{run['step_ms']['median']:.0f}",
                f"{run['peak_gib']:.1f}",
                f"{run['first_step_s']:.1f}",
                f"{ratio:.2f}x" if ratio else "",
            ]
        )
    return rows


def _case(run: dict[str, Any]) -> str:
    layers = f" ({run['layers']} layers)" if run.get("layers") else ""
    return f"{run['model']}{layers}, {run['mode']}, {run['shape']}"


def render_runs(folder: Path = RESULTS) -> str:
    """A section with a row for each run of a system, or nothing where nothing was measured."""
    text = (
        "## Whole runs\n\n"
        "From the start of the process to the saved adapter: SFTTrainer with TRL's defaults on rows of log-normal\n"
        "lengths (`benchmarks/steps/run.py`; shapes are rows x median tokens x accumulated batches). Seconds are counted\n"
        "from the start of the process, and loading of weights is part of them. Unsloth has its own checkpointing, its\n"
        "default. Slow: steps after the third that took three times the median, or 5 s. Graphs are those that Dynamo\n"
        "captured, at which step.\n\n"
    )
    return _table(("run",), folder, _whole_runs, RUNS, IN_TRAINERS, text)


def _whole_runs(runs: list[dict[str, Any]]) -> list[list[str]]:
    ours = next((run for run in runs if (run["system"], run["caches"]) == ("tunecompile", "cold")), None)
    rows = []
    for run in sorted(runs, key=lambda run: -run["wall_s"]):
        rival = ours is not None and not run["system"].startswith("tunecompile")
        name = run["system"].removesuffix("-no-checkpoint")
        rows.append(
            [
                f"{_case(run)} x {run['accumulation']}, {run['steps']} steps",
                shown(name) + ("" if run["checkpointing"] else ", checkpointing off"),
                run["caches"],
                f"{run['wall_s']:.0f}",
                f"{run['wall_first_s']:.0f}",
                f"{run['wall_tenth_s']:.0f}" if run["wall_tenth_s"] else "",
                f"{run['step_ms']['median'] / 1e3:.2f}",
                len(run["slow_steps"]),
                ", ".join(f"{step}: {count}" for step, count in run["captured"].items()),
                f"{run['peak_gib']:.1f}",
                f"{ours['wall_s'] / run['wall_s']:.2f} of it" if ours and rival else "",
            ]
        )
    return rows


def render_vision(folder: Path = RESULTS) -> str:
    """A section with a row for each file and system, or nothing where nothing was measured."""
    text = (
        "## Images beside text\n\n"
        "Training steps with an image in each row, whose sizes change from batch to batch\n"
        "(`benchmarks/steps/vision.py`). Slow: steps after the second that took more than twice the median. Compiled\n"
        "late: graphs that were compiled after the second step. Tokens are those of text and images.\n\n"
    )
    return _table(("vision",), folder, lambda runs: _of_steps(runs, _with_images), STEPS, IN_LOOPS, text)


def render_others(folder: Path = RESULTS) -> str:
    """A section of transformers that are no decoders of text, or nothing where nothing was measured."""
    text = (
        "## Embeddings, encoders, diffusion\n\n"
        "Training steps by sentence-transformers' trainer, 256 texts of log-normal lengths in pairs\n"
        "(`benchmarks/steps/embeddings.py`), of vision and speech (`encoders.py`) and of diffusers' transformers\n"
        "(`diffusion.py`). Columns as above; tokens are those that are no padding.\n\n"
    )
    return _table(OTHERS, folder, lambda runs: _of_steps(runs, _case), STEPS, IN_LOOPS, text)


def _of_steps(runs: list[dict[str, Any]], case: Callable[[dict[str, Any]], str]) -> list[list[str]]:
    best = next((run for run in runs if run["system"] == "tunecompile"), None)
    rows = []
    for run in sorted(runs, key=lambda run: run["tokens_per_s"]):
        ratio = best["tokens_per_s"] / run["tokens_per_s"] if best and best is not run else None
        rows.append(
            [
                case(run),
                shown(run["system"]),
                f"{run['tokens_per_s']:,.0f}",
                "{median:.0f} ({min:.0f} to {max:.0f})".format(**run["step_ms"]),
                run["slow_steps"],
                run.get("late_compilations", ""),
                f"{run['peak_gib']:.1f}",
                f"{run['first_step_s']:.1f}",
                f"{ratio:.2f}x" if ratio else "",
            ]
        )
    return rows


def _with_images(run: dict[str, Any]) -> str:
    """With the steps that are timed: sizes come again and again, and the first of each are compiled for, and recorded."""
    steps = len(run["all_step_ms"])
    timed = f"steps {steps - run['repeats'] + 1} to {steps}"
    return f"{_case(run)}, {run['images']} sizes, tower {run['tower']}, {timed}"


def render_generation(folder: Path = RESULTS) -> str:
    """A row for each size: transformers' own loop and recorded steps."""
    return _table(("generation",), folder, _generated, GENERATION, ALONE)


def _generated(runs: list[dict[str, Any]]) -> list[list[str]]:
    done = {(run["system"], run["shape"]): run for run in runs if run["status"] == "ok"}
    rows = []
    for (system, shape), ours in done.items():
        theirs = done.get(("hf", shape))
        if system == "hf" or theirs is None:
            continue
        rows.append(
            [
                _case(ours),
                f"{theirs['ms_a_token']:.0f}",
                f"{ours['ms_a_token']:.1f}",
                f"{theirs['ms_a_token'] / ours['ms_a_token']:.0f}x",
                f"{ours['tokens_per_s']:,.0f}",
                f"{ours['first_s']:.0f}",
                f"{ours['beside_gib']:.1f}" if "beside_gib" in ours else "",
                f"{ours['apart']:.3f} ({theirs['apart']:.3f})",
            ]
        )
    return rows


def render_evaluation(folder: Path = RESULTS) -> str:
    """A section with a row for each file and system, or nothing where nothing was measured."""
    text = (
        "## Evaluation between steps\n\n"
        "Batches in eval mode, of which the loss alone is read, after some training steps of that size\n"
        "(`benchmarks/steps/evaluation.py`).\n\n"
    )
    return _table(("evaluation",), folder, _evaluated, EVALUATION, IN_LOOPS, text)


def _evaluated(runs: list[dict[str, Any]]) -> list[list[str]]:
    ours = next((run for run in runs if run["system"] == "tunecompile"), None)
    return [
        [
            _case(run),
            shown(run["system"]),
            f"{run['step_ms']['median']:.0f}",
            f"{run['peak_gib']:.1f}",
            f"{run['training']['step_ms']['median']:.0f}",
            f"{run['training']['peak_gib']:.1f}",
            f"{run['first_step_s']:.1f}",
            f"{run['step_ms']['median'] / ours['step_ms']['median']:.2f}x" if ours and run is not ours else "",
        ]
        for run in sorted(runs, key=lambda run: run["tokens_per_s"])
    ]


def render_first_losses(folder: Path = RESULTS) -> str:
    """A row for each run of a model: eager, and compiled with empty and warm caches."""
    return _table(("first-loss",), folder, lambda runs: [_first(run) for run in runs], FIRST, ALONE)


def _first(run: dict[str, Any]) -> list[str]:
    return [
        _case(run),
        WAYS[run["kind"]],
        f"{run['first_loss_s']:.1f}",
        f"{run['steps']} in {run['all_s']:.1f}",
        ", ".join(f"{1e3 * each:.0f}" for each in _last(run)),
    ]


def _last(run: dict[str, Any]) -> list[float]:
    """Seconds of the last step of each batch."""
    return run["steps_s"][-len(run["shape"].split(",")) :]
