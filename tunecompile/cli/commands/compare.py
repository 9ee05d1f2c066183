"""`tunecompile compare` and `tunecompile demo`: the same training steps under several systems."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from tunecompile.cli.commands import option_types as types
from tunecompile.cli.compare import models
from tunecompile.cli.compare.demo import run_demo
from tunecompile.cli.compare.processes import Listener
from tunecompile.cli.compare.request import Comparison
from tunecompile.cli.compare.run import run_comparison
from tunecompile.cli.compare.spec import Job, parse_shape, resolve_systems
from tunecompile.cli.compare.user_config import read_config
from tunecompile.cli.options import exit_code, need_packages, pick_device, pick_dtype, pick_mode
from tunecompile.errors import BadOption

MODES = {"qlora", "lora", "full"}  #: flags of which one holds


def compare(
    context: typer.Context,
    model: types.ModelOption = None,
    config: types.ConfigOption = None,
    qlora: types.QloraFlag = False,
    lora: types.LoraFlag = False,
    full: types.FullFlag = False,
    gradient_checkpointing: types.CheckpointingFlag = False,
    dtype: types.DtypeOption = "auto",
    device: types.DeviceOption = "auto",
    gpus: types.GpusOption = 1,
    parallel: types.ParallelOption = "ddp",
    layers: types.LayersOption = None,
    data: types.DataOption = None,
    batch: types.BatchOption = 4,
    seq_len: types.LengthOption = 512,
    batching: types.BatchingOption = "padded",
    pad_to: types.PadToOption = 64,
    too_long: types.TooLongOption = "error",
    shape: types.ShapeOption = "4x2048",
    held_out: types.HeldOutOption = 16,
    steps: types.StepsOption = 20,
    lr: types.RateOption = 2e-4,
    trainer: types.TrainerOption = "sft",
    loss: types.LossOption = "sft",
    seed: types.SeedOption = 0,
    seeds: types.SeedsOption = 1,
    systems: types.Systems = "eager,compile,liger,unsloth,tunecompile",
    turns: types.TurnsOption = None,
    check: types.CheckOption = True,
    reference_steps: types.ReferenceStepsOption = 10,
    against: types.AgainstOption = None,
    out: types.Out = Path("reports/compare"),
) -> None:
    """Run the same training steps under several systems, and write a report."""
    given = dict(locals())

    def work() -> int:
        if config is not None:
            return compare(**with_config(config, context, given))
        if model is None:
            return repeat(against, out, context)
        fields = {name: given[name] for name in given if name in Job.__dataclass_fields__} | (context.obj or {})
        fields |= {"device": pick_device(device), "dtype": pick_dtype(dtype, pick_device(device))}
        fields |= {"data": str(data) if data else None, "checkpointing": gradient_checkpointing}
        job = Job(**fields | {"system": "hf", "mode": pick_mode(qlora, lora, full)})
        job = with_rows(job, shape, held_out)
        comparison = Comparison(
            resolve_systems(systems, gradient_checkpointing),
            job,
            out,
            reference_steps=reference_steps,
            seeds=seeds,
            check=check,
            turns=job.device == "cpu" and gpus == 1 if turns is None else turns,
        )
        return conduct_against(against, comparison)

    raise typer.Exit(exit_code(work))


def demo(
    data: Annotated[
        Path, typer.Option(help="The WordNet questions: benchmarks/data/wordnet.jsonl of the source tree.")
    ],
    systems: types.Systems = "eager,tunecompile",
    steps: Annotated[int, typer.Option(min=4)] = 12,
    trainer: Annotated[Literal["sft", "loop"], typer.Option(help="TRL's, or a plain PyTorch loop.")] = "sft",
    out: types.Out = Path("reports/demo"),
) -> None:
    """Download a small real model, fine-tune it with and without tunecompile, and write a report."""

    def work() -> int:
        return run_demo(
            str(data),
            resolve_systems(systems, False),
            steps,
            trainer,
            out,
            device := pick_device("auto"),
            pick_dtype("auto", device),
            conduct,
        )

    raise typer.Exit(exit_code(work))


def chosen_options(context: typer.Context) -> set[str]:
    """The names of the options that were given."""
    return {name for name in context.params if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"}


def with_config(path: Path, context: typer.Context, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `compare` with what a file has, unless an option was given; fields of the job go to the context.

    Raises:
        BadOption, MissingExtra: as `read_config` does; or the file has rows of the hub, and no others were given.
    """
    found, chosen = read_config(path), chosen_options(context)
    if chosen & MODES:
        chosen |= MODES
    taken = {name: value for name, value in found.options.items() if name not in chosen}
    arguments = {**given, **taken, "config": None}
    if arguments["data"] is None and not models.is_shape(arguments["model"]):
        reason = "its rows are no local file: datasets.load_dataset(...).to_json('rows.jsonl'), and --data rows.jsonl"
        raise BadOption(option="--config", value=str(path), reason=reason)
    context.obj = found.job
    said = {**{name: value for name, value in taken.items() if value is not False}, **found.job}
    lines = [f"{path} ({found.host}): {', '.join(f'{name} {value}' for name, value in said.items())}"]
    lines += [f"not taken over: {', '.join(found.left)}"] if found.left else []
    Console(stderr=True, soft_wrap=True).print("\n".join(lines), highlight=False, markup=False)
    return arguments


def with_rows(job: Job, shape: str, held_out: int) -> Job:
    """The job on random tokens, for a shape model without data, or on its data."""
    if not models.is_shape(job.model) or job.data is not None:
        return job.replace(held_out=held_out)
    shapes = tuple(shape.split(","))
    for text in shapes:
        parse_shape(text)
    return job.replace(trainer="loop", shapes=shapes)


def conduct(comparison: Comparison, finish: Callable[[dict, Listener], None] | None = None) -> int:
    """Run a comparison with progress bars, write the reports, print a short table, and return the exit code.

    finish: called with the result before the reports are written.
    """
    need_packages()
    from tunecompile.cli.compare.console import Bars, show_summary
    from tunecompile.cli.compare.judge import passed
    from tunecompile.cli.compare.render import write_reports

    with Bars() as bars:
        result = run_comparison(dataclasses.replace(comparison, listen=bars.listen))
        if finish:
            finish(result, bars.listen)
    paths = write_reports(result, comparison.out)
    show_summary(result, paths)
    return 0 if passed(result) else 1


def conduct_against(against: Path | None, comparison: Comparison) -> int:
    """Run a comparison, and compare it with an older result if one is given.

    Raises:
        NotComparable: before anything runs, if the two measure different things.
        BadOption: the new report would overwrite the old one.
    """
    if against is None:
        return conduct(comparison)
    need_packages()
    from tunecompile.cli.compare.against import check_like, compare_results
    from tunecompile.cli.compare.machine import describe_machine
    from tunecompile.cli.compare.result import load_result

    old = load_result(against)
    if against.resolve() == (comparison.out / "report.json").resolve():
        reason = f"the new report would overwrite {against}; give another folder"
        raise BadOption(option="--out", value=str(comparison.out), reason=reason)
    check_like(against, old, comparison.job, comparison.model_name, describe_machine())

    def finish(result: dict, listen: Listener) -> None:
        about = {name: old[name] for name in ("date", "commit", "versions")}
        result["against"] = {"path": str(against), **about, "rows": compare_results(old, result)}

    return conduct(comparison, finish)


def repeat(against: Path | None, out: Path, context: typer.Context) -> int:
    """Repeat the comparison of an older result.

    Raises:
        BadOption: there is no older result, or options were given that would change the comparison.
    """
    if against is None:
        reason = "say what to train, or give --against an older report.json to repeat it"
        raise BadOption(option="--model", value=None, reason=reason)
    if given := chosen_options(context) - {"against", "out"}:
        name = min(given, key=list(context.params).index)
        reason = "without --model the old comparison is repeated unchanged; give --model to change options"
        raise BadOption(option="--" + name.replace("_", "-"), value=context.params[name], reason=reason)
    need_packages()
    from tunecompile.cli.compare.against import repeated
    from tunecompile.cli.compare.result import load_result

    old = load_result(against)
    job, more = repeated(old)
    systems = resolve_systems(",".join(run["system"] for run in old["runs"]), False)
    return conduct_against(against, Comparison(systems, job, out, **more))
