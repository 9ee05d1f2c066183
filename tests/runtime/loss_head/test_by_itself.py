"""Deferred logits of a linear by itself: each use gives what it gives of real logits, and most make none."""

import pytest
import torch
import torch.nn.functional as F

from tests.support.heads import ROWS, TOKENS, WORDS, compared


def picked(logits, labels):
    return logits.gather(-1, labels[..., None]).squeeze(-1)


def log_probs(logits, labels, **options):
    return picked(logits.log_softmax(-1, **options), labels)


def each_row(use):
    """A use, of one row of the batch after another."""
    return lambda logits, labels: torch.stack([use(row, row_labels) for row, row_labels in zip(logits, labels)])


def each_loss(logits, labels, **options):
    return F.cross_entropy(logits.reshape(-1, WORDS), labels.flatten(), reduction="none", **options)


def some_ignored(labels):
    return labels.masked_fill(labels % 3 == 0, -100)


def scaled_without_gradients(logits, labels):
    """Values are scaled, and gradients are not."""
    with torch.no_grad():
        logits.mul_(0.5)
    return log_probs(logits, labels)


def scaled_once_read(logits, labels):
    """By a view, whose memory has values by now."""
    view = logits[:, 1:]
    read = logits.sigmoid().sum(-1)
    view.mul_(3)
    return read + log_probs(logits, labels)


#: uses that are computed of hidden states
WITHOUT_LOGITS = {
    **{
        f"logsumexp over {dim}": lambda logits, labels, dim=dim: picked(logits, labels) - logits.logsumexp(dim)
        for dim in (-1, 2, (-1,), [-1])
    },
    "logsumexp by names": lambda logits, labels: (
        logits.gather(index=labels[..., None], dim=2) - torch.logsumexp(input=logits, dim=-1, keepdim=True)
    ),
    "logsumexp, special": lambda logits, labels: picked(logits, labels) - torch.special.logsumexp(logits, -1),
    "log_softmax over 2": lambda logits, labels: picked(logits.log_softmax(2), labels),
    "log_softmax by names": lambda logits, labels: picked(
        F.log_softmax(input=logits, dim=-1, dtype=torch.float64), labels
    ),
    "log_softmax with a level": lambda logits, labels: picked(F.log_softmax(logits, -1, 3, torch.float64), labels),
    "log_softmax, special": lambda logits, labels: picked(torch.special.log_softmax(logits, -1), labels),
    "along a dim": lambda logits, labels: torch.take_along_dim(
        logits.log_softmax(-1), indices=labels[..., None], dim=-1
    ),
    "rows of sums": lambda logits, labels: (
        picked(logits, labels) - torch.stack([row.logsumexp(-1) for row in logits], dim=0)
    ),
    "rows of log-probabilities": each_row(log_probs),
    "a batch of one row": lambda logits, labels: each_row(log_probs)(logits[1:], labels[1:]),
    "sums of a batch of one row": lambda logits, labels: (
        picked(logits[:1], labels[:1]) - torch.stack([row.logsumexp(-1) for row in logits[:1]])
    ),
    "scaled rows of log-probabilities": lambda logits, labels: each_row(log_probs)(logits * 3, labels),
    "rows that are scaled": each_row(lambda row, labels: log_probs(row / 0.7, labels)),
    "a soft-cap": lambda logits, labels: log_probs(torch.tanh(logits / 2.0) * 2.0, labels),
    "a soft-cap of a scale": lambda logits, labels: log_probs((logits * 3 / 1.5).tanh().mul(1.5), labels),
    "a tanh alone": lambda logits, labels: log_probs(logits.tanh(), labels),
    "a quotient of a soft-cap": lambda logits, labels: log_probs(logits.tanh() / 2.0, labels),
    "a soft-cap that is scaled": lambda logits, labels: log_probs(logits.tanh() * 2.0 * 3.0, labels),
    "a divisor": lambda logits, labels: log_probs(logits / 0.3, labels),
    "all of the vocabulary": lambda logits, labels: log_probs(logits[..., :], labels),
    "tokens, then all": lambda logits, labels: log_probs(logits[:, 1:, ...], labels[:, 1:]),
    "all rows, then tokens": lambda logits, labels: log_probs(logits[..., 1:, :], labels[..., 1:]),
    "one row": lambda logits, labels: log_probs(logits[1, :-2, :], labels[1, :-2]),
    "flat": lambda logits, labels: log_probs(logits.flatten(0, 1), labels.flatten()),
    "a row more": lambda logits, labels: log_probs(logits.unsqueeze(0), labels[None]),
    "losses": each_loss,
    "losses, some ignored": lambda logits, labels: each_loss(logits, some_ignored(labels)),
    "losses, another ignored": lambda logits, labels: each_loss(logits, labels, ignore_index=int(labels[0, 0])),
    "smoothed": lambda logits, labels: each_loss(logits, labels, label_smoothing=0.2),
    "their mean": lambda logits, labels: F.cross_entropy(logits.view(-1, WORDS), some_ignored(labels).view(-1)),
    "their sum by names": lambda logits, labels: F.cross_entropy(
        input=logits.view(-1, WORDS), target=some_ignored(labels).view(-1), reduction="sum"
    ),
    "of log-probabilities": lambda logits, labels: F.nll_loss(
        logits.log_softmax(-1).view(-1, WORDS), some_ignored(labels).view(-1)
    ),
    "with a bias": lambda logits, labels: log_probs(logits + torch.linspace(-1, 1, WORDS).double(), labels),
    "with a bias on the left, scaled": lambda logits, labels: log_probs(
        (torch.linspace(-1, 1, WORDS).double() + logits) * 0.4, labels
    ),
    "at a temperature": lambda logits, labels: log_probs(logits.div_(0.6), labels),
    "at two": lambda logits, labels: log_probs(logits.clone().mul_(3).div_(0.6)[:, 1:], labels[:, 1:]),
    "rows that are scaled apart": lambda logits, labels: torch.stack(
        [log_probs(logits[0] * 2, labels[0]), log_probs(logits[1], labels[1])]
    ),
    "rows by other ways": lambda logits, labels: torch.stack(
        [log_probs(logits[0].clone(), labels[0]), log_probs(logits[1] * 1.0, labels[1])]
    ),
    "one row of two": lambda logits, labels: torch.stack([log_probs(logits[0], labels[0])]),
}
#: uses that read the logits, which are computed once
OF_LOGITS = {
    "sums over rows": lambda logits, labels: picked(logits, labels) - logits.logsumexp((0, 2))[None, :],
    "sums over tokens": lambda logits, labels: picked(logits, labels) - logits.logsumexp(1)[:, :TOKENS],
    "sums into another": lambda logits, labels: picked(logits, labels).detach() + logits.logsumexp(-1) * 2,
    "a sum and a pick": lambda logits, labels: torch.stack(
        [logits[0].logsumexp(-1, keepdim=True), logits[1].gather(-1, labels[1, :, None])]
    ),
    "a pick and a sum": lambda logits, labels: torch.stack(
        [logits[0].gather(-1, labels[0, :, None]), logits[1].logsumexp(-1, keepdim=True)]
    ),
    "views of sums": lambda logits, labels: torch.stack([row.logsumexp(-1).unsqueeze(0) for row in logits]),
    "sums of other numbers": lambda logits, labels: torch.stack([row.float().logsumexp(-1) for row in logits]),
    "sums, one by one": lambda logits, labels: torch.stack([row * 2 for row in logits.logsumexp(-1)]),
    "rows in another order": lambda logits, labels: torch.stack([logits[1].logsumexp(-1), logits[0].logsumexp(-1)]),
    "rows at the end": lambda logits, labels: torch.stack([row.logsumexp(-1) for row in logits], dim=-1),
    "rows by a name": lambda logits, labels: torch.stack(tensors=[row.logsumexp(-1) for row in logits]),
    "two of them": lambda logits, labels: log_probs(logits.tanh().tanh() * 2, labels),
    "a soft-cap that is turned": lambda logits, labels: log_probs(logits.tanh() * -2.0, labels),
    "a soft-cap that is cleared": lambda logits, labels: log_probs(logits.tanh() * 0.0 * 2.0, labels),
    "half of the vocabulary": lambda logits, labels: log_probs(logits[..., ::2], labels // 2),
    "every word by itself": lambda logits, labels: log_probs(
        logits.view(ROWS, TOKENS, WORDS, 1).squeeze(-1).transpose(0, 1), labels.t()
    ),
    "tokens by their numbers": lambda logits, labels: log_probs(logits[:, [0, 2]], labels[:, [0, 2]]),
    "a scale by tensor": lambda logits, labels: log_probs(logits * torch.tensor(2.0).double(), labels),
    "weights of classes": lambda logits, labels: each_loss(
        logits, labels, weight=torch.linspace(0.5, 1, WORDS, dtype=logits.dtype)
    ),
    "shares of classes": lambda logits, labels: F.cross_entropy(
        logits.view(-1, WORDS), F.one_hot(labels.flatten(), WORDS).to(logits.dtype), reduction="none"
    ),
    "classes in another dim": lambda logits, labels: F.cross_entropy(logits.transpose(1, 2), labels, reduction="none"),
    "log-probabilities twice": lambda logits, labels: each_loss(logits.log_softmax(-1), labels),
    "no log-probabilities": lambda logits, labels: F.nll_loss(logits.view(-1, WORDS), labels.view(-1)),
    "a bias of rows": lambda logits, labels: log_probs(logits + torch.linspace(0, 1, TOKENS)[:, None], labels),
    "a bias that is learned": lambda logits, labels: log_probs(
        logits + torch.ones(WORDS).double().requires_grad_(), labels
    ),
    "a scaled bias": lambda logits, labels: log_probs(torch.add(logits, torch.ones(WORDS).double(), alpha=2), labels),
    "a bias by name": lambda logits, labels: log_probs(
        torch.add(input=logits, other=torch.ones(WORDS).double()), labels
    ),
    "two biases": lambda logits, labels: log_probs(
        logits + torch.ones(WORDS).double() + torch.ones(WORDS).double(), labels
    ),
    "a bias behind a scale": lambda logits, labels: log_probs(logits * 2 + torch.ones(WORDS).double(), labels),
    "scaled without gradients": scaled_without_gradients,
    "scaled once read": scaled_once_read,
    "picks at a temperature": lambda logits, labels: logits.gather(-1, labels[..., None]).div_(0.5),
    "at a temperature by name": lambda logits, labels: log_probs(logits.mul_(other=2), labels),
    "losses of sums": lambda logits, labels: F.cross_entropy(
        logits.logsumexp(-1), labels[:, 0] % TOKENS, reduction="none"
    ),
    "losses towards logits": lambda logits, labels: F.cross_entropy(
        torch.linspace(0, 1, WORDS).expand(ROWS * TOKENS, WORDS).double(), logits.flatten(0, 1), reduction="none"
    ),
    "rounded at a temperature": lambda logits, labels: log_probs(logits.div_(0.3, rounding_mode="floor"), labels),
    "scores and log-probabilities": lambda logits, labels: logits.log_softmax(-1).exp() + logits.sigmoid(),
    "a pick of other logits": lambda logits, labels: picked(logits * 2, labels) - logits.logsumexp(-1),
    "rows of picks": each_row(picked),
    "two picks": lambda logits, labels: picked(logits, labels) - picked(logits, labels.flip(0)),
    "a sum less a pick": lambda logits, labels: logits.logsumexp(-1) - picked(logits, labels),
    "a pick less a sum of another shape": lambda logits, labels: (
        logits.gather(-1, labels[..., None]) - logits.logsumexp(-1)[:, None]
    ),
    "a pick less two sums": lambda logits, labels: torch.sub(picked(logits, labels), logits.logsumexp(-1), alpha=2),
    "picks of no log-probabilities": lambda logits, labels: picked(logits, labels),
    "log-probabilities over tokens": lambda logits, labels: picked(logits.log_softmax(1), labels),
    "log-probabilities that are scaled": lambda logits, labels: picked(logits.log_softmax(-1) * 2, labels),
    "log-probabilities of log-probabilities": lambda logits, labels: log_probs(logits.log_softmax(-1), labels),
    "entropies": lambda logits, labels: -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1),
    "written before": lambda logits, labels: log_probs(logits.clamp_(max=0.1), labels),
    "one row's sums twice": lambda logits, labels: (
        picked(logits, labels) - torch.stack([logits[1].logsumexp(-1), logits[1].logsumexp(-1)])
    ),
    "columns": lambda logits, labels: (
        torch.stack([logits[:, i].logsumexp(-1) for i in range(TOKENS)]).t() - picked(logits, labels)
    ),
    "picks of two words": lambda logits, labels: logits.log_softmax(-1).gather(-1, labels[..., None].expand(-1, -1, 2)),
    "picks of tokens": lambda logits, labels: logits.log_softmax(-1).gather(1, labels[..., None].clamp(max=3)),
    "picks of fewer rows": lambda logits, labels: logits.log_softmax(-1).gather(-1, labels[:1, :, None]),
}


@pytest.mark.parametrize("uses", [WITHOUT_LOGITS, OF_LOGITS], ids=["without logits", "of logits"])
def test_uses(uses):
    made = {}
    for name, use in uses.items():
        ours, real, head = compared(use)
        for a, b in zip(ours, real):
            assert a.dtype == b.dtype and a.shape == b.shape, name
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")
        made[name] = head.made
        assert head.tally.rewritten or (name in OF_LOGITS and head.tally.refused), name
    several = {"sums of other numbers": ROWS, "a pick of other logits": 2} if uses is OF_LOGITS else {}
    assert made == dict.fromkeys(uses, int(uses is OF_LOGITS)) | several


@pytest.mark.parametrize(
    "use",
    [
        lambda logits, labels: log_probs(logits.double(), labels),
        lambda logits, labels: each_loss(logits.double(), labels),
        lambda logits, labels: picked(logits.double(), labels) - logits.double().logsumexp(-1),
    ],
    ids=["log-probabilities", "losses", "a pick and a sum"],
)
def test_more_digits_than_the_head_has(use):
    ours, theirs, head = compared(use, torch.float32)
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours[1:], theirs[1:], rtol=1e-4, atol=1e-6)
    assert head.made and not head.tally.rewritten and head.tally.refused
