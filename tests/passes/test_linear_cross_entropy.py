"""Head and loss in one graph: what is joined, what is left alone, and that both are right."""

import copy
import functools

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import tunecompile
from tests.support.passes.run import check, family, random

VOCABULARY, HIDDEN = 64, 32


class Model(nn.Module):
    """No repeated layers, so the whole model with its loss is one region; `loss` is the spelling under test."""

    def __init__(self, loss, bias=False):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=bias)
        self.mix, self.loss = nn.Linear(HIDDEN, HIDDEN), loss

    def forward(self, ids, labels):
        return self.loss(self.head(torch.tanh(self.mix(self.embedding(ids)))), labels)


def shifted(logits, labels):
    return F.cross_entropy(logits[:, :-1].float().reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))


def capped(logits, labels):
    return F.cross_entropy((torch.tanh(logits / 5.0) * 5.0).flatten(0, 1), labels.flatten(), label_smoothing=0.1)


def scaled(logits, labels):
    return F.cross_entropy((logits * 0.5).reshape(-1, VOCABULARY), labels.reshape(-1), ignore_index=3)


def read_twice(logits, labels):
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1)) + logits.square().mean()


def each_token(logits, labels):
    each = F.cross_entropy(
        logits[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1), reduction="none", label_smoothing=0.1
    )
    return (each * torch.linspace(-1, 2, each.shape[0], dtype=each.dtype)).sum() - F.logsigmoid(each).mean()


def test_each_row_in_more_digits_than_the_head_is_left_alone():
    def fn(x, weight, labels):
        return F.cross_entropy(F.linear(x, weight).double(), labels, reduction="none")

    given = random(6, HIDDEN), random(VOCABULARY, HIDDEN), torch.randint(VOCABULARY, (6,))
    seen = check(fn, *given, passes=family("linear_cross_entropy"), expect={}, whole=False)
    assert "float64" in str(seen.refused)


def changed(x, weight, labels):
    logits = F.linear(x, weight)
    x.mul_(2.0)
    return F.cross_entropy(logits, labels)


def without_gradients(x, weight, labels):
    with torch.no_grad():
        logits = F.linear(x, weight)
    return F.cross_entropy(logits, labels) + x.sum()


def scaled_without_gradients(x, weight, labels):
    logits = F.linear(x, weight)
    with torch.no_grad():
        logits = logits * 2.0
    return F.cross_entropy(logits, labels) + weight.sum()


@pytest.mark.parametrize("loss", [changed, without_gradients, scaled_without_gradients])
def test_what_changes_between_head_and_loss(loss):
    """The head would be computed later: of other values, or with gradients."""
    x, weight = random(6, HIDDEN), random(VOCABULARY, HIDDEN, grad=loss is not changed)
    labels = torch.randint(VOCABULARY, (6,))

    def fn(x, weight, labels):
        return loss(x * 1.0, weight, labels)

    seen = check(fn, x, weight, labels, passes=family("linear_cross_entropy"), expect={}, whole=False)
    assert "in place" in str(seen.refused)


def test_labels_may_change_between_head_and_loss():
    def fn(x, weight, labels):
        logits, labels = F.linear(x, weight), labels + 0
        labels.masked_fill_(labels < 2, -100)
        return F.cross_entropy(logits, labels)

    given = random(6, HIDDEN), random(VOCABULARY, HIDDEN), torch.randint(VOCABULARY, (6,))
    check(fn, *given, passes=family("linear_cross_entropy"), expect={"linear_cross_entropy": 1}, whole=False)


def test_rows_whose_number_is_a_symbol():
    """They may be reshaped, and sliced before, but not behind."""

    def fn(cut, x, weight, labels):
        return F.cross_entropy(cut(F.linear(x, weight)).float(), cut(labels[..., None])[:, 0])

    def before(of):
        return of[:, 1:].reshape(-1, of.shape[-1])

    def behind(of):
        return of.reshape(-1, of.shape[-1])[2:]

    given = random(3, 6, HIDDEN), random(VOCABULARY, HIDDEN), torch.randint(VOCABULARY, (3, 6))
    options = {"passes": family("linear_cross_entropy"), "rows": (0, 1), "whole": False}
    check(functools.partial(fn, before), *given, expect={"linear_cross_entropy": 1}, **options)
    seen = check(functools.partial(fn, behind), *given, expect={}, **options)
    assert "sizes that are not known" in str(seen.refused)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "loss, joined",
    [
        (shifted, 1),
        (capped, 1),
        (scaled, 1),
        (read_twice, 0),
        (each_token, 1),
    ],
)
def test_loss_and_gradients(loss, joined, bias):
    model = Model(loss, bias).double()
    plain = copy.deepcopy(model)
    ids = torch.randint(0, VOCABULARY, (2, 9))
    labels = torch.where(torch.rand(2, 9) < 0.3, torch.tensor(-100 if loss is not scaled else 3), ids)
    tunecompile.optimize(model, executor="eager")
    got, expected = model(ids, labels), plain(ids, labels)
    got.backward()
    expected.backward()
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-6, atol=1e-8, msg=name)
    (tally,) = [m for m in tunecompile.report(model).matches if m.family == "linear_cross_entropy"]
    assert (tally.found, tally.rewritten) == (1, joined)
    assert joined or tally.refused
