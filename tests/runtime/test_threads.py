"""Models trained in threads of one process, each of which compiles while others run. torch's flags for that are the process's."""

import contextlib
import itertools
import threading

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.batches import padded
from tests.support.compare import assert_same_run
from tests.support.models.pairs import attending, of_plain_layers, pair
from tests.support.notes import fell_back
from tunecompile.runtime.layers.layer_slot import LayerSlot
from tunecompile.runtime.step.of_thread import of_thread

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


def test_a_step_while_another_thread_compiles(monkeypatch):
    """It is no compilation of this model by somebody else."""
    model, reference = pair(of_plain_layers)
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    assert_same_run(model, reference, lambda m: m(**zoo.batch()).loss)
    assert tunecompile.report(model).compiles and not tunecompile.report(model).notes


def test_a_step_while_another_thread_traces():
    """Compiled code refuses to be called then."""
    model, reference = pair(of_plain_layers)
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
    model, _ = pair(of_plain_layers)
    monkeypatch.setattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag", True, raising=False)
    tracing = getattr(torch.fx._symbolic_trace, "_is_fx_tracing_context", lambda on: contextlib.nullcontext())
    with tracing(True), pytest.raises(RuntimeError, match="symbolically trace"):  # torch 2.15: of this thread
        model(**zoo.batch())


def generated(model):
    ids = zoo.batch(length=6)["input_ids"]
    return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)


def scored(model):
    with torch.no_grad():
        return model(**zoo.batch(length=6)).logits


def scored_without_padding(model):
    with torch.no_grad():
        return model(**padded(seed=5), use_cache=False).logits


def trained(model, batch=padded):
    model.zero_grad()
    model(**batch(seed=9)).loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def trained_without_padding(model):
    return trained(model, zoo.batch)


TRAIN = [trained, trained_without_padding]
OTHERS = [generated, scored, scored_without_padding]


@pytest.mark.parametrize("outers, inners", [(TRAIN, OTHERS), (OTHERS, [trained])], ids=["train", "others"])
def test_another_thread_uses_the_model_between_two_layers(monkeypatch, outers, inners):
    """As asynchronous rollouts do: one trains. Neither sees the other's call, and layers go on being compiled."""
    model, reference = pair(lambda: attending(num_hidden_layers=3))
    run, found = LayerSlot._run, []
    trained(model)  # which says who trains

    def interrupt(place, inner):
        if place == 1 and threading.current_thread() is threading.main_thread() and not found:
            found.append(None)
            thread = threading.Thread(target=lambda: found.append(inner(model)))
            thread.start()
            thread.join()

    for outer, inner in itertools.product(outers, inners):

        def interrupted(slot, args, kwargs):
            interrupt(slot.place, inner)
            return run(slot, args, kwargs)

        expected = outer(reference), inner(reference)
        monkeypatch.setattr(LayerSlot, "_run", interrupted)
        for _ in range(3):
            found.clear()
            mine = outer(model)
            assert torch.allclose(mine, expected[0], atol=1e-5), (outer, inner)
            assert torch.allclose(found[1], expected[1], atol=1e-5), (outer, inner)
    assert not fell_back(model)
    (region,) = tunecompile.report(model).regions
    assert region.compiles <= 3, region


def test_what_is_known_of_a_call_is_its_threads_own():
    class Call:
        value = of_thread(0)

    call, seen = Call(), []
    call.value = 1

    def other():
        seen.append(call.value)  # the latest, as long as this thread has begun no call
        call.value = 2
        seen.append(call.value)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [1, 2] and call.value == 1 and Call.value == 0 and Call().value == 0
