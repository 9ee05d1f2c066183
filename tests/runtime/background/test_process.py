"""The process that generates code: it is started, answers, and may die."""

import copy
import time

import pytest
import torch
from torch._dynamo.utils import counters

import tunecompile
from tests.runtime.background.later import Generated, batch, stack, step
from tests.support.compare import assert_close
from tests.support.notes import find, has
from tunecompile.compiler.background import process

pytestmark = pytest.mark.filterwarnings("ignore")
PATIENCE = 240  #: seconds


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """No code of another test's."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    counters.clear()


def trained(model, reference) -> int:
    """Train until the region has changed over. Returns the number of steps."""
    until = time.monotonic() + PATIENCE
    for seed in range(10**6):
        assert_close(step(model, batch(seed=seed % 5)), step(reference, batch(seed=seed % 5)))
        if find(model, "changed-over", "not-from-background"):
            return seed + 1
        assert time.monotonic() < until, tunecompile.report(model)
        time.sleep(0.1)
    raise AssertionError


def test_a_training_without_a_stall(monkeypatch):
    """Catches code that this process generates, and keys that differ between the two."""
    model, made = stack(), Generated(monkeypatch)
    reference = copy.deepcopy(model)
    tunecompile.optimize(model, warmup="background")
    made_elsewhere = model._tunecompile.background.compiler._processes[0]
    steps = trained(model, reference)
    assert steps > 1
    assert (made.graphs, counters["inductor"]["fxgraph_cache_hit"]) == (0, 2)
    (note,) = find(model, "changed-over")
    assert note.fields["step"] == steps
    assert made_elsewhere.poll() is None
    tunecompile.restore(model)
    assert made_elsewhere.poll() is not None


def test_a_process_that_dies(monkeypatch):
    """Its code is made here. Catches a training that waits for it."""
    model, made = stack(), Generated(monkeypatch)
    reference = copy.deepcopy(model)
    tunecompile.optimize(model, warmup="background")
    compiler = model._tunecompile.background.compiler
    assert_close(step(model, batch()), step(reference, batch()))
    compiler._processes[0].kill()
    compiler._processes[0].wait()
    assert trained(model, reference) == 1
    assert made.graphs == 2
    assert has(model, "not-from-background", detail="its process ended")


def test_orders_of_a_process_that_died_do_not_wait_for_the_next_one():
    """Another layer may order code between a process's end and the next step."""
    compiler = process.BackgroundCompiler()
    first = compiler.order("first", b"no order")
    compiler._processes[0].kill()
    compiler._processes[0].wait()
    second = compiler.order("second", b"no order")
    assert "its process ended" in first.answer.error
    assert second.answer is None
    answered(compiler, [second])
    assert second.answer.error
    compiler.close()


def answered(compiler, jobs) -> None:
    """Wait until these are over."""
    until = time.monotonic() + PATIENCE
    while any(job.answer is None for job in jobs) and time.monotonic() < until:
        compiler.look()
        time.sleep(0.1)


@pytest.mark.slow
def test_several_processes_share_orders():
    """Each has one before any has two. Catches one that does all, and one that waits for nothing."""
    compiler = process.BackgroundCompiler()
    compiler.most = 2
    compiler.start()
    first = compiler._processes[0]
    jobs = [compiler.order(str(number), b"no order") for number in range(4)]
    assert [job.process is first for job in jobs] == [True, False, True, False]
    assert len(compiler._processes) == 2
    compiler._processes[1].kill()
    compiler._processes[1].wait()
    answered(compiler, jobs)
    assert ["its process ended" in job.answer.error for job in jobs] == [False, True, False, True]
    assert compiler.order("4", b"no order").process is first, "it has nothing else to do"
    ours = list(compiler._processes)
    compiler.close()
    assert all(each.poll() is not None for each in ours)


@pytest.mark.parametrize("cores, most", [(1, 1), (2, 1), (7, 1), (8, 2), (16, 3), (64, 3)])
def test_each_process_has_cores(monkeypatch, cores, most):
    monkeypatch.setattr(process, "cores", lambda: cores)
    assert process.BackgroundCompiler().most == most


def test_a_process_that_cannot_be_started(monkeypatch):
    """Catches an error of the training's."""
    monkeypatch.setattr("sys.executable", "/no/such/python")
    model, made = stack(), Generated(monkeypatch)
    reference = copy.deepcopy(model)
    tunecompile.optimize(model, warmup="background")
    assert trained(model, reference) == 2
    assert made.graphs == 2
    assert has(model, "not-from-background", detail="No such file")


@pytest.mark.slow
def test_settings_of_torch_reach_it(monkeypatch):
    """Codes' keys depend on them. Catches one that is not sent."""
    model, made = stack(), Generated(monkeypatch)
    reference = copy.deepcopy(model)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with torch._inductor.config.patch({"epilogue_fusion": False}):
            tunecompile.optimize(model, warmup="background")
            trained(model, reference)
    finally:
        torch.set_num_threads(threads)
    assert made.graphs == 0
