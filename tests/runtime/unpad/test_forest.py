"""Forests of rows, against the rows themselves."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.ops.checks import QUICK
from tunecompile.runtime.unpad.prefixes.forest import forest_of

ROWS = st.lists(st.lists(st.integers(0, 2), max_size=9), min_size=1, max_size=7).filter(lambda rows: any(rows))


def forest(rows, shortest=1, gain=0.0, keys=1):
    flat = torch.tensor([token for row in rows for token in row], dtype=torch.int64)
    return forest_of(flat.expand(keys, -1), [len(row) for row in rows], shortest, gain)


def paths(made):
    """For each document, the tokens of the N from the root to its last one."""
    found = []
    for number, (begin, end) in enumerate(itertools.pairwise(made.starts)):
        above = found[made.parents[number]] if made.parents[number] >= 0 else []
        found.append([*above, *range(begin, end)])
    return found


@given(rows=ROWS, shortest=st.integers(1, 5), keys=st.sampled_from([1, 2]))
@QUICK
def test_a_row_is_a_path_from_a_root(rows, shortest, keys):
    made = forest(rows, shortest, keys=keys)
    everything, at = [token for row in rows for token in row], 0
    values = dict(zip(made.tokens.tolist(), everything))
    known = paths(made)
    assert sorted(values) == list(range(made.count)), "a token of nobody"
    for row in filter(None, rows):
        tokens = made.tokens[at : at + len(row)].tolist()
        assert [values[token] for token in tokens] == row
        assert any(path[: len(tokens)] == tokens for path in known), "a row that is no path"
        at += len(row)


@given(rows=ROWS, shortest=st.integers(1, 5))
@QUICK
def test_all_below_a_document_follows_it(rows, shortest):
    made = forest(rows, shortest)
    for number, (parent, path) in enumerate(zip(made.parents, paths(made))):
        begin, end = made.starts[number : number + 2]
        assert parent < number and made.depths[number] == len(path) - (end - begin)
        below = [n for n, other in enumerate(paths(made)) if other[: len(path)] == path and n >= number]
        assert below == list(range(number, below[-1] + 1)) and made.ends[number] == made.starts[below[-1] + 1]


@given(rows=ROWS)
@QUICK
def test_tokens_that_prefixes_share_are_there_once(rows):
    """By the naive count: the prefixes that differ."""
    made = forest(rows)
    assert made.count == len({tuple(row[: at + 1]) for row in rows for at in range(len(row))})
    seen = {}
    for token, copy in zip(made.tokens.tolist(), made.copies.tolist()):
        seen.setdefault(token, []).append(copy)
    assert all(copies == list(range(len(copies))) for copies in seen.values())


def test_short_prefixes_stay_in_rows():
    rows = [[1, 2, 3, 4, 5], [1, 2, 3, 7, 8], [1, 9, 9, 9, 9], [1]]
    assert forest(rows, shortest=1).count == 5 + 2 + 4
    assert forest(rows, shortest=2).count == 5 + 2 + 5 + 1  # the first token is in each branch again
    assert forest(rows, shortest=4).count == 16


def test_it_has_to_pay():
    rows = [[1] * 30 + [2] * 70, [1] * 30 + [3] * 70]
    assert forest(rows, 8, gain=1.17).count == 170 and forest(rows, 8, gain=1.18) is None


def test_tokens_are_alike_in_all_that_they_are_known_by():
    keys = torch.tensor([[5, 6, 7, 5, 6, 7], [0, 1, 2, 0, 9, 2]])
    made = forest_of(keys, [3, 3], 1, 0.0)
    assert made.count == 5 and made.tokens.tolist()[3:] == [0, 3, 4]
