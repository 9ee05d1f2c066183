"""How the plans of several ranks go together.

Every rank plans for its own device, budget and batch, and all plans are compatible: a plan says what lies on one device between a layer's forward and
its backward. Weights are gathered and gradients reduced around layers, in the same order under any plan, and what is sent inside a layer is never
sent again (`menu.sends`). So nobody has to wait for a plan to be agreed on.

Ranks of one training mostly need the same, though. What one finds out by running out of memory, the others take for theirs where their next step
begins: from the same room follow the same plans, and none of them waits while the next one fails and computes again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tunecompile.integrations.rank_store import RankStore
from tunecompile.runtime.memory.budget import RuntimePlanner

PLAN = "plan"  #: what ranks say on the board


class RankPlans:
    """Of one rank with the others."""

    def __init__(self, board: RankStore):
        self.board, self.told = board, 0

    def out_of_memory(self, budget: RuntimePlanner) -> None:
        """This rank was, and has its new plan, if there could be any."""
        if budget.admitted is not None:
            self.board.post(room=budget.admitted.room)

    def news(self) -> list[tuple[int, int]]:
        """Where a step begins: ranks that ran out of memory since the last one, and bytes for layers, head and loss that each has from there on."""
        return [(notice["rank"], notice["room"]) for notice in self.board.news()]

    def tell(self, budgets: Sequence[RuntimePlanner], plan: Callable[[], str]) -> None:
        """The others, where the plan is another than before."""
        plans = sum(budget.plans for budget in budgets)
        if self.board.ranks > 1 and plans != self.told:
            self.told = plans
            self.board.publish(PLAN, plan())

    def said(self, budgets: Sequence[RuntimePlanner], plan: str) -> list[str]:
        """For the report."""
        if self.board.ranks == 1:
            return []
        self.tell(budgets, lambda: plan)
        others = {rank: theirs for rank, theirs in self.board.published(PLAN).items() if rank != self.board.rank}
        apart = [f"rank {rank} follows another plan ({theirs})" for rank, theirs in others.items() if theirs != plan]
        silent = self.board.ranks - 1 - len(others)
        known = "; ".join(apart[:SHOWN]) + (f"; and {len(apart) - SHOWN} ranks more" if len(apart) > SHOWN else "") or (
            "all ranks follow the same plan" if not silent else "no other plan is known"
        )
        return [
            f"rank {self.board.rank} of {self.board.ranks}: {known}"
            + (f"; {silent} have not told theirs" if silent and others else "")
        ]


SHOWN = 3  #: ranks whose plans the report tells one by one
