"""The tokens of a rollout's rows, and the choice of the next ones. No model runs."""

import pytest
import torch

from tunecompile.runtime.rollouts import prompt
from tunecompile.runtime.rollouts.choice import Choice
from tunecompile.runtime.rollouts.decode_step import Rows

PROMPT = torch.tensor([[5, 6], [7, 8], [9, 9]])


@pytest.mark.parametrize("pad", [0, 3])
def test_rows_end_once(pad):
    """Also where padding is the token that ends them. The last row is nobody's, and has ended from the beginning."""
    rows = Rows(PROMPT, 6, torch.tensor([3]), torch.tensor(pad), count=2)
    for chosen in ([1, 3, 4], [2, 1, 1], [3, 2, 2]):
        rows.append(torch.tensor(chosen))
    assert rows.last[:, 0].tolist() == [3, pad, pad]
    assert rows.tokens[:, 2:5].tolist() == [[1, 2, 3], [3, pad, pad], [pad] * 3]
    assert rows.lengths.tolist() == [5, 3, 6] and rows.ended.all() and int(rows.at) == 5


def test_rows_that_nothing_but_a_criterion_ends():
    rows = Rows(PROMPT, 5, None, None, count=3)
    rows.append(torch.tensor([1, 3, 4]))
    rows.end(torch.tensor([False, True, False]))
    rows.append(torch.tensor([2, 2, 2]))
    rows.end(True)
    assert rows.tokens[:, 2:4].tolist() == [[1, 2], [3, 2], [4, 2]] and rows.lengths.tolist() == [4, 3, 4]


def test_one_row_without_a_distribution_is_told():
    choice = Choice([], sample=True)
    assert choice.pick(torch.zeros(2, 3)).shape == (2,) and choice.check() is None
    choice.pick(torch.stack([torch.zeros(3), torch.full((3,), -torch.inf)]))
    choice.pick(torch.zeros(2, 3))
    with pytest.raises(RuntimeError, match="probability tensor"):
        choice.check()


@pytest.mark.parametrize(
    ("begins", "found"),
    [
        ([0, 0, 0], [([0, 1, 2], 0)]),
        ([7, 0, 4], [([1, 2], 0), ([0], 7)]),  # less than half as long
        ([3, 5, 4], [([0, 2, 1], 3)]),
        ([0] * 5, [([0, 1], 0), ([2, 3], 0), ([4], 0)]),  # as many tokens as a group has
    ],
)
def test_rows_of_similar_lengths_are_computed_together(begins, found, monkeypatch):
    monkeypatch.setattr(prompt, "TOKENS", 33 if len(begins) == 3 else 24)
    assert prompt.groups(begins, 11) == found
