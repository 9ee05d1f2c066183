"""Plans of several ranks.

Every rank plans for its own device, budget and batch, and all plans are compatible: a plan decides what lies on one
device between a layer's forward and its backward. Weights are gathered and gradients reduced around layers, in the same
order under any plan, and communication inside a layer is never recomputed (`candidates.communicates`). So no rank has
to wait for an agreement.

Ranks of one training mostly need the same plan, though. When one runs out of memory, the others take over its room
where their next step begins. The same plans follow, and no rank waits while the next one fails and recomputes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tunecompile.integrations.rank_store import RankStore
from tunecompile.notes import Note, note
from tunecompile.runtime.memory.budget import RuntimePlanner

PLAN = "plan"  #: the key under which ranks publish their plans


class RankPlans:
    """One rank's exchange with the others."""

    def __init__(self, board: RankStore):
        self.board, self.told = board, 0

    def out_of_memory(self, budget: RuntimePlanner) -> None:
        """Tell the others that this rank ran out of memory, and the room of its new plan, if it has one."""
        if budget.admitted is not None:
            self.board.post(room=budget.admitted.room)

    def news(self) -> list[tuple[int, int]]:
        """Ranks that ran out of memory since the last step, and bytes that each has for layers, head and loss."""
        return [(notice["rank"], notice["room"]) for notice in self.board.news()]

    def tell(self, budgets: Sequence[RuntimePlanner], plan: Callable[[], str]) -> None:
        """Publish the plan where it changed."""
        plans = sum(budget.plans for budget in budgets)
        if self.board.ranks > 1 and plans != self.told:
            self.told = plans
            self.board.publish(PLAN, plan())

    def report_notes(self, budgets: Sequence[RuntimePlanner], plan: str) -> list[Note]:
        """For the report."""
        if self.board.ranks == 1:
            return []
        self.tell(budgets, lambda: plan)
        others = {rank: theirs for rank, theirs in self.board.published(PLAN).items() if rank != self.board.rank}
        apart = [f"rank {rank} follows another plan ({theirs})" for rank, theirs in others.items() if theirs != plan]
        silent = self.board.ranks - 1 - len(others)
        if not others or not (apart or silent):
            known = note("same-plan" if others else "no-other-plan")
        else:
            more = [f"and {len(apart) - SHOWN} ranks more"] if len(apart) > SHOWN else []
            unknown = [f"{silent} have not told theirs"] if silent else []
            known = note("other-plans", detail="; ".join([*apart[:SHOWN], *more, *unknown]))
        return [note("rank-plans", str(self.board.rank), known, ranks=self.board.ranks)]


SHOWN = 3  #: ranks whose plans the report lists one by one
