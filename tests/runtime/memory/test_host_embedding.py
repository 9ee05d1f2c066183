"""Embedding tables in host memory: which may go there, and that nobody who reads them sees a difference."""

import copy
import gc

import pytest
import torch
from torch import nn

import tunecompile
from tests.support import zoo
from tests.support.compare import assert_equal
from tests.support.models.pairs import attending
from tests.support.notes import codes, has
from tunecompile.runtime.memory import host_embedding
from tunecompile.runtime.memory.host_embedding import HostEmbeddings, tables

pytest.importorskip("transformers")
pytest.importorskip("peft")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(host_embedding, "SMALLEST", 1)


def test_frozen_tables_that_nothing_else_reads():
    model = zoo.adapt(zoo.make("llama", tie_word_embeddings=False))
    (moved,), notes = tables(model)
    assert moved[0].endswith("embed_tokens.weight") and moved[1] is model.get_input_embeddings().weight and not notes


@pytest.mark.parametrize(
    "why, build",
    [
        ("table-trained", lambda: zoo.make("llama", tie_word_embeddings=False)),
        ("table-shared", lambda: zoo.adapt(zoo.make("llama", tie_word_embeddings=True))),
        (
            "table-renormalises",
            lambda: nn.Sequential(nn.Embedding(8, 4, max_norm=1.0)).requires_grad_(False),
        ),
        ("no-embedding", lambda: nn.Linear(2, 2)),
    ],
)
def test_others_stay_and_the_report_says_why(why, build):
    model = build()
    moved, notes = tables(model)
    assert not moved and why in codes(notes)
    tunecompile.optimize(model, host_embedding=True, executor="eager")
    assert why in codes(model)


def test_a_cpu_has_nothing_to_move():
    model, plain = (zoo.adapt(attending(tie_word_embeddings=False)) for _ in range(2))
    where = model.get_input_embeddings().weight.data_ptr()
    tunecompile.optimize(model, host_embedding=True, executor="eager")
    assert_equal(zoo.step(model, zoo.batch()), zoo.step(tunecompile.optimize(plain, executor="eager"), zoo.batch()))
    assert model.get_input_embeddings().weight.data_ptr() == where


@pytest.mark.slow
def test_an_estimate_leaves_them_out():
    model = zoo.adapt(zoo.make("llama", tie_word_embeddings=False))
    table = model.get_input_embeddings().weight.nbytes
    weights = [tunecompile.estimate(model, (2, 16), host_embedding=asked).weights for asked in (None, False, True)]
    assert weights[0] == weights[1] == weights[2] + table
    assert tunecompile.estimate(tunecompile.optimize(model, host_embedding=True), (2, 16)).weights == weights[2]


@pytest.mark.gpu
@pytest.mark.parametrize("late", [False, True])
def test_the_same_step_with_less_on_the_gpu(late):
    vocabulary = 32000
    model = zoo.adapt(
        zoo.make("llama", vocab_size=vocabulary, hidden_size=512, tie_word_embeddings=False).to(
            "cpu" if late else "cuda", torch.bfloat16
        )
    )
    plain, inputs = copy.deepcopy(model).cuda(), zoo.batch(vocabulary, 2, 100, "cuda")
    expected = zoo.step(tunecompile.optimize(plain, executor="eager"), inputs)
    table = model.get_input_embeddings().weight
    state = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    gc.collect()
    if late:
        tunecompile.optimize(model, host_embedding=True, executor="eager").cuda()
    before = torch.cuda.memory_allocated()
    model = tunecompile.optimize(model, host_embedding=True, executor="eager")
    loss, gradients = zoo.step(model, inputs)
    del gradients
    gc.collect()
    assert (
        torch.cuda.memory_allocated() - before < -0.9 * table.nbytes
        and table.is_cuda
        and next(model.parameters()).is_cuda
    )
    assert loss == expected[0] and has(model, "embedding-on-host")
    assert_equal(zoo.step(model, inputs), expected)
    assert all(torch.equal(value.cpu(), state[name]) for name, value in model.state_dict().items())
    model.eval()
    plain.eval()
    prompt = inputs["input_ids"][:1, :5]
    assert torch.equal(
        model.generate(input_ids=prompt, max_new_tokens=4, do_sample=False),
        plain.generate(input_ids=prompt, max_new_tokens=4, do_sample=False),
    )
    tunecompile.restore(model)
    assert torch.cuda.memory_allocated() - before > -0.1 * table.nbytes and torch.equal(
        table.cpu(), state[next(n for n in state if "embed_tokens" in n)]
    )


def test_taken_once(monkeypatch):
    """With a GPU's tensors played by a CPU's."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    model, seen = zoo.adapt(zoo.make("llama", tie_word_embeddings=False)), []
    held = HostEmbeddings(lambda tensor: seen.append(tensor) or tensor.clone())
    held.take(model)
    held.take(model)
    assert len(seen) == 1 and not held.pending and has(held.report_notes()[:1], "embedding-on-host")
    held.give_back()
    assert not held.moved
