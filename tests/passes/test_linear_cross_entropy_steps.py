"""Which losses are joined to a head, and which nodes may stand between; of functions without Dynamo. What steps amount to
is asked of `tests/ir/test_logit_chain.py`."""

import pytest
import torch
import torch.nn.functional as F

from tests.support.passes.run import family
from tests.support.passes.traced import recognized

PASSES = family("linear_cross_entropy")
ROWS, TOKENS, HIDDEN, WORDS = 2, 5, 4, 6
JOINED, EACH = {"linear_cross_entropy": 1}, {"linear_cross_entropy_rows": 1}


def seen(fn, expect, bias=True, trained="xwb"):
    """The context of a function of logits and labels; results and gradients are its own."""
    torch.manual_seed(0)
    shapes = {"x": (ROWS, TOKENS, HIDDEN), "w": (WORDS, HIDDEN), "b": (WORDS,)}
    x, w, b = (torch.randn(shape, dtype=torch.float64, requires_grad=name in trained) for name, shape in shapes.items())
    labels = torch.randint(WORDS, (ROWS, TOKENS))
    labels[0, 1] = -100

    def whole(x, w, b, labels):
        return fn(F.linear(x, w, b if bias else None), labels)

    return recognized(whole, x, w, b, labels, passes=PASSES, expect=expect, tol=1e-10, tidy=True)[1]


def loss(change=lambda logits: logits, labels=lambda labels: labels.flatten(), **options):
    return lambda logits, given: F.cross_entropy(change(logits).reshape(-1, WORDS), labels(given), **options)


def behind(labels):
    return labels[:, 1:].reshape(-1)


FOUND = {
    "all rows": (loss(), JOINED),
    "a view": (lambda s, t: F.cross_entropy(s.view(-1, WORDS), t.view(-1)), JOINED),
    "flattened": (lambda s, t: F.cross_entropy(s.flatten(0, 1), t.flatten()), JOINED),
    "flattened by a function": (lambda s, t: F.cross_entropy(torch.flatten(s, 0, 1), t.flatten()), JOINED),
    "a copy": (loss(lambda s: s[:, :-1].contiguous(), behind), JOINED),
    "shifted": (loss(lambda s: s[:, :-1], behind), JOINED),
    "a factor in front": (loss(lambda s: 3 * s), JOINED),
    "a divisor": (loss(lambda s: s / 2.5), JOINED),
    "capped": (loss(lambda s: torch.tanh(s / 1.5) * 1.5), JOINED),
    "capped, then a divisor": (loss(lambda s: torch.tanh(s * 0.7) * 1.5 / 0.5), JOINED),
    "a tanh alone": (loss(torch.tanh), JOINED),
    "a token": (lambda s, t: F.cross_entropy(s[:, 1], t[:, 1]), JOINED),
    "tokens from the end": (loss(lambda s: s[..., :-1, :], behind), JOINED),
    "sliced after it was reshaped": (lambda s, t: F.cross_entropy(s.reshape(-1, WORDS)[3:], t.reshape(-1)[3:]), JOINED),
    "squeezed": (lambda s, t: F.cross_entropy(s[1:].squeeze(0), t[1]), JOINED),
    "a sum": (loss(reduction="sum"), JOINED),
    "each row": (loss(reduction="none"), EACH),
    "smoothed": (loss(label_smoothing=0.1), JOINED),
    "each row, smoothed": (loss(label_smoothing=0.1, reduction="none"), EACH),
    "another label is left out": (loss(ignore_index=3, labels=lambda t: t.flatten().clamp(min=0)), JOINED),
    "each row, another is left out": (
        loss(ignore_index=3, reduction="none", labels=lambda t: t.flatten().clamp(min=0)),
        EACH,
    ),
    "by position": (
        lambda s, t: F.cross_entropy(s.flatten(0, 1), t.flatten().clamp(min=0), None, None, 3, None, "sum", 0.1),
        JOINED,
    ),
    "by names": (lambda s, t: F.cross_entropy(target=t.flatten(), input=s.flatten(0, 1)), JOINED),
}
LEFT = {
    "a part of the words": (loss(lambda s: s[..., :3].repeat(1, 1, 2)), "no step"),
    "words are sliced": (lambda s, t: F.cross_entropy(s[:, :, 1:].flatten(0, 1), t.flatten().clamp(0, 4)), "sliced"),
    "whole numbers": (loss(lambda s: (s * 9).to(torch.int64).double()), "whole numbers"),
    "words are reshaped": (
        lambda s, t: F.cross_entropy(s.reshape(-1, 3), torch.cat([t, t], 1).flatten().clamp(0, 2)),
        "vocabulary is reshaped",
    ),
    "two of them": (loss(lambda s: torch.tanh(torch.tanh(s / 2.0) * 2.0 / 3.0) * 3.0), "two tanh"),
    "a number in front of a division": (loss(lambda s: 1.0 / (s + 9.0)), "no step"),
    "a number to divide": (loss(lambda s: 2.0 / s), "no step"),
    "a sum": (loss(lambda s: s + 1.0), "no step"),
    "a power": (loss(lambda s: s**2), "no step"),
    "read behind the head": (lambda s, t: loss()(s, t) + s.square().mean(), "elsewhere"),
    "read in between": (lambda s, t: (lambda h: loss()(h, t) + h.sum())(s * 2.0), "elsewhere"),
    "read as the loss has it": (
        lambda s, t: (lambda h: F.cross_entropy(h, t.flatten()) + h.sum())(s.flatten(0, 1)),
        "elsewhere",
    ),
    "classes in the middle": (lambda s, t: F.cross_entropy(s.transpose(1, 2), t), "one class a row"),
    "shares of classes": (
        lambda s, t: F.cross_entropy(s.flatten(0, 1), s.detach().flatten(0, 1).softmax(-1)),
        "one class a row",
    ),
    "class weights": (
        lambda s, t: F.cross_entropy(s.flatten(0, 1), t.flatten(), s.detach()[0, 0].exp()),
        "class weights",
    ),
    "an old name": (lambda s, t: F.cross_entropy(s.flatten(0, 1), t.flatten(), size_average=False), "old names"),
    "another old name": (lambda s, t: F.cross_entropy(s.flatten(0, 1), t.flatten(), reduce=False), "old names"),
}


@pytest.mark.filterwarnings("ignore:size_average and reduce")
@pytest.mark.parametrize("name", FOUND)
def test_losses_that_are_joined(name):
    fn, ops = FOUND[name]
    (tally,) = seen(fn, ops).tallies
    assert (tally.found, tally.rewritten, tally.refused) == (1, 1, [])


@pytest.mark.filterwarnings("ignore:size_average and reduce")
@pytest.mark.parametrize("name", LEFT)
def test_losses_that_stay(name):
    fn, reason = LEFT[name]
    (tally,) = seen(fn, {}).tallies
    assert (tally.found, tally.rewritten) == (1, 0) and reason in tally.refused[0]


@pytest.mark.parametrize("trained", ["x", "w", "b", "wb", ""])
@pytest.mark.parametrize("reduction, ops", [("mean", JOINED), ("none", EACH)])
def test_what_is_trained(trained, reduction, ops):
    """What is not has no gradient, with a bias or without."""
    seen(loss(reduction=reduction), ops, trained=trained)
    seen(loss(reduction=reduction), ops, bias=False, trained=trained)
