"""Losses of logits whose hidden states at padding were dropped: which certainly leave these rows out."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from tests.support.heads import WIDTH, WORDS, deferred, head_of, linear
from tunecompile.runtime.loss_head import losses
from tunecompile.runtime.loss_head.logits import Logits

LABELS = torch.tensor([3, 4, -100, 5])


def of_dropped_rows(*dropped, rows=(4,)):
    """Logits of four rows, whose hidden states are zero where a row is padding."""
    hidden = torch.ones(4, WIDTH, dtype=torch.float64)
    hidden[list(dropped)] = 0
    return deferred(head_of(linear(), looked_at=lambda: False), hidden.view(*rows, WIDTH).requires_grad_())


@pytest.mark.parametrize("function", [F.cross_entropy, F.nll_loss])
def test_a_loss_that_leaves_padding_out(function):
    """All rows at padding have the label that the loss ignores: else they would count as rows of zeros."""

    def leaves(logits, *args, **kwargs):
        given = logits if function is F.cross_entropy else logits.log_softmax(-1)
        return losses.leaves_padding(given, (given, *args), kwargs)

    assert leaves(of_dropped_rows(2), LABELS) and leaves(of_dropped_rows(), LABELS)
    assert leaves(of_dropped_rows(2), target=LABELS) and leaves(of_dropped_rows(0), LABELS, ignore_index=3)
    assert not leaves(of_dropped_rows(1, 2), LABELS) and not leaves(of_dropped_rows(2), LABELS, ignore_index=3)
    assert not leaves(of_dropped_rows(2), LABELS, None, None, 3), "the ignored label has no name"
    assert not leaves(of_dropped_rows(2), LABELS[:3]) and not leaves(of_dropped_rows(2), LABELS[:, None])
    assert not leaves(of_dropped_rows(2), F.one_hot(LABELS.clamp(min=0), WORDS).double())
    assert not leaves(of_dropped_rows(2, rows=(1, 4)), LABELS[None]) and not leaves(of_dropped_rows(2), None)


def test_a_loss_of_other_logits_may_read_padding():
    """What is done to the logits is not understood."""
    logits = of_dropped_rows(2).tanh().tanh()
    assert not losses.leaves_padding(logits, (logits, LABELS), {})


def test_labels_that_were_looked_at_are_not_read_again():
    logits = deferred(head_of(linear(), looked_at=lambda: True), torch.zeros(4, WIDTH, dtype=torch.float64))
    assert losses.leaves_padding(logits, (logits, LABELS), {})


@pytest.mark.parametrize("evaluated", [False, True])
@pytest.mark.parametrize("known, pristine, changes", [(False, False, True), (True, True, True), (True, False, False)])
def test_who_reads_logits_at_padding_gets_those_of_whole_hidden_states(known, pristine, changes, evaluated):
    """So does whoever reads a view of them, or what they were before: else it would see the head of zeros."""
    whole, asked = torch.ones(2, 3), []

    def logits(**others):
        own = {"padded": True, "evaluated": evaluated, "real": None, "source": None, "before": None}
        return SimpleNamespace(hidden="a row", **own, **others)

    name = "read_evaluated" if evaluated else "read"
    head = SimpleNamespace(**{name: lambda *given: asked.append(given) or whole})
    read = logits(head=head, autocast=torch.bfloat16, pristine=pristine)
    read.source, read.before = logits(), logits()
    read.source.source, read.real = logits(), torch.zeros(1) if known else None
    Logits.read_at_padding(read)
    assert asked == [("a row", torch.bfloat16)] * changes
    for each in (read, read.source, read.before, read.source.source):
        assert (each.hidden is whole) is changes and each.padded is not changes
        assert (each.real is None) is (changes or each is not read)
