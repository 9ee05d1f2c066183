"""Mixtures of experts of many families: adapters over experts, all weights, and experts in 4 bits under adapters.

`benchmarks/suites/mixtures.py` prints the same as a table, in bfloat16 beside eager's distance from fp32, too.
"""

import copy

import pytest

import tunecompile
from tests.support import zoo
from tests.support.models import expert_lists
from tests.support.models.mixtures import MIXTURES, WAYS, make, prepared
from tests.support.models.packed import named
from tests.support.notes import BROKEN, EAGER, find

pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")
QUICK = {("granitemoe", "lora")}  # experts in 4 bits: tests/integrations/test_packed_experts.py
CASES = [
    pytest.param(family, way, marks=() if (family, way) in QUICK else pytest.mark.slow)
    for family in MIXTURES
    for way in WAYS
]


@pytest.mark.parametrize("family, way", CASES)
def test_gradients_are_eagers_and_experts_are_found(family, way):
    pytest.importorskip("bitsandbytes")
    try:
        ours, dense = prepared(make(family), family, way)
    except AttributeError as error:  # of a later transformers
        pytest.skip(str(error))
    tunecompile.optimize(ours, executor="eager")
    (loss, true), (mine, got) = zoo.step(dense, zoo.batch()), zoo.step(ours, zoo.batch())
    errors = zoo.errors(named(ours, got), named(dense, true), 1e-3)
    assert max(errors.values()) < 1e-4 and abs(mine - loss) < 1e-5, errors
    report = tunecompile.report(ours)
    assert not find(report, *EAGER, *BROKEN, "compiled-without-rewrites"), report
    kinds = len(report.regions)
    counts = {match.family: (match.found, match.rewritten) for match in report.matches}
    assert counts["experts"] == (2 * kinds, 2 * kinds) and counts["expert_rows"] == (3 * kinds, 3 * kinds), report


@pytest.mark.slow
def test_idle_experts_have_a_gradient_of_0():
    """Six tokens have twelve experts at most, of sixteen."""
    model = zoo.make("qwen3_moe", num_hidden_layers=1, num_experts=16)
    ours = tunecompile.optimize(copy.deepcopy(model), executor="eager")
    (_, true), (_, got) = (zoo.step(each, zoo.batch(rows=1, length=6)) for each in (model, ours))
    for part in ("gate_up_proj", "down_proj"):
        mine, theirs = (each[f"model.layers.0.mlp.experts.{part}"] for each in (got, true))
        idle = theirs.flatten(1).abs().amax(1).eq(0)
        assert 4 <= idle.sum() < 16 and mine[idle].eq(0).all()
        assert (mine - theirs).norm() < 1e-5 * theirs.norm()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [expert_lists.Loop, expert_lists.LoopOverHit, expert_lists.Masks])
def test_experts_in_a_list_are_found_in_their_loop(kind):
    """The graph ends where a loop picks its tokens. An expert is compiled once, for all experts and numbers of tokens."""
    model, compiles = expert_lists.make(kind), []
    ours = tunecompile.optimize(copy.deepcopy(model), executor="eager")
    for seed in range(3):
        (loss, true), (mine, got) = (zoo.step(each, zoo.batch(seed=seed)) for each in (model, ours))
        assert max(zoo.errors(got, true).values()) < 1e-5 and abs(mine - loss) < 1e-5
        compiles.append(tunecompile.report(ours).compiles)
    report = tunecompile.report(ours)
    counts = {match.family: (match.found, match.rewritten) for match in report.matches}
    assert counts["lora"] == (4, 4) and counts["swiglu"] == (1, 1) and find(report, "graph-break"), report
    assert compiles[0] <= 6 and compiles == compiles[:1] * 3, compiles
