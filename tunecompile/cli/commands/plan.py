"""`tunecompile plan`: engines, memory and step time of a fine-tuning, without a GPU and without weights."""

from __future__ import annotations

import json as json_format
import warnings
from typing import Annotated, Optional

import typer
from rich.console import Console

from tunecompile.cli.commands import option_types as types
from tunecompile.cli.commands.option_types import of_machines, of_model, of_rows
from tunecompile.cli.options import exit_code, parse_budget, pick_mode, pick_rows
from tunecompile.cli.plan_table import show
from tunecompile.estimate import multi_gpu
from tunecompile.planner.datasheets import find_gpu


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="A folder, a config.json, a hub id whose config is in the local cache, or a shape such as "
            "llama-3.1-8b. No weights are read."
        ),
    ],
    qlora: types.QloraFlag = False,
    lora: Annotated[bool, of_model("--lora", help="LoRA over the base in bf16.")] = False,
    full: types.FullFlag = False,
    rank: Annotated[int, of_model(min=1, help="Rank of the adapters.")] = 16,
    batch: Annotated[
        Optional[int], of_rows(min=1, help="Rows a step on each GPU; 1 if neither this nor --global-batch is given.")
    ] = None,
    global_batch: Annotated[Optional[int], of_rows(min=1, help="Rows a step on all GPUs together.")] = None,
    seq_len: Annotated[int, of_rows(min=2, help="Tokens a row.")] = 2048,
    shared_prefix: Annotated[
        int, of_rows(min=0, help="Tokens that all rows of a GPU begin with, such as GRPO's prompt: computed once.")
    ] = 0,
    gpu: Annotated[
        str,
        of_machines(
            help="h200, h100, a100-80, l40s, rtx4090, ...; figures that differ from the datasheet follow: "
            "h100,memory=94GiB."
        ),
    ] = "h100",
    gpus: Annotated[int, of_machines(min=1, max=1024, help="GPUs of all machines.")] = 1,
    gpus_per_node: Annotated[int, of_machines(min=1, max=64, help="GPUs of one machine.")] = 8,
    network: Annotated[
        float, of_machines(min=0.1, help="Between machines: GB/s for each GPU, in one direction.")
    ] = 50.0,
    memory: Annotated[
        Optional[str],
        of_machines(help="As for optimize: memory that each GPU's process may use. Default: all of the GPU."),
    ] = None,
    host_memory: Annotated[
        Optional[str], of_machines(help="Host memory for activations, for each GPU. Default: 64GiB.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, not a table.")] = False,
) -> None:
    """Estimate memory and step time of a fine-tuning on given GPUs, without a GPU and without weights.

    The table compares engines (one GPU, DDP, FSDP2, device_map). One of those that fit is recommended.
    """

    def work() -> int:
        rows = pick_rows(batch, global_batch, gpus, gpus_per_node)
        question = multi_gpu.Question(
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
            shared_prefix=shared_prefix,
        )
        with warnings.catch_warnings():  # libraries warn about a model that is not run here
            warnings.simplefilter("ignore")
            report = multi_gpu.plan(question)
        show_plan(report, json)
        return 0

    raise typer.Exit(exit_code(work))


def show_plan(report: multi_gpu.PlanReport, as_json: bool) -> None:
    """Print the report as a table or as JSON."""
    if as_json:
        print(json_format.dumps(report.to_dict(), indent=1))
    else:
        console = Console()
        show(report, console if console.is_terminal else Console(width=180))
