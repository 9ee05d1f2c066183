"""Rows that have ended are left out: tokens are those of the whole batch."""

from collections import Counter

import pytest
import torch

from tests.runtime.rollouts.calls import greedy, pair, prompts
from tunecompile.runtime.rollouts import tail
from tunecompile.runtime.rollouts.decode_step import Rows
from tunecompile.runtime.rollouts.tail import Tail

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.shared_graphs]


def ends_of(model, given, tokens, **settings):
    """Tokens that end rows one after the other, but for the first two, if they have any of their own."""
    torch.manual_seed(0)
    free = model.generate(**given, **greedy(max_new_tokens=tokens, eos_token_id=None, **settings))[:, 11:].tolist()
    kept = {*free[0], *free[1]}
    own = ([t for t in row[2 * i :] if t not in kept] for i, row in enumerate(free))
    return [row[0] for row in own if row]


@pytest.fixture
def numbers(monkeypatch):
    """Of rows, to which batches were cut."""
    made, cut = [], Tail.cut
    monkeypatch.setattr(tail, "PAYS", 0)
    monkeypatch.setattr(tail, "REST", 4)
    monkeypatch.setattr(tail, "FEWEST", 1)
    monkeypatch.setattr(Tail, "cut", lambda self, wanted: (made.append(wanted), cut(self, wanted))[1])
    return made


@pytest.mark.parametrize(("family", "sample"), [("llama", True), ("lfm2", False)])
def test_tokens_of_the_whole_batch(numbers, monkeypatch, family, sample):
    model, ours, loop = pair(family)
    given, settings = prompts(11), {"do_sample": sample, "temperature": 0.8} if sample else {}
    ends = ends_of(ours, given, 60, **settings)
    settings = greedy(max_new_tokens=60, eos_token_id=ends, **settings)
    torch.manual_seed(0)
    found = ours.generate(**given, **settings)
    assert numbers and numbers == sorted(numbers, reverse=True), numbers
    monkeypatch.setattr(tail, "PAYS", 10**6)
    torch.manual_seed(0)
    expected = (ours if sample else model).generate(**given, **settings)
    assert torch.equal(found, expected)
    assert loop.calls == (3 if sample else 2)


def test_when_a_batch_is_cut():
    """To half or less, with tokens to come, once code for it pays."""
    rows, missed = Rows(torch.zeros(48, 5, dtype=torch.int64), 500, None, None, 48), Counter()
    asked = [Tail(rows, missed).fewer(left, at, 256) for left, at in ((25, 9), (20, 9), (3, 450), (20, 9), (20, 9))]
    assert asked == [None, None, None, None, None] and missed == {}
    asked = [Tail(rows, missed).fewer(left, at, 256) for left, at in ((16, 9), (3, 450), (9, 9), (16, 9), (2, 9))]
    assert asked == [None, None, None, 16, None] and missed == {16: 768, 8: 256}
