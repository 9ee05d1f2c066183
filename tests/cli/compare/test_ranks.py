"""Several processes for one system: what they measured becomes one row, and each has rows of its own."""

import importlib.util
import sys

import pytest
import torch

from tunecompile.cli.compare import data, models, ranks
from tunecompile.cli.compare.loops import loss_of
from tunecompile.cli.compare.request import Comparison, check_request
from tunecompile.cli.compare.run import run_comparison
from tunecompile.cli.compare.shapes import places
from tunecompile.cli.compare.spec import SYSTEMS, Job, parse_shape
from tunecompile.cli.compare.tasks import OTHER_ROWS
from tunecompile.errors import BadOption

JOB = Job(system="hf", model="llama-tiny", mode="lora", trainer="loop", shapes=("2x16",), steps=4, layers=1, gpus=2)


def figures(ms, tokens, loss, peak):
    return {
        "step_ms": {"median": ms},
        "tokens_per_s": tokens / ms * 1e3,
        "losses": [loss],
        "first_step_s": ms,
        "peak_gib": peak,
        "peak_reserved_gib": None,
    }


def test_the_slowest_ranks_pace_the_fullest_ones_memory(monkeypatch):
    every = [figures(100.0, 30, 2.0, 1.0), figures(200.0, 50, 3.0, 0.5)]
    monkeypatch.setattr("torch.distributed.all_gather_object", lambda into, own: into.__setitem__(slice(None), every))
    whole = ranks.together(every[0], JOB)
    assert (
        whole["tokens_per_s"] == pytest.approx(80 / 0.2)
        and whole["losses"] == [2.5]
        and whole["peak_gib"] == 1.0
        and whole["first_step_s"] == 200.0
    )
    assert ranks.together(every[0], JOB.replace(gpus=1)) is every[0]


def test_one_process_needs_no_torchrun():
    assert ranks.command(JOB.replace(gpus=1)) == ranks.command(JOB.replace(parallel="device_map")) == [
        sys.executable,
        "-m",
    ] and "--nproc-per-node" in ranks.command(JOB)


def test_equal_shares_of_layers_under_a_device_map():
    where = places(5, "cuda", 2)
    assert [where[f"model.layers.{layer}"] for layer in range(5)] == ["cuda:0"] * 3 + ["cuda:1"] * 2 and where[
        "lm_head"
    ] == "cuda:1"
    assert places(5, "cuda", 1) == {"": "cuda"} and places(5, "cpu", 2) == {"": "cpu"}


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"gpus": 4096}, "4096"),
        ({"parallel": "fsdp2", "trainer": "sft"}, "loop"),
        (
            {"parallel": "zero3", "shapes": ("2x16", "2x32")},
            "one shape" if importlib.util.find_spec("deepspeed") else "pip install deepspeed",
        ),
    ],
)
def test_what_cannot_be_joined_is_said_before_anything_runs(changes, said, tmp_path):
    pytest.importorskip("peft")
    with pytest.raises(BadOption, match=said):
        check_request(Comparison([SYSTEMS["hf"]], JOB.replace(**changes), tmp_path))


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2", "zero3", "alone"])
@pytest.mark.slow
def test_two_processes_make_one_row(parallel, tmp_path):
    pytest.importorskip("peft")
    if parallel == "zero3" and not importlib.util.find_spec("deepspeed"):
        pytest.skip("deepspeed is not installed")
    made = run_comparison(Comparison([SYSTEMS["hf"]], JOB.replace(parallel=parallel), tmp_path, check=False))["runs"][0]
    model = models.load_model(JOB.replace(gpus=1)).train()
    rows = [
        data.random_batches(parse_shape("2x16"), model.config.vocab_size, JOB, OTHER_ROWS * rank, 1)[0]
        for rank in range(2)
    ]
    alone = [float(loss_of(model, batch, JOB).detach()) for batch in rows]
    assert made["status"] == "ok" and made["parallel"] == parallel and len(made["losses"]) == 4
    assert made["losses"][0] == pytest.approx(sum(alone) / 2, rel=1e-5) and alone[0] != alone[1]


@pytest.mark.slow
@pytest.mark.parametrize("system", ["hf", "compile-layers"])
def test_a_model_over_several_devices_is_one_process(system, tmp_path):
    pytest.importorskip("peft")
    on_two, on_one = (
        run_comparison(
            Comparison([SYSTEMS[system]], JOB.replace(**changes), tmp_path / str(changes["gpus"]), check=False)
        )["runs"][0]
        for changes in ({"gpus": 2, "parallel": "device_map"}, {"gpus": 1})
    )
    assert (
        on_two["status"] == "ok"
        and on_two["parallel"] == "device_map"
        and on_two["losses"] == pytest.approx(on_one["losses"], rel=1e-4)
    )


@pytest.mark.gpu
def test_a_shape_model_over_two_gpus_has_one_gpus_weights():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    batch = data.random_batches(parse_shape("2x16"), 2048, JOB, 0, 1)[0]
    made = [
        models.load_model(JOB.replace(parallel="device_map", gpus=gpus, device="cuda", mode="qlora", layers=None))
        for gpus in (2, 1)
    ]
    assert {p.device.index for p in made[0].parameters()} == {0, 1}
    losses = [
        float(loss_of(model, {name: value.cuda() for name, value in batch.items()}, JOB).detach()) for model in made
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
