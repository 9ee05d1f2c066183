"""Mixtures of experts of many families: adapters over experts, all weights, and experts in 4 bits under adapters.

`benchmarks/suites/mixtures.py` prints the same as a table, in bfloat16 beside eager's distance from fp32, too.
"""

import copy
import inspect

import pytest
import torch

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


def by_loss(model, inputs, **options):
    """Router logits are those of every layer."""
    outputs = model(**inputs, **options)
    if options:
        assert len(outputs.router_logits) == 2 and outputs.aux_loss > 0
    return outputs.loss


@pytest.mark.parametrize(
    "family, trained, changes",
    [
        pytest.param("qwen3_moe", "router", {}, marks=pytest.mark.slow),  # tests/runtime/unpad/test_router_logits.py
        pytest.param("mixtral", "all", {"router_jitter_noise": 0.1}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", "adapters", {}, marks=pytest.mark.slow),
    ],
)
def test_losses_of_routers(family, trained, changes):
    """A router has gradients of its own where the loss weighs how evenly it loads its experts."""
    model = zoo.make(family, num_hidden_layers=2, router_aux_loss_coef=0.5, **changes)
    if trained != "all":
        over = [f"mlp.experts.{part}" for part in ("gate_up_proj", "down_proj")]
        model = zoo.adapt(model, target_modules=["q_proj"], target_parameters=over)
    routers = [p for name, p in model.named_parameters() if name.endswith(("gate.weight", "router.weight"))]
    for router in routers if trained == "router" else ():
        router.requires_grad_()
    ours = tunecompile.optimize(copy.deepcopy(model), executor="eager")
    for options in ({"output_router_logits": True}, {}):
        steps = []
        for each in (model, ours):
            torch.manual_seed(0)  # of the noise
            steps.append(zoo.step(each, zoo.batch(), loss=lambda m, inputs: by_loss(m, inputs, **options)))
        (loss, true), (mine, got) = steps
        assert len(routers) == 2 and abs(loss - mine) < 1e-5 and max(zoo.errors(got, true, 1e-3).values()) < 1e-4
        assert sum(name.endswith(("gate.weight", "router.weight")) for name in got) == (
            0 if trained == "adapters" else 2
        )
    report = tunecompile.report(ours)
    kinds = 4 if family == "gpt_oss" else 2  # every other layer has a window, which full batches of documents tell
    assert report.compiles == kinds and not find(report, *EAGER, *BROKEN, "compiled-without-rewrites"), report
    tunecompile.restore(ours)
    hooks = [hook for module in ours.modules() for hook in module._forward_hooks.values()]
    assert hooks and all(inspect.isfunction(hook) for hook in hooks)


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
