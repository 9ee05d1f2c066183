"""Losses that need one number for each token: whatever their spelling, no logits of all rows; and where they are not understood, the real ones."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support import zoo
from tests.support.compare import assert_same_run
from tests.support.heads import WORDS, compared, deferred, head_of, labels, linear, states
from tests.support.losses import SPELLINGS, each_of, flat, selective_of_newer, weighed
from tests.support.models.pairs import of_plain_layers, pair, small
from tests.support.ops.checks import error
from tests.support.reports import head_tally
from tunecompile.runtime.loss_head.deferred import LazyTensor

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


def test_every_spelling_is_found(made):
    model, reference = pair(small)
    for spelling in each_of(SPELLINGS, model):
        assert_same_run(model, reference, lambda m: weighed(spelling, True)(m, zoo.batch()))
        assert not made and head_tally(model).rewritten == 1 and not head_tally(model).refused, head_tally(model)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["bf16", "autocast"])
def test_in_half_precision(how, made):
    """Values and gradients are no further from those of fp64 than eager's."""
    model, reference = pair(small if how == "autocast" else lambda: small().bfloat16())
    exact, inputs = copy.deepcopy(reference).double(), zoo.batch()
    for spelling in each_of(SPELLINGS, model):
        found = []
        for m in (model, reference, exact):
            m.zero_grad(set_to_none=True)
            with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast" and m is not exact):
                each = spelling(m(inputs["input_ids"]).logits[:, :-1], inputs["labels"][:, 1:].clamp(min=0))
            (each.float() * torch.linspace(-0.3, 2, each.numel()).view(each.shape)).sum().backward()
            found.append((each.detach(), {n: p.grad.clone() for n, p in m.named_parameters() if p.grad is not None}))
        (ours, mine), (theirs, eager), (truth, wanted) = found
        assert ours.dtype == theirs.dtype and not made and head_tally(model).rewritten == 1, head_tally(model)
        assert error(ours, truth) <= 1.1 * error(theirs, truth)
        errors = [zoo.errors(each, wanted) for each in (mine, eager)]
        assert sorted(errors[0].values())[len(wanted) // 2] <= 1.1 * sorted(errors[1].values())[len(wanted) // 2]
        assert errors[0]["lm_head.weight"] <= 1.1 * errors[1]["lm_head.weight"]


# -- the order of things ------------------------------------------------------------------------------------------------


def index_changes(logits, labels):
    index = labels.unsqueeze(-1).clone()
    picked = logits.gather(-1, index)
    index.zero_()
    return (picked - logits.logsumexp(-1, keepdim=True)).squeeze(-1)


def written_between(logits, labels):
    picked = logits.gather(-1, labels[..., None])
    logits.mul_(0.5)
    return (picked - logits.logsumexp(-1, keepdim=True)).squeeze(-1)


def written_behind(logits, labels):
    picked, total = logits.gather(-1, labels[..., None]), logits.logsumexp(-1, keepdim=True)
    logits[..., 3:].mul_(0.5)
    return (picked - total).squeeze(-1) + logits.logsumexp(-1)


def whole_numbers(logits, labels):
    return (logits * 20).int().float().log_softmax(-1).gather(-1, labels[..., None])


def other_bits(logits, labels):
    bits = logits.bfloat16().view(torch.float16).clamp(-9, 9)
    return F.cross_entropy(*flat(bits.float(), labels), reduction="none") + F.cross_entropy(
        *flat(logits.bfloat16().view(torch.int16).float() / 1e4, labels)
    )


def test_values_are_those_of_the_moment():
    """(Eager gives values here, and refuses the backward pass.)"""
    models = pair(of_plain_layers)
    for write in (index_changes, written_between, written_behind, whole_numbers, other_bits):
        found = [write(m(zoo.batch()["input_ids"]).logits, zoo.batch()["labels"].clamp(min=0)).detach() for m in models]
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def behind_log_probabilities(logits, labels):
    logp, twice = logits.log_softmax(-1), logits * 2
    logits[..., 3:].mul_(0.5)
    return (
        logp.gather(-1, labels[..., None])[..., 0]
        + logits.logsumexp(-1)
        + F.cross_entropy(*flat(twice, labels), reduction="none").view(labels.shape)
    )


def written_twice(logits, labels):
    first, copy = logits[:1], logits * 3
    logits.div_(0.7)
    second = logits[:, 1:]
    second.mul_(2)
    each = (
        logits.log_softmax(-1) + second.logsumexp(-1).mean() + first[:, 2:].logsumexp(-1).sum() + copy.square().mean()
    )
    return each.gather(-1, labels[..., None])[..., 0]


def written_then_read(logits, labels):
    logits /= 0.7
    each = selective_of_newer(logits, labels)
    with torch.no_grad():
        entropy = -(logits.softmax(-1) * F.log_softmax(logits, -1)).sum(-1)
    return each * (1 + entropy) + logits.square().mean(-1)


def with_metrics(logits, labels):
    each = selective_of_newer(logits, labels)
    with torch.no_grad():
        entropy = -(logits.softmax(-1) * F.log_softmax(logits, -1)).sum(-1)
    return each * (1 + entropy)


def metrics_first(logits, labels):
    with torch.no_grad():
        hits = (logits.argmax(-1) == labels).float()
    return selective_of_newer(logits, labels) * (1 + hits)


def several(logits, labels):
    return (
        selective_of_newer(logits, labels)
        + F.cross_entropy(*flat(logits, labels), reduction="none").view(labels.shape)
        + F.cross_entropy(*flat(logits, labels))
    )


def without_history(logits, labels):
    with torch.no_grad():
        old = selective_of_newer(logits, labels)
        picked = logits.gather(-1, labels[..., None])
    new = selective_of_newer(logits, labels)
    return torch.exp(new - old) + (picked - logits.logsumexp(-1, keepdim=True))[..., 0] + (new - new.detach()) + old


#: how often logits are made of all rows, where that is known
BESIDE = {
    **dict.fromkeys((behind_log_probabilities, written_twice, written_then_read, metrics_first, without_history)),
    **{with_metrics: 1, several: 0},
}


def test_uses_beside_each_other(made):
    for write, count in BESIDE.items():
        model, reference = pair(of_plain_layers)
        assert_same_run(model, reference, lambda m: weighed(write, True)(m, zoo.batch()))
        assert count is None or (len(made) == count and head_tally(model).rewritten), write
        made.clear()


def test_a_graph_that_is_retained():
    def run(m):
        loss = weighed(SPELLINGS[spelling])(m, zoo.batch())
        if steps:
            loss.backward(retain_graph=True)
        return loss

    model, reference = pair(of_plain_layers)
    for steps, spelling in enumerate(("cross entropy", "nll", "gathered", "selective")):
        assert_same_run(model, reference, run)


def test_all_labels_masked_and_no_rows():
    model, reference = pair(of_plain_layers)

    def run(m):
        logits = m(zoo.batch()["input_ids"]).logits[:rows]
        labels = torch.full(logits.shape[:2], -100)
        lost = F.cross_entropy(*flat(logits, labels), reduction=reduction)
        lost = lost + F.nll_loss(flat(logits.log_softmax(-1), labels)[0], labels.flatten(), reduction=reduction)
        return lost.sum() + logits[:0].log_softmax(-1).gather(-1, labels[:0, :, None]).sum()

    for rows, reduction in ((2, "none"), (2, "sum"), (0, "none"), (0, "sum")):
        assert_same_run(model, reference, run)


def test_an_index_out_of_range_is_an_error():
    model, _ = pair(of_plain_layers)
    for write in (SPELLINGS["gathered"], SPELLINGS["selective"]):
        with pytest.raises((RuntimeError, IndexError)):
            write(model(zoo.batch()["input_ids"]).logits, zoo.batch()["labels"]).sum()


class Ops(TorchDispatchMode):
    """The package's own ops that are called inside."""

    def __init__(self):
        super().__init__()
        self.called = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.called += [func.__name__] if func.namespace == "tunecompile" else []
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{}, {"dim": 0}], ids=str)
def test_a_loop_over_rows_costs_one_product(options):
    """As a loop over a batch, of TRL's, and not one for each of its rows."""
    logits, given = deferred(head_of(linear()), states()), labels()
    with Ops() as ops:
        rows = [row.log_softmax(-1).gather(-1, of[:, None]).squeeze(-1) for row, of in zip(logits, given)]
        found = torch.stack(rows, **options)
    assert ops.called == ["linear_cross_entropy_rows.default"] and not isinstance(found, LazyTensor)
    expected = linear()(states()).log_softmax(-1).gather(-1, given[..., None])[..., 0]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def test_the_words_of_one_token_are_numbers():
    """They are read at once: nothing can be recorded on them, and there are as many as words."""
    ours, theirs, head = compared(lambda logits, _: torch.stack([word * 2 for word in logits[1, 3]]))
    torch.testing.assert_close(ours, theirs)
    assert head.made == 1
    words = deferred(head_of(linear()), states())[1, 3].unbind()
    assert len(words) == WORDS and not any(isinstance(word, LazyTensor) for word in words)
