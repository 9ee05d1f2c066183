"""Chunks of rows none of which has a label, in every way that a head's loss is computed.

On a GPU they are computed as others are, since to count labels would wait for it; a CPU takes all rows here, too.
"""

import importlib

import pytest
import torch
import torch.nn.functional as F

from tests.support import zoo
from tests.support.compare import assert_same_run
from tests.support.models.pairs import of_plain_layers, pair
from tests.support.ops.cross_entropy import OPTIONS, problem
from tunecompile.ops import linear_cross_entropy, linear_cross_entropy_rows
from tunecompile.ops.linear_cross_entropy import mean_of_labelled

pytestmark = pytest.mark.filterwarnings("ignore")
STEP = 4  #: rows of a chunk


@pytest.fixture(autouse=True)
def all_rows(monkeypatch):
    """Whether each chunk had a label."""
    seen = []

    def chunks_of(step, labels, ignore_index):
        for start in range(0, len(labels), step):
            seen.append(bool((labels[start : start + step] != ignore_index).any()))
            yield slice(start, start + step)

    for name in ("linear_cross_entropy", "linear_cross_entropy_rows"):
        module = importlib.import_module(f"tunecompile.ops.{name}")
        monkeypatch.setattr(module, "chunks_of", chunks_of)
        monkeypatch.setattr(module, "step_rows", lambda weight, trained: STEP)
    return seen


def fused(op, hidden, weight, bias, labels, scale=1.0, softcap=0.0, smoothing=0.0):
    flags = hidden.requires_grad, weight.requires_grad
    return op(hidden, weight, bias, None, None, labels, scale, softcap, -100, smoothing, *flags)[0]


WAYS = {
    "sum": lambda *given, **options: fused(linear_cross_entropy, *given, **options),
    "mean": lambda *given, **options: mean_of_labelled(fused(linear_cross_entropy, *given, **options), given[-1], -100),
    "none": lambda *given, **options: fused(linear_cross_entropy_rows, *given, **options),
}


def plain(hidden, weight, bias, labels, reduction, scale=1.0, softcap=0.0, smoothing=0.0):
    logits = F.linear(hidden, weight, bias) * scale
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    return F.cross_entropy(logits, labels, reduction=reduction, label_smoothing=smoothing)


def gradients(function, tensors, trained, *rest, **options):
    """(loss, gradients), of weighed rows where there is a loss for each."""
    new = [t.detach().requires_grad_(bool(flag)) for t, flag in zip(tensors, trained)]
    loss = function(*new, *rest, **options)
    (loss * torch.arange(1.0, loss.numel() + 1, dtype=loss.dtype).view_as(loss)).sum().backward()
    return loss.detach(), [t.grad for t in new]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("reduction", WAYS)
@pytest.mark.parametrize("trained", [(1, 0, 0), (1, 1, 1)], ids=str)
@pytest.mark.parametrize(
    "unlabelled", [slice(0, STEP), slice(STEP, 2 * STEP), slice(0, None)], ids=["first", "second", "all"]
)
def test_is_torchs_in_fp64(unlabelled, trained, reduction, options, all_rows):
    *tensors, labels = problem(masked="none")
    labels[unlabelled] = -100
    got, ours = gradients(WAYS[reduction], tensors, trained, labels, **options)
    exact, theirs = gradients(plain, tensors, trained, labels, reduction, **options)
    assert False in all_rows
    torch.testing.assert_close(got, exact, rtol=1e-11, atol=1e-12, equal_nan=True)
    if reduction == "mean" and unlabelled.stop is None:  # NaN, whose gradients torch leaves at 0
        theirs = [None if each is None else torch.zeros_like(each) for each in theirs]
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("reduction", WAYS)
def test_of_deferred_logits(reduction, all_rows):
    model, reference = pair(of_plain_layers)
    batch = zoo.batch(length=6)
    batch["labels"][0] = -100

    def loss(m):
        logits = m(input_ids=batch["input_ids"]).logits
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction=reduction).sum()

    assert_same_run(model, reference, loss)
    assert False in all_rows
    del all_rows[:]
    assert_same_run(model, reference, lambda m: m(**batch).loss)
    assert False in all_rows
