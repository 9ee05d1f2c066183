"""SFTTrainer and the plain loop train on the same rows in their own ways; both are measured, and an adapter survives."""

import json
import math
from pathlib import Path

import pytest
import torch

import tunecompile
from tunecompile.cli.compare import data, models, tasks
from tunecompile.cli.compare.progress import Progress
from tunecompile.cli.compare.shapes import save_shape_model
from tunecompile.cli.compare.spec import Job


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("model")
    save_shape_model("llama-tiny", str(made), seed=0, device="cpu", layers=1)
    rows = [{"prompt": "a few " * (i % 3 + 1), "completion": "words"} for i in range(24)]
    (made / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return made


@pytest.fixture(autouse=True)
def no_trace_of_the_trainer():
    """accelerate remembers the device of the first trainer in a process."""
    yield
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def job(folder):
    return Job(
        system="hf",
        model=str(folder),
        mode="lora",
        data=str(folder / "rows.jsonl"),
        steps=4,
        batch=4,
        seq_len=64,
        held_out=4,
        lr=1e-2,
        saved_bytes=True,
    )


def data_run(job):
    return tasks.data_run(job, Progress())


@pytest.mark.parametrize("trainer", ["sft", "loop"])
def test_a_run_is_measured_and_learns(job, trainer):
    run = data_run(job.replace(trainer=trainer))["runs"][0]
    assert run["status"] == "ok" and len(run["losses"]) == 4 and run["repeats"] == 1 and run["saved_bytes"] > 0
    assert run["held_out_after"] < run["held_out_before"]
    # every batch is padded to 64, and none of it is counted
    assert 0 < run["tokens_per_s"] * run["step_ms"]["median"] / 1e3 < 4 * 64


def test_checkpointing_keeps_less_and_changes_no_loss(job):
    plain, checkpointed = (data_run(job.replace(trainer="loop", checkpointing=on))["runs"][0] for on in (False, True))
    assert checkpointed["losses"] == plain["losses"] and checkpointed["saved_bytes"] < plain["saved_bytes"]


def test_answers_and_a_saved_adapter(job, tmp_path):
    job = job.replace(trainer="loop", questions=2, adapter=str(tmp_path / "adapter"))
    answers = data_run(job)["answers"]
    assert len(answers) == 2 and all(a["expected"] == "words" for a in answers)
    assert tasks.reload_adapter(job)["answers"] == [a["after"] for a in answers]


def test_the_held_out_loss_does_not_depend_on_the_batch_and_is_that_of_rows_nobody_trains_on(job, monkeypatch):
    seen = set()
    collate = data.collate

    def watching(examples, *rest):
        seen.update(tuple(example.input_ids) for example in examples)
        return collate(examples, *rest)

    runs = [data_run(job.replace(trainer="loop", batch=batch))["runs"][0] for batch in (2, 3, 4)]
    assert (
        runs[0]["held_out_before"]
        == pytest.approx(runs[1]["held_out_before"], abs=1e-5)
        == pytest.approx(runs[2]["held_out_before"], abs=1e-5)
    )
    rows = [{"text": "few " * number} for number in range(1, 13)]
    tokenizer = models.load_tokenizer(job)
    split = data.split_rows(rows, tokenizer, job)
    monkeypatch.setattr(data, "collate", watching)
    data.make_batches(split.train, tokenizer, job, 20)
    assert len(split.held_out) == 4 and not seen & {
        tuple(data.tokenise(row, tokenizer, job.model).input_ids) for row in split.held_out
    }


@pytest.mark.parametrize(("trainer", "kind"), [("sft", "prompt"), ("loop", "prompt"), ("loop", "text")])
def test_packed_rows_have_the_losses_of_padded_ones(job, trainer, kind, tmp_path):
    """The same documents in every step: neither attention nor the loss crosses from one into the next."""
    if kind == "text":  # the first token of each has a label
        (tmp_path / "rows.jsonl").write_text(
            "\n".join(json.dumps({"text": "few " * number}) for number in range(1, 13))
        )
        job = job.replace(data=str(tmp_path / "rows.jsonl"))
    padded, packed = (
        data_run(job.replace(trainer=trainer, batching=batching))["runs"][0] for batching in ("padded", "packed")
    )
    assert packed["losses"] == pytest.approx(padded["losses"], abs=1e-5) and packed["held_out_after"] == pytest.approx(
        padded["held_out_after"], abs=1e-5
    )
    counted = [run["tokens_per_s"] * run["step_ms"]["median"] for run in (padded, packed)]
    assert counted[0] == pytest.approx(counted[1])  # real tokens alone


def optimized_without_inductor(model, job):
    return tunecompile.optimize(model, executor="eager") if job.engine == "tunecompile" else model


@pytest.fixture
def pairs(job, tmp_path):
    rows = [
        {"prompt": "a few " * (number % 3 + 1), "chosen": "words", "rejected": "few few " * (number % 2 + 1)}
        for number in range(24)
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return job.replace(data=str(tmp_path / "pairs.jsonl"), loss="dpo")


@pytest.mark.parametrize("trainer", ["sft", "loop"])
def test_dpo_learns_pairs(pairs, trainer):
    run = data_run(pairs.replace(trainer=trainer, saved_bytes=False))["runs"][0]
    assert (
        run["losses"][0] == pytest.approx(math.log(2)) == pytest.approx(run["held_out_before"])
    )  # a fresh adapter is the reference
    assert run["losses"][-1] < run["losses"][0] and run["held_out_after"] < run["held_out_before"]


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["sft", "loop"])
def test_dpo_of_an_optimized_model_is_eagers(pairs, trainer, monkeypatch, tmp_path):
    """Losses of the training, and the gradients of one step; the reference's forward lies between the policy's and its backward."""
    monkeypatch.setattr(models, "apply_system", optimized_without_inductor)
    runs, gradients = [], []
    for system in ("hf", "tunecompile"):
        made = data_run(
            pairs.replace(trainer=trainer, system=system, saved_bytes=False, gradients=str(tmp_path / system))
        )
        runs.append(made["runs"][0])
        gradients.append(torch.load(tmp_path / system)["gradients"])
    assert made["report"]["compiles"] > 0 and runs[1]["losses"] == pytest.approx(runs[0]["losses"], abs=1e-5)
    assert all("lora" in name and gradient.any() for name, gradient in gradients[0].items())
    torch.testing.assert_close(gradients[1], gradients[0])


def test_trl_and_the_plain_loop_agree_about_dpo(pairs):
    """On the same batch, which is all there is."""
    rows = Path(pairs.data).read_text().splitlines()[:8]
    Path(pairs.data).write_text("\n".join(rows))
    sft, loop = (
        data_run(pairs.replace(trainer=trainer, saved_bytes=False, batch=4))["runs"][0]["losses"]
        for trainer in ("sft", "loop")
    )
    assert sft == pytest.approx(loop, abs=1e-5)
