"""The command line: `tunecompile compare`, `demo`, `plan`, `monitor`, `doctor`, `merge`, `new-pass` and `check-pass`."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Annotated, Optional

try:
    import rich  # noqa: F401
    import typer
except ImportError as missing:  # the one extra that cannot be reported through typer itself
    sys.exit(
        f"error: the command line needs {missing.name}, which is not installed. Install it: pip install 'tunecompile[cli]'"
    )

from tunecompile.cli.compare.errors import BadOption, MissingExtra
from tunecompile.cli.compare.spec import PARALLEL, Job, parse_shape, resolve_systems
from tunecompile.cli.options import (
    escape,
    guard,
    installed,
    need_packages,
    one_of,
    parse_address,
    parse_budget,
    pick_device,
    pick_dtype,
    pick_mode,
    pick_rows,
)

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Compiles the fine-tuning step of language models, and shows what that gains.",
)

Systems = Annotated[
    str,
    typer.Option(
        help="Comma-separated: eager, compile, liger, unsloth, tunecompile, tunecompile-fp8, and -checkpoint variants. "
        "Their versions are in the table; a peer that is not installed is a row that says how to install it."
    ),
]
MODEL, ROWS, TRAINING, JUDGING, MACHINES = (
    "The model",
    "The rows",
    "Training",
    "What is compared, and how",
    "The machines",
)  # panels of the help
Out = Annotated[Path, typer.Option(help="Folder for report.html, report.md and report.json.")]


@app.command()
def compare(
    context: typer.Context,
    model: Annotated[
        Optional[str],
        typer.Option(
            help="A folder, a hub id, or a shape such as llama-3.1-8b (random weights).", rich_help_panel=MODEL
        ),
    ] = None,
    qlora: Annotated[
        bool, typer.Option("--qlora", help="NF4 base with LoRA (the default).", rich_help_panel=MODEL)
    ] = False,
    lora: Annotated[bool, typer.Option("--lora", help="LoRA over the base as it is.", rich_help_panel=MODEL)] = False,
    full: Annotated[bool, typer.Option("--full", help="Train all weights.", rich_help_panel=MODEL)] = False,
    gradient_checkpointing: Annotated[
        bool,
        typer.Option(
            "--gradient-checkpointing",
            help="Let systems that have a choice compute layers again.",
            rich_help_panel=MODEL,
        ),
    ] = False,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.", rich_help_panel=MODEL)] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.", rich_help_panel=MODEL)] = "auto",
    gpus: Annotated[
        int,
        typer.Option(
            min=1,
            help="A process for each, started by torchrun, with --batch rows of its own; under device_map one process.",
            rich_help_panel=MODEL,
        ),
    ] = 1,
    parallel: Annotated[
        str,
        typer.Option(
            help="What joins several GPUs: ddp, fsdp2, zero3 (DeepSpeed's), device_map, or alone: nothing, each trains by itself.",
            rich_help_panel=MODEL,
        ),
    ] = "ddp",
    layers: Annotated[
        Optional[int], typer.Option(min=1, help="Shape models: so many layers only.", rich_help_panel=MODEL)
    ] = None,
    data: Annotated[
        Optional[Path],
        typer.Option(
            help="JSON Lines with messages, prompt and completion, or text; "
            "for --loss dpo with prompt, chosen and rejected.",
            rich_help_panel=ROWS,
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows a step, or pairs.", rich_help_panel=ROWS)] = 4,
    seq_len: Annotated[int, typer.Option(min=2, help="Longest row, in tokens.", rich_help_panel=ROWS)] = 512,
    batching: Annotated[
        str,
        typer.Option(
            help="padded: rows of a batch are padded to one length; packed: the same rows one after the other, "
            "without padding, each with positions and attention of its own.",
            rich_help_panel=ROWS,
        ),
    ] = "padded",
    pad_to: Annotated[
        int, typer.Option(min=1, help="Pad lengths to a multiple of this, for every system.", rich_help_panel=ROWS)
    ] = 64,
    too_long: Annotated[
        str, typer.Option(help="What to do with longer rows: error or drop.", rich_help_panel=ROWS)
    ] = "error",
    shape: Annotated[
        str,
        typer.Option(help="BATCHxLENGTH[,...] of random tokens, for a shape model without data.", rich_help_panel=ROWS),
    ] = "4x2048",
    held_out: Annotated[
        int, typer.Option(min=0, help="Rows kept from training for the held-out loss.", rich_help_panel=ROWS)
    ] = 16,
    steps: Annotated[
        int, typer.Option(min=1, help="Of the optimizer; the first three are not timed.", rich_help_panel=TRAINING)
    ] = 20,
    lr: Annotated[float, typer.Option(min=0, help="Learning rate, constant.", rich_help_panel=TRAINING)] = 2e-4,
    trainer: Annotated[
        str,
        typer.Option(
            help="sft: TRL's SFTTrainer, or its DPOTrainer for --loss dpo; loop: a plain PyTorch loop.",
            rich_help_panel=TRAINING,
        ),
    ] = "sft",
    loss: Annotated[
        str,
        typer.Option(
            help="sft: cross-entropy of the answers; dpo: pairs of answers, with the model without its adapter as the reference.",
            rich_help_panel=TRAINING,
        ),
    ] = "sft",
    seed: Annotated[int, typer.Option(help="Of adapters, order of rows, and dropout.", rich_help_panel=TRAINING)] = 0,
    seeds: Annotated[
        int,
        typer.Option(
            min=1,
            help="Repeat with so many seeds, from --seed on; figures and curves then have a spread.",
            rich_help_panel=TRAINING,
        ),
    ] = 1,
    systems: Systems = "eager,compile,liger,unsloth,tunecompile",
    turns: Annotated[
        Optional[bool],
        typer.Option(
            "--turns/--one-by-one",
            help="Alternate the systems step by step; default on a CPU.",
            rich_help_panel=JUDGING,
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check/--no-check",
            help="Check losses and gradients against a high-precision reference.",
            rich_help_panel=JUDGING,
        ),
    ] = True,
    reference_steps: Annotated[
        int, typer.Option(min=1, help="Steps of the reference's loss curve.", rich_help_panel=JUDGING)
    ] = 10,
    against: Annotated[
        Optional[Path],
        typer.Option(
            help="An older report.json: say what got slower, needs more memory or is less exact since, "
            "and exit with 1 if anything does. Without --model its comparison is repeated.",
            rich_help_panel=JUDGING,
        ),
    ] = None,
    out: Out = Path("reports/compare"),
) -> None:
    """Run the same training steps under several systems, and write a report."""

    def work() -> int:
        from tunecompile.cli.compare.models import is_shape
        from tunecompile.cli.compare.run import Comparison

        if model is None:
            return repeat(against, out, context)
        job = Job(
            system="hf",
            model=model,
            mode=pick_mode(qlora, lora, full),
            trainer=one_of("--trainer", trainer, "sft", "loop"),
            data=str(data) if data else None,
            steps=steps,
            batch=batch,
            seq_len=seq_len,
            pad_to=pad_to,
            loss=one_of("--loss", loss, "sft", "dpo"),
            batching=one_of("--batching", batching, "padded", "packed"),
            too_long=one_of("--too-long", too_long, "error", "drop"),
            lr=lr,
            seed=seed,
            layers=layers,
            gpus=gpus,
            parallel=one_of("--parallel", parallel, *PARALLEL),
            device=pick_device(device),
            dtype=pick_dtype(dtype, pick_device(device)),
            checkpointing=gradient_checkpointing,
        )
        if is_shape(model) and data is None:
            shapes = tuple(shape.split(","))
            for text in shapes:
                parse_shape(text)
            job = job.replace(trainer="loop", shapes=shapes)
        else:
            job = job.replace(held_out=held_out)
        alternate = job.device == "cpu" and gpus == 1 if turns is None else turns
        return conduct_against(
            against,
            Comparison(
                resolve_systems(systems, gradient_checkpointing),
                job,
                out,
                reference_steps=reference_steps,
                seeds=seeds,
                check=check,
                turns=alternate,
            ),
        )

    raise typer.Exit(guard(work))


@app.command()
def demo(
    data: Annotated[
        Path, typer.Option(help="The WordNet questions: benchmarks/data/wordnet.jsonl of the source tree.")
    ],
    systems: Systems = "eager,tunecompile",
    steps: Annotated[int, typer.Option(min=4)] = 24,
    trainer: Annotated[str, typer.Option(help="sft or loop.")] = "sft",
    out: Out = Path("reports/demo"),
) -> None:
    """Fetch a small real model, fine-tune it with and without tunecompile, and write a report."""

    def work() -> int:
        from tunecompile.cli.compare.demo import run_demo

        return run_demo(
            str(data),
            resolve_systems(systems, False),
            steps,
            one_of("--trainer", trainer, "sft", "loop"),
            out,
            device := pick_device("auto"),
            pick_dtype("auto", device),
            conduct,
        )

    raise typer.Exit(guard(work))


@app.command()
def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="A folder, a config.json, a hub id whose config is in the local cache, or a shape such as llama-3.1-8b. No weights are read."
        ),
    ],
    qlora: Annotated[
        bool, typer.Option("--qlora", help="NF4 base with LoRA (the default).", rich_help_panel=MODEL)
    ] = False,
    lora: Annotated[bool, typer.Option("--lora", help="LoRA over the base in bf16.", rich_help_panel=MODEL)] = False,
    full: Annotated[bool, typer.Option("--full", help="Train all weights.", rich_help_panel=MODEL)] = False,
    rank: Annotated[int, typer.Option(min=1, help="Of adapters.", rich_help_panel=MODEL)] = 16,
    batch: Annotated[
        Optional[int],
        typer.Option(
            min=1, help="Rows a step on each GPU; 1, if neither this nor --global-batch is given.", rich_help_panel=ROWS
        ),
    ] = None,
    global_batch: Annotated[
        Optional[int], typer.Option(min=1, help="Rows a step on all GPUs together.", rich_help_panel=ROWS)
    ] = None,
    seq_len: Annotated[int, typer.Option(min=2, help="Tokens of a row.", rich_help_panel=ROWS)] = 2048,
    gpu: Annotated[
        str,
        typer.Option(
            help="h200, h100, a100-80, l40s, rtx4090, ...; figures that differ from the datasheet follow: h100,memory=94GiB.",
            rich_help_panel=MACHINES,
        ),
    ] = "h100",
    gpus: Annotated[int, typer.Option(min=1, max=1024, help="Of all machines.", rich_help_panel=MACHINES)] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=1, max=64, help="Of one machine.", rich_help_panel=MACHINES)] = 8,
    network: Annotated[
        float,
        typer.Option(min=0.1, help="Between machines: GB/s for each GPU and direction.", rich_help_panel=MACHINES),
    ] = 50.0,
    memory: Annotated[
        Optional[str],
        typer.Option(
            help="As of optimize: what each GPU's process may take. All that the GPU has, if not given.",
            rich_help_panel=MACHINES,
        ),
    ] = None,
    host_memory: Annotated[
        Optional[str],
        typer.Option(
            help="What activations may take of the host, for each GPU; 64GiB, if not given.", rich_help_panel=MACHINES
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="JSON in place of a table.")] = False,
) -> None:
    """Say what a fine-tuning takes on which GPUs, without a GPU and without weights: engines that fit, memory, step time, what to take."""

    def work() -> int:
        from tunecompile.estimate.multi_gpu import Question
        from tunecompile.estimate.multi_gpu import plan as answer
        from tunecompile.planner.datasheets import find_gpu

        rows = pick_rows(batch, global_batch, gpus, gpus_per_node)
        question = Question(
            model,
            pick_mode(qlora, lora, full),
            rows,
            seq_len,
            find_gpu(gpu),
            gpus,
            gpus_per_node,
            network,
            parse_budget(memory),
            host_memory,
            rank,
            together=global_batch is not None,
        )
        with warnings.catch_warnings():  # of libraries, about what nobody runs here
            warnings.simplefilter("ignore")
            report = answer(question)
        show_plan(report, json)
        return 0

    raise typer.Exit(guard(work))


@app.command()
def monitor(
    interval: Annotated[
        float, typer.Option(min=0.1, help="Seconds between two looks; with --once, how long processes have to answer.")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Show one table and stop.")] = False,
    json: Annotated[bool, typer.Option("--json", help="A line of JSON each time, in place of tables.")] = False,
    prometheus: Annotated[
        Optional[str],
        typer.Option(metavar="[HOST:]PORT", help="Serve /metrics too; without HOST to this machine only."),
    ] = None,
) -> None:
    """Show GPU memory, utilisation, tokens/s and budget of your training processes on this machine."""

    def work() -> int:
        from rich.console import Console

        from tunecompile.cli.monitor.watch import watch

        try:
            watch(Console(), interval, once, json, None if prometheus is None else parse_address(prometheus))
        except KeyboardInterrupt:  # how one leaves it
            pass
        return 0

    raise typer.Exit(guard(work))


@app.command()
def doctor(
    json: Annotated[bool, typer.Option("--json", help="A list of objects in place of a table.")] = False,
) -> None:
    """Check what a training needs of this machine: GPU, driver, packages, compilers, caches, memory. Exits with 1 if anything fails."""

    def work() -> int:
        from tunecompile.cli.doctor import examine

        lines = examine()
        show_lines(lines, json)
        return int(any(line.status == "fail" for line in lines))

    raise typer.Exit(guard(work))


@app.command()
def merge(
    adapter: Annotated[Path, typer.Argument(help="The folder that save_pretrained of the PEFT model wrote.")],
    out: Annotated[Path, typer.Argument(help="A new folder.")],
    base: Annotated[
        Optional[str], typer.Option(help="A folder or a hub id, in place of the base that the adapter names.")
    ] = None,
    trained_on: Annotated[
        str,
        typer.Option(
            help="How the base was quantised in training: plain (as it is stored), nf4, nf4-double, fp4 or int8. The result is "
            "nearest to the model that was trained where this is what it was."
        ),
    ] = "plain",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    gguf: Annotated[
        bool,
        typer.Option("--gguf", help="Write OUT/model.gguf as well, for llama.cpp: of Llama, Mistral, Qwen2 and Qwen3."),
    ] = False,
) -> None:
    """Write an adapter and its base as one model: safetensors, configuration and tokenizer."""

    def work() -> int:
        from rich.console import Console

        from tunecompile.export.adapter import BASES, load
        from tunecompile.export.safetensors import DTYPES, empty, save_merged

        one_of("--dtype", dtype, *DTYPES)
        if gguf and not installed("gguf"):
            raise MissingExtra(what="--gguf", package="gguf", extra="gguf")
        empty(out)  # known before a large model is loaded
        model, tokenizer = load(adapter, base, one_of("--trained-on", trained_on, *BASES))
        save_merged(model, out, dtype, tokenizer)
        if gguf:
            from tunecompile.export.gguf import save_gguf

            save_gguf(out)
        Console().print(f"The model: {escape(str(out))}", highlight=False, soft_wrap=True)
        return 0

    raise typer.Exit(guard(work))


@app.command()
def new_pass(
    name: Annotated[str, typer.Argument(help="Of the package: lower case letters, digits and underscores.")],
    out: Annotated[Optional[Path], typer.Option(help="A new folder; ./NAME, if not given.")] = None,
) -> None:
    """Write a package with a pass that holds, its test and its benchmark, to put your own pattern into."""

    def work() -> int:
        from rich.console import Console

        from tunecompile.cli.new_pass import write

        folder = out or Path(name)
        for path in write(name, folder):
            Console().print(f"  {escape(str(path))}", highlight=False)
        Console().print(f"Check it:  tunecompile check-pass {escape(str(folder))}", highlight=False)
        return 0

    raise typer.Exit(guard(work))


@app.command()
def check_pass(
    module: Annotated[
        str, typer.Argument(help="Its name, its file or its folder. It has PASSES, and EXAMPLES to check them with.")
    ],
) -> None:
    """Put a module's passes through five nets: its examples, other spellings, near misses, its ops alone, and a model's training step."""

    def work() -> int:
        from rich.console import Console

        from tunecompile.cli.new_pass import load
        from tunecompile.verification.check_pass import check

        console, failed = Console(), 0
        for finding in check(*load(module)):
            failed += not finding.passed
            console.print(
                f"[{'green' if finding.passed else 'bold red'}]{'passed' if finding.passed else 'FAILED'}[/]  {escape(finding.said)}",
                highlight=False,
            )
        console.print(f"{failed} questions failed" if failed else "all passed")
        return 1 if failed else 0

    raise typer.Exit(guard(work))


def show_lines(lines: list, as_json: bool) -> None:
    """What the doctor found, with the mend below it."""
    import dataclasses
    import json

    from rich.console import Console
    from rich.table import Table

    if as_json:
        print(json.dumps([dataclasses.asdict(line) for line in lines], indent=1))
        return
    table, colors = (
        Table(box=None, pad_edge=False, show_header=False),
        {"ok": "green", "warning": "yellow", "fail": "bold red"},
    )
    for overflow in ("ellipsis", "ellipsis", "fold"):
        table.add_column(overflow=overflow)
    for line in lines:
        table.add_row(
            f"[{colors[line.status]}]{line.status}[/]",
            escape(line.name),
            escape(line.found) + (f"\n[bold]{escape(line.mend)}[/]" if line.mend else ""),
        )
    Console().print(table)


def conduct(comparison, finish=None) -> int:
    """Run a comparison with progress bars, write the reports, print a short table. Returns the exit code."""
    need_packages()
    from tunecompile.cli.compare.console import Bars, show_summary
    from tunecompile.cli.compare.render import write_reports
    from tunecompile.cli.compare.run import passed, run_comparison

    with Bars() as bars:
        import dataclasses

        result = run_comparison(dataclasses.replace(comparison, listen=bars.listen))
        if finish:
            finish(result, bars.listen)
    paths = write_reports(result, comparison.out)
    show_summary(result, paths)
    return 0 if passed(result) else 1


def conduct_against(against: Path | None, comparison) -> int:
    """Run a comparison beside an older result, where one is given: whether the two can be compared is known before anything runs."""
    if against is None:
        return conduct(comparison)
    need_packages()
    from tunecompile.cli.compare.against import check_like, compare_results
    from tunecompile.cli.compare.machine import describe_machine
    from tunecompile.cli.compare.result import load_result

    old = load_result(against)
    if against.resolve() == (comparison.out / "report.json").resolve():
        raise BadOption(
            option="--out",
            value=str(comparison.out),
            reason=f"the new report would stand in the place of {against}; give another folder",
        )
    check_like(against, old, comparison.job, comparison.model_name, describe_machine())

    def finish(result: dict, listen) -> None:
        result["against"] = {
            "path": str(against),
            "date": old["date"],
            "commit": old["commit"],
            "versions": old["versions"],
            "rows": compare_results(old, result),
        }

    return conduct(comparison, finish)


def repeat(against: Path | None, out: Path, context: typer.Context) -> int:
    """Measure again what an older result measured."""
    if against is None:
        raise BadOption(
            option="--model",
            value=None,
            reason="say what to train, or give --against an older report.json to repeat it",
        )
    given = [
        name
        for name in context.params
        if context.get_parameter_source(name).name == "COMMANDLINE" and name not in ("against", "out")
    ]
    if given:
        raise BadOption(
            option="--" + given[0].replace("_", "-"),
            value=context.params[given[0]],
            reason="without --model the old comparison is repeated as it was; give --model to choose anything else, too",
        )
    need_packages()
    from tunecompile.cli.compare.against import repeated
    from tunecompile.cli.compare.result import load_result
    from tunecompile.cli.compare.run import Comparison

    old = load_result(against)
    job, more = repeated(old)
    systems = resolve_systems(",".join(run["system"] for run in old["runs"]), False)
    return conduct_against(against, Comparison(systems, job, out, **more))


def show_plan(report, as_json: bool) -> None:
    from rich.console import Console

    from tunecompile.cli.plan_table import show

    if as_json:
        import json

        print(json.dumps(report.to_dict(), indent=1))
    else:
        console = Console()
        show(report, console if console.is_terminal else Console(width=180))


if __name__ == "__main__":
    app()
