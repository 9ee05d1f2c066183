"""A few real steps of a tiny model: through a worker process, and through a whole comparison without a compiler."""

import json
import sys
import time
from importlib import metadata

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.comparisons import run as made_up
from tests.support.models import packed
from tunecompile.cli.compare import meters, models, processes, tasks, worker
from tunecompile.cli.compare.processes import LEFT_OUT, Worker, run_workers
from tunecompile.cli.compare.progress import Progress
from tunecompile.cli.compare.request import Comparison
from tunecompile.cli.compare.run import run_comparison
from tunecompile.cli.compare.spec import SYSTEMS, Job, System

TINY = Job(system="hf", model="llama-tiny", trainer="loop", shapes=("2x32",), steps=4, layers=2)


def test_a_worker_measures_and_talks(tmp_path):
    heard = []
    job = TINY.replace(gradients=str(tmp_path / "g.pt"))
    result = run_workers([Worker(job, tmp_path, lambda *event: heard.append(event), turns=True)])[0]
    run = result["runs"][0]
    assert run["status"] == "ok" and run["shape"] == "2x32" and run["repeats"] == 1
    assert len(run["losses"]) == 4 and run["saved_bytes"] > 0 and run["peak_gib"] > 0
    assert [fields["step"] for _, event, fields in heard if event == "step"] == [1, 2, 3, 4]
    gradients = torch.load(tmp_path / "g.pt")["gradients"]
    assert len(gradients) == 28 and all(g.norm() > 0 for g in gradients.values())


def test_figures_of_steps_outlive_what_does_not_fit_beside_them(monkeypatch):
    """A step that fits under a budget may not, where what it saves is counted and so stays on the GPU."""

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 896.00 MiB")

    monkeypatch.setattr(meters, "count_saved_bytes", full)
    (run,) = tasks.random_runs(TINY, Progress())["runs"]
    assert run["status"] == "ok" and len(run["losses"]) == 4 and "saved_bytes" not in run


def test_what_ended_is_handed_on_before_the_rest_is_cut_off(tmp_path, monkeypatch):
    """Time is up while the third system runs: its turn raises."""
    turns = iter([False, False])
    monkeypatch.setattr(Worker, "start", lambda worker: None)
    monkeypatch.setattr(Worker, "waits", lambda worker: next(turns))
    monkeypatch.setattr(Worker, "read_result", lambda worker: {"runs": [made_up(worker.job.system, 100.0, 0.5)]})
    kept = []
    systems = [SYSTEMS[name] for name in ("hf", "compile", "tunecompile")]
    with pytest.raises(StopIteration):
        run_comparison(Comparison(systems, TINY.replace(shapes=("4x64",)), tmp_path, check=False, keep=kept.append))
    assert [[run["system"] for run in part["runs"]] for part in kept] == [["hf"], ["hf", "compile"]]
    assert [part["incomplete"] for part in kept] == [["compile", "tunecompile"], ["tunecompile"]]


GO = 'print("@turn {}", flush=True)\nsys.stdin.readline()\n'


@pytest.fixture
def scripted(tmp_path, monkeypatch):
    """Workers of two shapes that run a script in place of the worker's module."""
    monkeypatch.setattr(processes, "LEAST_S", 0.2)

    def make(script, **options):
        (tmp_path / "script.py").write_text(
            "import json, sys, time, pathlib\n_, module, job, path = sys.argv\npath = pathlib.Path(path)\n"
            'run = {"shape": "2x32", "status": "ok"}\n' + script
        )
        monkeypatch.setattr(processes.ranks, "command", lambda job: [sys.executable, str(tmp_path / "script.py")])
        jobs = [TINY.replace(system=name, shapes=("2x32", "1x64")) for name in ("hf", "compile")]
        return [Worker(job, tmp_path, lambda *_: None, False, **options) for job in jobs]

    return make


def test_rows_are_kept_where_the_seconds_end_first(scripted):
    """Its second shape hangs, and the other system would follow."""
    workers = scripted(
        GO + 'path.write_text(json.dumps({"runs": [run]}))\nprint("@kept {}", flush=True)\ntime.sleep(60)'
    )
    parts = []
    first, second = run_workers(workers, ended=parts.append, deadline=time.monotonic() + 2)
    assert [run["status"] for run in first["runs"]] == ["ok", LEFT_OUT] and first["runs"][1]["shape"] == "1x64"
    assert second == {"status": LEFT_OUT}
    assert [len(part[0]["runs"]) for part in parts] == [1, 2]


def test_the_file_of_an_earlier_run_is_no_result(scripted, tmp_path):
    workers = scripted("sys.exit(3)")
    (tmp_path / "hf-train-2-layers.result.json").write_text('{"runs": [], "seconds": 1}')
    assert all("exit code 3" in result["status"] for result in run_workers(workers))


def test_processes_that_are_started_ahead_wait_for_each_other(scripted, tmp_path):
    script = (
        'log = open(path.parent / "log", "a")\nprint(module, "begins", file=log, flush=True)\n'
        + GO
        + 'time.sleep(0.1)\nprint("ends", file=log, flush=True)\n'
        'path.write_text(json.dumps({"runs": [run], "seconds": 1}))'
    )
    workers = scripted(script)
    for each in workers:
        each.start()
    assert workers[1].waits()  # before the first may go
    turns = [workers[1].waits, lambda: True]
    workers[1].waits = lambda: turns.pop()()
    assert [result["seconds"] for result in run_workers(workers)] == [1, 1]
    assert [line.split()[-1] for line in (tmp_path / "log").read_text().splitlines()] == [
        "begins",
        "begins",
        "ends",
        "ends",
    ]


@pytest.mark.slow
def test_eager_against_itself_passes_every_check_of_the_shallow_model(tmp_path, monkeypatch):
    """TUNECOMPILE=0 makes the optimized system eager: the comparison's own noise is nil."""
    monkeypatch.setenv("TUNECOMPILE", "0")
    job = TINY.replace(layers=None, saved_bytes=False)
    absent = System("liger", "liger", package="a_package_that_nobody_has")
    result = run_comparison(
        Comparison(
            [SYSTEMS["hf"], absent, SYSTEMS["tunecompile"], SYSTEMS["tunecompile-fp8"]], job, tmp_path, turns=True
        )
    )
    assert [r["status"] for r in result["runs"]] == ["ok", "not installed", "ok", "ok"]
    assert [r["version"] for r in result["runs"]] == [
        metadata.version("transformers"),
        None,
        tunecompile.__version__,
        tunecompile.__version__,
    ]
    assert result["runs"][1]["install"] == "pip install a-package-that-nobody-has"
    assert result["runs"][0]["losses"] == result["runs"][2]["losses"] and [
        row["largest"] for row in result["curves"]
    ] == [0, 0]
    assert len(result["reduced_gradients"]) == 28
    assert len(result["gradients"]) == 28
    assert all(r["error"] == r["eager_error"] < 1e-5 for r in result["gradients"])
    assert all(v["passed"] for v in result["verdicts"] if "time" not in v["name"]), result["verdicts"]


@pytest.mark.slow
def test_a_second_process_finds_the_caches_of_the_first(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNECOMPILE", "0")  # what is cached does not matter here
    seen = []
    start = Worker.start
    monkeypatch.setattr(
        Worker, "start", lambda self: (seen.append((self.job.system, self.job.steps, self.caches)), start(self))[1]
    )
    job = TINY.replace(saved_bytes=False)
    result = run_comparison(Comparison([SYSTEMS["hf"], SYSTEMS["tunecompile"]], job, tmp_path, check=False, warm=True))
    (_, _, none), (_, _, first), (name, steps, second) = seen
    assert none is None and name == "tunecompile" and steps == 1 and first == second is not None
    plain, ours = result["runs"]
    assert ours["first_step_warm_s"] > 0 and "first_step_warm_s" not in plain and ours["repeats"] == 1


def test_what_a_system_raises_is_its_row(tmp_path, monkeypatch):
    """Also where its packages could not be imported before its turn."""
    monkeypatch.setattr(worker, "import_packages", lambda job: 1 / 0)
    monkeypatch.setattr(worker, "wait_to_go", lambda: None)
    spec, out = tmp_path / "job.json", tmp_path / "out.json"
    spec.write_text(json.dumps(TINY.replace(device="nowhere").to_dict()))
    worker.main(spec, out)
    assert json.loads(out.read_text())["status"].startswith("error: RuntimeError")


@pytest.fixture
def quantised():
    return models.load_model(TINY)


def test_the_reference_holds_the_dequantised_values(quantised):
    reference = models.load_model(TINY.replace(system="reference"))
    path = "base_model.model.model.layers.1.mlp.up_proj.base_layer"
    held = reference.get_submodule(path).weight
    import bitsandbytes as bnb

    weight = quantised.get_submodule(path).weight
    assert held.dtype == torch.float64
    assert torch.equal(held.float(), bnb.functional.dequantize_4bit(weight.data, weight.quant_state))


def test_rows_that_share_a_block_have_their_values_in_the_reference():
    """On a CPU with AVX512 bitsandbytes gives such rows each other's scales."""
    model, dense = packed.exact_pair()
    path = "base_model.model.model.layers.0.mlp.down_proj.base_layer"
    held = models.to_reference(model, torch.float64).get_submodule(path).weight
    assert torch.equal(held, dense.get_submodule(path).weight.double())


def test_experts_in_4_bits_have_their_values_and_adapters_in_the_reference():
    """bitsandbytes gives memory as it was in fp64, and PEFT leaves one of two adapters out."""
    job = TINY.replace(model="mixture-tiny", layers=1, experts=True, dtype="float32")
    model, reference = models.load_model(job), models.load_model(job.replace(system="reference"))
    loss, got = zoo.step(tunecompile.optimize(model, executor="eager"), zoo.batch())
    with models.precision(job.replace(system="reference")):
        value, true = zoo.step(reference, zoo.batch())
    assert value.dtype == torch.float64 and abs(value - loss) < 1e-5
    assert len(true) == sum("lora_" in name for name, _ in model.named_parameters())
    assert max(zoo.errors(got, true, 1e-3).values()) < 1e-4


def test_the_reference_computes_in_fp64_where_model_code_asks_for_fp32():
    reference = models.load_model(TINY.replace(system="reference"))
    seen = []
    layer = reference.get_submodule("base_model.model.model.layers.0.input_layernorm")
    layer.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    with models.precision(TINY.replace(system="reference")):
        loss = reference(input_ids=torch.tensor([[5, 6, 7]]), labels=torch.tensor([[5, 6, 7]])).loss
    assert seen == [torch.float64] and loss.dtype == torch.float64


def test_evaluation_leaves_training_as_it_was(quantised):
    """bitsandbytes repacks weights at the first evaluation on some CPUs, and what is packed passes no gradient."""
    ids = torch.tensor([[5, 6, 7, 8]])

    def gradient():
        quantised.train().zero_grad(set_to_none=True)
        models.set_initial_adapter(quantised, 0, b_scale=0.01)
        quantised(input_ids=ids, labels=ids).loss.backward()
        return {name: p.grad.clone() for name, p in quantised.named_parameters() if p.requires_grad}

    before = gradient()
    with models.evaluating(quantised):
        quantised(input_ids=ids)
    after = gradient()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_saved_bytes_count_storages_once_and_parameters_never():
    linear = torch.nn.Linear(8, 8, bias=False)
    x = torch.randn(4, 8, requires_grad=True)
    # x is saved by the product and twice by the square (as a view of one storage); the weight is a parameter
    assert meters.count_saved_bytes(linear, lambda: (linear(x) + x.view(8, 4).square().view(4, 8)).sum()) == x.nbytes
