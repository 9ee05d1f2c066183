"""Models trained in threads of one process, each of which compiles while others run. torch's flags for that are the process's."""

import contextlib
import threading

import pytest
import torch
from torch import nn

import tunecompile
from tests.support import zoo
from tests.support.compare import assert_same_run
from tests.support.models.pairs import pair
from tests.support.notes import fell_back

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


def train(model: nn.Module, losses: list) -> None:
    for rows in (2, 3):
        loss = model(**zoo.batch(seed=rows, rows=rows)).loss
        loss.backward()
        losses.append(loss.item())


@pytest.mark.slow
def test_two_models_in_two_threads():
    models = [pair(lambda: zoo.make(family, num_hidden_layers=2)) for family in ("llama", "qwen3")]
    losses: dict = {m: [] for both in models for m in both}
    threads = [threading.Thread(target=train, args=(model, losses[model])) for model, _ in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for model, reference in models:
        train(reference, losses[reference])
        assert losses[model] == pytest.approx(losses[reference], rel=1e-5)
        ours, theirs = ({n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m in (model, reference))
        assert max(zoo.errors(ours, theirs).values()) < 1e-4
        assert not tunecompile.report(model).notes


def test_a_step_while_another_thread_compiles(monkeypatch):
    """It is no compilation of this model by somebody else."""
    model, reference = pair()
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    assert_same_run(model, reference, lambda m: m(**zoo.batch()).loss)
    assert tunecompile.report(model).compiles and not tunecompile.report(model).notes


def test_a_step_while_another_thread_traces():
    """Compiled code refuses to be called then."""
    model, reference = pair()
    assert_same_run(model, reference, lambda m: m(**zoo.batch()).loss)
    begun = threading.Event()

    def compile_slowly():
        with torch._dynamo.convert_frame.compile_lock:
            torch.fx._symbolic_trace._is_fx_tracing_flag = True
            begun.set()
            threading.Event().wait(0.3)
            torch.fx._symbolic_trace._is_fx_tracing_flag = False

    thread = threading.Thread(target=compile_slowly)
    thread.start()
    begun.wait()
    assert_same_run(model, reference, lambda m: m(**zoo.batch()).loss)
    thread.join()
    assert not fell_back(model)


def test_a_model_that_the_user_traces(monkeypatch):
    """As torch.compile does: refused at once."""
    model, _ = pair()
    monkeypatch.setattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag", True, raising=False)
    tracing = getattr(torch.fx._symbolic_trace, "_is_fx_tracing_context", lambda on: contextlib.nullcontext())
    with tracing(True), pytest.raises(RuntimeError, match="symbolically trace"):  # torch 2.15: of this thread
        model(**zoo.batch())
