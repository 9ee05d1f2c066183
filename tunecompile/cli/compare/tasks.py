"""What a worker's process does: train and measure one system on random tokens or on rows, or reload its adapter."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import tunecompile
from tunecompile.cli.compare import data, gradients, loops, meters, models, parallel, ranks
from tunecompile.cli.compare.progress import Progress, say
from tunecompile.cli.compare.spec import REFERENCE, Job, Shape, parse_shape
from tunecompile.errors import CannotEstimate, NotOptimized, TunecompileError, UsageError

OTHER_ROWS = 1000  #: difference between the seeds of two ranks' random rows


def run_task(task: str, job: Job, progress: Progress) -> dict:
    """The result of a task: train or reload."""
    if task == "reload":
        return reload_adapter(job)
    return random_runs(job, progress) if job.shapes else data_run(job, progress)


def random_runs(job: Job, progress: Progress) -> dict:
    """Train a shape model on random tokens, a run for each shape in this process."""
    with progress.on("load"):
        model = models.load_model(job)
        loops.enable_checkpointing(model, job)
        trained = wrapped(model, job)

    def batches(shape: str, seed: int, count: int) -> list[dict]:
        return data.random_batches(parse_shape(shape), model.config.vocab_size, job, seed, count)

    runs: list[dict] = []
    for shape in job.shapes:
        if runs:
            models.set_initial_adapter(model, job.draw)
        torch.manual_seed(job.draw)
        about = {"shape": shape, "seed": job.draw}
        rows = batches(shape, job.draw + OTHER_ROWS * ranks.rank(), job.steps)
        train = partial(loops.train_loop, trained, rows, job, shape)

        def kept(figures: dict, about: dict = about) -> None:
            progress.keep([*runs, about | figures])

        runs.append(about | guarded(partial(measured, model, job, train, progress, kept)))
        progress.keep(runs)
    if job.engine == "tunecompile" and job.gpus == 1 and job.saved_bytes:
        with progress.on("estimate"):  # last, as the first step must not profit from its measurements
            for run in runs:
                run |= predicted(model, job, parse_shape(run["shape"]))
    if job.gradients:
        gradients.dump_gradients(model.train(), batches(job.shapes[0], job.seed + 1, 1)[0], job, job.gradients)
    return {"runs": runs} | about_model(model, job)


def data_run(job: Job, progress: Progress) -> dict:
    """Train a model on the user's data, with questions before and after if the job has any."""
    tokenizer = models.load_tokenizer(job)
    split = data.split_rows(data.read_rows(str(job.data), job.loss), tokenizer, job)
    with progress.on("load"):
        model = models.load_model(job)
    held_out = data.held_out_batches(split.held_out, tokenizer, job)
    run = {"shape": job.shape, "seed": job.draw}
    if held_out:
        run["held_out_before"] = held_out_loss(model, held_out, job)
    asked = questions(split, job)
    answers = [{"before": text} for text in answer_all(model, tokenizer, asked, job)]

    if job.trainer == "loop":
        loops.enable_checkpointing(model, job)
    initial = gradients.snapshot(model) if job.gradients and job.mode == "full" else None
    trained = wrapped(model, job)

    def train() -> loops.Trained:
        torch.manual_seed(job.draw)
        if job.trainer == "sft":
            return loops.train_trl(model, tokenizer, split.train, job, "train")
        batches = data.make_batches(split.train, tokenizer, job, job.steps * job.processes)
        return loops.train_loop(trained, batches[ranks.rank() :: job.processes], job, "train")

    run |= measured(model, job, train, progress)
    if job.adapter:
        model.save_pretrained(job.adapter)
    if job.gradients:
        say("phase", text="gradient check")
        batch = data.make_batches(split.train, tokenizer, job, 1)[0]
        gradients.dump_gradients(model.train(), batch, job, job.gradients, initial)
    about = about_model(model, job)
    models.remove_system(model, job)  # what was learned is looked at by the same code under all systems
    if held_out:
        run["held_out_after"] = held_out_loss(model, held_out, job)
    for answer, row, text in zip(answers, asked, answer_all(model, tokenizer, asked, job)):
        expected = row.get("completion") or row["chosen"]
        answer |= {"question": text_of(row["prompt"]), "expected": text_of(expected), "after": text}
    rows = {"dropped_rows": split.dropped, "rows": len(split.train)}
    return rows | {"runs": [run], "answers": answers} | about


def wrapped(model: Any, job: Job) -> Any:
    """The model under its system and engine; trainers wrap it in the engine themselves."""
    models.apply_system(parallel.shard(model, job), job)
    return parallel.wrap(model, job) if job.trainer == "loop" else model


def about_model(model: Any, job: Job) -> dict:
    """What a result says of the model."""
    return {"attention": model.config._attn_implementation, "report": compiler_report(model, job)}


def measured(
    model: Any,
    job: Job,
    train: Callable[[], loops.Trained],
    progress: Progress,
    timed: Callable[[dict], None] = lambda figures: None,
) -> dict:
    """Train, then run the extra untimed steps that the other figures need.

    Args:
        model: the model.
        job: the job.
        train: the timed steps.
        progress: where the seconds are counted.
        timed: called with the figures of the timed steps, before the extra ones.
    """
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
    timed(figures)
    with progress.on("count"):
        return figures | counts(model, job, trained)


def counts(model: Any, job: Job, trained: loops.Trained) -> dict:
    """Kernel launches of a step and the bytes that it saves for backward, by extra steps of a single process."""
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
    say("phase", text=phase)
    try:
        return {name: measure()}
    except torch.OutOfMemoryError:
        say("phase", text=f"{phase}: not enough memory")
        return {}


def predicted(model: Any, job: Job, shape: Shape) -> dict:
    """Memory and time that `tunecompile.estimate` predicts for a step, beside the measured ones; GPU only."""
    if shape.padded or job.device != "cuda":
        return {}
    try:
        with models.precision(job):
            found = tunecompile.estimate(model, (shape.rows, shape.length))
    except CannotEstimate as error:
        return {"predicted": {"failed": str(error)}}
    return {"predicted": {"peak_gib": found.peak / meters.GIB, "step_ms": found.milliseconds}}


def held_out_loss(model: Any, batches: list[dict], job: Job) -> float:
    """The held-out loss in eval mode, whatever the batches: nats a labelled token, or DPO's loss a pair."""
    total = count = 0
    with models.evaluating(model), models.precision(job):
        for batch in batches:
            labels = batch["labels"]
            weight = len(labels) if job.loss == "dpo" else int((labels[:, 1:] != data.IGNORED).sum())
            total += float(loops.loss_of(model, loops.to_device(batch, job.device), job)) * weight
            count += weight
    return total / count


def answer_all(model: Any, tokenizer: Any, rows: list[dict], job: Job) -> list[str]:
    """Greedy answers to the prompts of rows."""
    texts = []
    for row in rows:
        ids = torch.tensor([data.render_prompt(row["prompt"], tokenizer, job.model)], device=job.device)
        pad, mask = tokenizer.pad_token_id, torch.ones_like(ids)
        how = dict(max_new_tokens=40, do_sample=False, use_cache=True, pad_token_id=pad)
        with models.evaluating(model), models.precision(job):
            out = model.generate(input_ids=ids, attention_mask=mask, **how)
        texts.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).strip())
    return texts


def questions(split: data.Split, job: Job) -> list[dict]:
    """The first held-out rows that have a prompt."""
    return [row for row in split.held_out if "prompt" in row][: job.questions]


def text_of(part: Any) -> str:
    """The text of a question or an answer: of its last message, where it has messages."""
    return part if isinstance(part, str) else part[-1]["content"]


def compiler_report(model: Any, job: Job) -> dict | None:
    """The report of tunecompile, if it is the system."""
    if job.engine != "tunecompile":
        return None
    try:
        return tunecompile.report(model).to_dict()
    except NotOptimized:  # TUNECOMPILE=0
        return None


def reload_adapter(job: Job) -> dict:
    """The answers of a plain model with the saved adapter, by plain PEFT."""
    from peft import PeftModel

    tokenizer = models.load_tokenizer(job)
    split = data.split_rows(data.read_rows(str(job.data), job.loss), tokenizer, job)
    model: Any = PeftModel.from_pretrained(models.load_base(job), str(job.adapter))
    return {"answers": answer_all(model, tokenizer, questions(split, job), job)}


def guarded(work: Callable[[], dict]) -> dict:
    """The result of the work. An error becomes the status of a row."""
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
