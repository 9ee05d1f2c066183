"""Names of compiled functions."""

from tunecompile.planner.solver import KEEP, KEEP_WEIGHTS, RECOMPUTE, Plan
from tunecompile.runtime.layers.region import _suffix


def test_each_plan_has_its_own_name():
    """It tells variants apart in profiles and in Dynamo's log."""
    names = {
        KEEP: "",
        RECOMPUTE: "_checkpointed",
        KEEP_WEIGHTS: "_keeps_weights",
        Plan(tiles=2): "_in_2",
        Plan(frozenset({3, 1})): "_recomputes_1_3",
        Plan(None, tiles=4, attention=True): "_checkpointed_in_4_attention",
    }
    assert {plan: _suffix(plan) for plan in names} == names
