"""What ranks tell each other of their plans, on a board that a test holds."""

import types

import pytest

from tunecompile.runtime.memory.across_ranks import PLAN, SHOWN, RankPlans


class Board:
    """What ranks tell each other."""

    def __init__(self, ranks, rank=0, plans=()):
        self.ranks, self.rank, self.plans, self.posted, self.told = ranks, rank, dict(plans), [], []

    def post(self, **what):
        self.posted.append(what)

    def news(self):
        return [{"rank": 3, "room": 40}]

    def publish(self, key, plan):
        self.told.append((key, plan))

    def published(self, key):
        return self.plans


def test_ranks_are_told_of_a_plan_that_is_there():
    ranks = RankPlans(Board(2))
    ranks.out_of_memory(types.SimpleNamespace(admitted=None))
    assert ranks.board.posted == []
    ranks.out_of_memory(types.SimpleNamespace(admitted=types.SimpleNamespace(room=123)))
    assert ranks.board.posted == [{"room": 123}] and ranks.news() == [(3, 40)]
    budgets = [types.SimpleNamespace(plans=2), types.SimpleNamespace(plans=1)]
    for _ in range(2):
        ranks.tell(budgets, lambda: "keep")
    assert ranks.board.told == [(PLAN, "keep")], "once a plan"
    alone = RankPlans(Board(1))
    alone.tell(budgets, lambda: "keep")
    assert alone.board.told == [] and alone.report_notes(budgets, "keep") == []


@pytest.mark.parametrize(
    "plans, words",
    [
        ({0: "x"}, "no other"),
        ({0: "x", 1: "keep", 2: "keep"}, "the same"),
        ({0: "x", 1: "keep"}, "1 have not told theirs"),
        ({1: "keep", 2: "again"}, "rank 2 follows another plan (again)"),
        (dict.fromkeys(range(1, SHOWN + 3), "again"), f"rank {SHOWN} follows another plan (again); and 2 ranks more"),
    ],
)
def test_the_report_compares_plans_of_ranks(plans, words):
    ranks = max(3, max(plans) + 1)
    (told,) = RankPlans(Board(ranks, plans=plans)).report_notes([types.SimpleNamespace(plans=1)], "keep")
    assert words in str(told) and str(ranks) in str(told)
    assert ("have not told" in str(told)) == (words.startswith("1 have"))
