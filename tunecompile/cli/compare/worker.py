"""One system in its own process: `python -m tunecompile.cli.compare.worker job.json result.json`.

Events for its parent are lines that begin with `@`; all other output is for the log.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunecompile.cli.compare.progress import Progress
from tunecompile.cli.compare.spec import REFERENCE, Job, Shape

if TYPE_CHECKING:  # transformers must not be imported before Unsloth
    from tunecompile.cli.compare.data import Split
    from tunecompile.cli.compare.loops import Trained

OTHER_ROWS = 1000  #: difference between the seeds of two ranks' random rows


def prepare_process(job: Job) -> None:
    """Import what the job needs, Unsloth before torch and transformers; a process that waits has that behind it."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")
    if job.engine == "unsloth":
        import unsloth  # noqa: F401
    with contextlib.suppress(Exception):  # the job raises it once more, as the status of its row
        import_packages(job)


def import_packages(job: Job) -> None:
    """Import the packages of a system, and its model's code."""
    import importlib

    from tunecompile.cli.compare import data, gradients, loops, models, parallel  # noqa: F401

    packages = ["peft"] * (job.mode != "full") + ["bitsandbytes"] * (job.mode == "qlora")
    engines = {"tunecompile": ["tunecompile.api"], "liger": ["liger_kernel.transformers"]}
    packages += engines.get(job.engine, [])
    for package in packages:
        importlib.import_module(package)
    if job.engine != "unsloth" and models.is_shape(job.model):
        from tunecompile.estimate.known_shapes import empty_model, shape_config

        empty_model(shape_config(job.model, job.layers))


def random_runs(job: Job, progress: Progress | None = None) -> dict:
    """Train a shape model on random tokens, a run for each shape in this process."""
    import torch

    from tunecompile.cli.compare import data, gradients, loops, models, parallel, ranks
    from tunecompile.cli.compare.spec import parse_shape

    progress = progress or Progress()
    with progress.on("load"):
        model = models.load_model(job)
        vocabulary = model.config.vocab_size
        loops.enable_checkpointing(model, job)
        models.apply_system(parallel.shard(model, job), job)
        trained = parallel.wrap(model, job)
    runs: list[dict] = []

    def run_of(shape: str) -> dict:
        torch.manual_seed(job.draw)
        seed = job.draw + OTHER_ROWS * ranks.rank()
        batches = data.random_batches(parse_shape(shape), vocabulary, job, seed, job.steps)
        about = {"shape": shape, "seed": job.draw}
        train = functools.partial(loops.train_loop, trained, batches, job, shape)

        def timed(figures: dict) -> None:
            progress.keep([*runs, about | figures])

        return about | guarded(lambda: measured(model, job, train, progress, timed))

    for shape in job.shapes:
        runs.append(run_of(shape))
        progress.keep(runs)
        if shape != job.shapes[-1]:
            models.set_initial_adapter(model, job.draw)
    if job.engine == "tunecompile" and job.gpus == 1 and job.saved_bytes:
        with progress.on("estimate"):  # last, as the first step must not profit from its measurements
            for run in runs:
                run |= predicted(model, job, parse_shape(run["shape"]))
    if job.gradients:
        batch = data.random_batches(parse_shape(job.shapes[0]), vocabulary, job, job.seed + 1, 1)[0]
        gradients.dump_gradients(model.train(), loops.to_device(batch, job.device), job, job.gradients)
    return {"runs": runs, "attention": model.config._attn_implementation, "report": compiler_report(model, job)}


def data_run(job: Job, progress: Progress | None = None) -> dict:
    """Train a model on the user's data, with questions before and after if the job has any."""
    import torch

    from tunecompile.cli.compare import data, gradients, loops, meters, models, parallel, ranks

    progress = progress or Progress()
    tokenizer = models.load_tokenizer(job)
    split = data.split_rows(data.read_rows(str(job.data), job.loss), tokenizer, job)
    with progress.on("load"):
        model = models.load_model(job)
    result: dict = {"dropped_rows": split.dropped, "rows": len(split.train)}
    held_out = data.held_out_batches(split.held_out, tokenizer, job)
    before = {"held_out_before": held_out_loss(model, held_out, job)} if held_out else {}
    asked = questions(split, job)
    answers = [{"before": text} for text in answer_all(model, tokenizer, asked, job)]

    if job.trainer == "loop":
        loops.enable_checkpointing(model, job)
    initial = gradients.snapshot(model) if job.gradients and job.mode == "full" else None
    models.apply_system(parallel.shard(model, job), job)
    trained = parallel.wrap(model, job) if job.trainer == "loop" else model  # trainers wrap it themselves

    def train() -> loops.Trained:
        torch.manual_seed(job.draw)
        if job.trainer == "sft":
            return loops.train_trl(model, tokenizer, split.train, job, "train")
        batches = data.make_batches(split.train, tokenizer, job, job.steps * job.processes)
        return loops.train_loop(trained, batches[ranks.rank() :: job.processes], job, "train")

    run = {"shape": job.shape, "seed": job.draw} | before | measured(model, job, train, progress)
    if held_out:
        run["held_out_after"] = held_out_loss(model, held_out, job)
    for answer, row, text in zip(answers, asked, answer_all(model, tokenizer, asked, job)):
        answer |= {"question": question_of(row), "expected": answer_of(row), "after": text}
    if job.adapter:
        model.save_pretrained(job.adapter)
    if job.gradients:
        meters.say("phase", text="gradient check")
        batch = data.make_batches(split.train, tokenizer, job, 1)[0]
        gradients.dump_gradients(model.train(), loops.to_device(batch, job.device), job, job.gradients, initial)
    return result | {
        "runs": [run],
        "answers": answers,
        "attention": model.config._attn_implementation,
        "report": compiler_report(model, job),
    }


def measured(
    model: Any,
    job: Job,
    train: Callable[[], Trained],
    progress: Progress | None = None,
    timed: Callable[[dict], None] | None = None,
) -> dict:
    """Train, then run the extra untimed steps that the other figures need.

    Args:
        model: the model.
        job: the job.
        train: the timed steps.
        progress: where the seconds are counted.
        timed: called with the figures of the timed steps, before the extra ones.
    """
    from tunecompile.cli.compare import meters, ranks

    progress = progress or Progress()
    meters.reset_memory(job.device)
    with progress.on("train"):
        trained = train()
        figures = ranks.together(trained.clock.figures() | meters.memory_figures(job.device), job)
    if (report := compiler_report(model, job)) and report["memory"]:
        # before the extra steps, which need more memory: they offload nothing while saved tensors are counted
        figures["memory"] = report["memory"]
    # ZeRO-3 leaves a shard with the number of all values
    figures["trainable"] = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters() if p.requires_grad)
    figures["status"] = "ok"
    if timed is not None:
        timed(figures)
    with progress.on("count"):
        return figures | counts(model, job, trained)


def counts(model: Any, job: Job, trained: Trained) -> dict:
    """Kernel launches of a step and the bytes that it saves for backward, by extra steps of a single process."""
    from tunecompile.cli.compare import meters

    figures: dict = {}
    counted = job.engine != REFERENCE and job.gpus == 1
    if counted and job.launches and job.device == "cuda":
        figures |= more("launches_per_step", "counting launches", lambda: meters.count_launches(trained.step))
    if counted and job.saved_bytes:  # last: under a budget, the memory held here may lead to another plan
        figures |= more(
            "saved_bytes",
            "measuring the bytes saved for backward",
            lambda: meters.count_saved_bytes(model, lambda: trained.forward(trained.batch)),
        )
        model.zero_grad(set_to_none=True)
    return figures


def more(name: str, phase: str, measure: Callable[[], int]) -> dict:
    """A figure of an untimed step; none if that step needs more memory than there is.

    Under a budget nothing is offloaded while saved tensors are counted.
    """
    import torch

    from tunecompile.cli.compare import meters

    meters.say("phase", text=phase)
    try:
        return {name: measure()}
    except torch.OutOfMemoryError:
        meters.say("phase", text=f"{phase}: not enough memory")
        return {}


def predicted(model: Any, job: Job, shape: Shape) -> dict:
    """Memory and time that `tunecompile.estimate` predicts for a step, beside the measured ones; GPU only."""
    import tunecompile
    from tunecompile.cli.compare.meters import GIB
    from tunecompile.cli.compare.models import precision
    from tunecompile.errors import CannotEstimate

    if shape.padded or job.device != "cuda":
        return {}
    try:
        with precision(job):
            found = tunecompile.estimate(model, (shape.rows, shape.length))
    except CannotEstimate as error:
        return {"predicted": {"failed": str(error)}}
    return {"predicted": {"peak_gib": found.peak / GIB, "step_ms": found.milliseconds}}


def held_out_loss(model: Any, batches: list[dict], job: Job) -> float:
    """The held-out loss in eval mode, whatever the batches: nats a labelled token, or DPO's loss a pair."""
    from tunecompile.cli.compare.data import IGNORED
    from tunecompile.cli.compare.loops import to_device
    from tunecompile.cli.compare.losses import loss_of
    from tunecompile.cli.compare.models import evaluating, precision

    with evaluating(model), precision(job):
        counts = [
            len(batch["labels"]) if job.loss == "dpo" else int((batch["labels"][:, 1:] != IGNORED).sum())
            for batch in batches
        ]
        return sum(
            float(loss_of(model, to_device(batch, job.device), job)) * count for batch, count in zip(batches, counts)
        ) / sum(counts)


def answer_all(model: Any, tokenizer: Any, rows: list[dict], job: Job) -> list[str]:
    """Greedy answers to the prompts of rows."""
    import torch

    from tunecompile.cli.compare.data import render_prompt
    from tunecompile.cli.compare.models import evaluating, precision

    texts = []
    for row in rows:
        ids = torch.tensor([render_prompt(row["prompt"], tokenizer, job.model)], device=job.device)
        with evaluating(model), precision(job):
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=40,
                do_sample=False,
                use_cache=True,
                pad_token_id=tokenizer.pad_token_id,
            )
        texts.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).strip())
    return texts


def questions(split: Split, job: Job) -> list[dict]:
    """The first held-out rows that have a prompt."""
    return [row for row in split.held_out if "prompt" in row][: job.questions]


def question_of(row: dict) -> str:
    """The text of a row's question."""
    return row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]


def answer_of(row: dict) -> str:
    """The text of a row's answer."""
    answer = row.get("completion") or row["chosen"]
    return answer if isinstance(answer, str) else answer[-1]["content"]


def compiler_report(model: Any, job: Job) -> dict | None:
    """The report of tunecompile, if it is the system."""
    if job.engine != "tunecompile":
        return None
    import tunecompile
    from tunecompile.errors import NotOptimized

    try:
        return tunecompile.report(model).to_dict()
    except NotOptimized:  # TUNECOMPILE=0
        return None


def reload_adapter(job: Job, _: Progress | None = None) -> dict:
    """The answers of a plain model with the saved adapter, by plain PEFT."""
    from peft import PeftModel

    from tunecompile.cli.compare import data, models

    tokenizer = models.load_tokenizer(job)
    split = data.split_rows(data.read_rows(str(job.data), job.loss), tokenizer, job)
    model = PeftModel.from_pretrained(models.load_base(job), job.adapter)
    return {"answers": answer_all(model, tokenizer, questions(split, job), job)}


def guarded(work: Callable[[], dict]) -> dict:
    """The result of the work. An error becomes the status of a row."""
    import torch

    from tunecompile.errors import TunecompileError, UsageError

    try:
        return work()
    except torch.cuda.OutOfMemoryError:
        traceback.print_exc()
        return {"status": "oom"}
    except TunecompileError as error:
        traceback.print_exc()
        return {"status": f"error: {error}"} | ({"user_error": str(error)} if isinstance(error, UsageError) else {})
    except Exception as error:  # whatever a system raises is the status of its row
        traceback.print_exc()
        message = next(iter(str(error).strip().splitlines()), "")
        return {"status": f"error: {type(error).__name__}: {message}"}


def main(job_path: str, result_path: str) -> None:
    """Run the job of a file, and write its result to another file."""
    spec = json.loads(Path(job_path).read_text())
    task = spec.pop("task", "train")
    job = Job(**spec)
    from tunecompile.cli.compare import ranks

    progress = Progress(Path(result_path) if ranks.rank() == 0 else None)
    with progress.on("import"):
        prepare_process(job)
    from tunecompile.cli.compare.meters import say, wait_for_start

    wait_for_start()
    say("phase", text="loading")
    started = time.perf_counter()
    tasks = {"train": random_runs if job.shapes else data_run, "reload": reload_adapter}
    with ranks.group(job):
        result = guarded(lambda: tasks[task](job, progress))
        failed = any(row.get("status", "ok") != "ok" for row in (result, *result.get("runs", [])))
        if ranks.rank() == 0 or failed:
            progress.path = Path(result_path)
            progress.write(result | {"seconds": time.perf_counter() - started})
        if failed and job.processes > 1:
            os._exit(1)  # torchrun ends the other ranks, which wait for this one


if __name__ == "__main__":
    main(*sys.argv[1:3])
