"""Rows that begin alike in models with recurrences: all else is computed once, and states go on in each row."""

import copy

import pytest
import torch
from torch import nn

import tunecompile
from tests.support import zoo
from tests.support.batches import branches
from tests.support.compare import assert_close, assert_equal
from tests.support.models import hybrids
from tests.support.models.pairs import optimized, pair, without_mlps
from tests.support.notes import fell_back, has
from tests.support.reports import shared
from tunecompile.integrations.kernel_functions import meanings
from tunecompile.runtime.layers import variant
from tunecompile.runtime.layers.region import contexts_of
from tunecompile.runtime.model_state import state_of

pytest.importorskip("transformers.models.qwen3_5")
pytestmark = pytest.mark.filterwarnings("ignore")
LIMITS = dict(loss=1e-6, limit=1e-4, floor=1e-4)  #: transformers' rules are in fp32
FEW = dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
CONVOLUTIONS = dict(num_hidden_layers=2, layer_types=["conv"] * 2)
QUICK = {"qwen3_5": FEW, "lfm2": hybrids.ONE_OF_EACH["lfm2"], "granite_hybrid": {}}


def hybrid(family="qwen3_5", dtype=torch.float32, **more):
    model = hybrids.make(family, dtype, **{**QUICK.get(family, {}), **more}, use_cache=False)
    return without_mlps(model) if family == "lfm2" else model


def unequal_prompts():
    one, two = branches(40, 90, 3, 0, "left"), branches(70, 90, 2, 1, "right")
    return {name: torch.cat([one[name], two[name]]) for name in one}


SHAPES = ((40, 56, 3, "right"), (37, 90, 5, "left"), (64, 70, 2, "none"), (0, 60, 3, "right"), (33, 50, 4, ""))
#: batch, and how many of its tokens are copies
TREES = (
    (branches(40, 150, 6, 0, "right", more=[(4, 80), (2, 120)]), 5 * 40 + 3 * 40 + 40),
    (unequal_prompts(), 2 * 36 + 70),
)


@pytest.mark.parametrize(
    "family",
    ["lfm2", *(pytest.param(each, marks=pytest.mark.slow) for each in hybrids.HYBRIDS if each != "lfm2")],
)
def test_families(family):
    """Prompts and rows of any number and length, padded on either side or not, trees of turns, several prompts and rows
    that share nothing, by one graph of each kind of layer. All that is saved has as many tokens as the forest.
    """
    if not hybrids.is_there(family):
        pytest.skip("this version of transformers has no such model")
    ours, plain = pair(lambda: hybrid(family))
    batches = [branches(prefix, length, rows, seed, side) for seed, (prefix, length, rows, side) in enumerate(SHAPES)]
    for batch in batches:
        assert_close(zoo.step(ours, batch), zoo.step(plain, batch), loss=1e-5, limit=1e-3, floor=1e-3)
    count, tokens, of_rows = shared(ours)
    assert not fell_back(ours) and count >= 3 and of_rows > 1.3 * tokens, tunecompile.report(ours)
    assert not has(ours, "states-cross-documents")
    for batch, copies in TREES:
        before, found = shared(ours), zoo.step(ours, batch)
        assert_close(found, zoo.step(plain, batch), loss=1e-5, limit=1e-3, floor=1e-3)
        assert_equal(zoo.step(ours, batch), found)
        _, tokens, rows = (now - then for now, then in zip(shared(ours), before))
        assert rows == 2 * batch["attention_mask"].sum() and tokens == rows - 2 * copies
    if family in QUICK:
        assert all(region.compiles <= 3 for region in tunecompile.report(ours).regions)
    if family in ("lfm2", "qwen3_5"):
        (saved, *_) = (each.saved for each in contexts_of(state_of(ours).regions[0]) if each.saved)
        sizes = [{*size.node.expr.free_symbols} for _, size in saved if isinstance(size, torch.SymInt)]
        assert len(sizes) > 1 and len(set.union(*sizes)) == 1, saved


@pytest.mark.parametrize("family", ["lfm2", pytest.param("granite_hybrid", marks=pytest.mark.slow)])
def test_no_further_from_fp32_than_eager(family):
    """In bf16."""
    plain = hybrid(family, torch.bfloat16, **(CONVOLUTIONS if family == "lfm2" else {}))
    ours, wide, batch = optimized(copy.deepcopy(plain)), copy.deepcopy(plain).float(), branches(64, 100, 4, 0, "right")
    (loss, exact), (theirs, eager), (mine, found) = (zoo.step(each, batch) for each in (wide, plain, ours))
    allowed, made = (zoo.errors(each, exact, 1e-2) for each in (eager, found))
    assert (mine - loss).abs() <= (theirs - loss).abs() + 1e-3 * loss and shared(ours)[0] == 1
    assert {name: made[name] for name in made if made[name] > 1.5 * allowed[name] + 2e-3} == {}
    assert sum(made.values()) <= 1.1 * sum(allowed.values())


def test_adapters_under_checkpointing_and_a_budget():
    reference = zoo.adapt(hybrid("lfm2", **CONVOLUTIONS))
    model = copy.deepcopy(reference)
    for each in (reference, model):
        each.gradient_checkpointing_enable()
        each.enable_input_require_grads()
    model = optimized(model, memory="1 GiB")
    for seed in range(2):
        batch = branches(seed=seed, side="right")
        assert_close(zoo.step(model, batch), zoo.step(reference, batch), loss=1e-5, limit=1e-3, floor=1e-3)
    assert shared(model)[0] == 2, tunecompile.report(model)


# -- where copies stay ---------------------------------------------------------------------------------------------------


def kept(ours, plain, code):
    for seed in range(2):
        batch = branches(seed=seed, side="right")
        assert_close(zoo.step(ours, batch), zoo.step(plain, batch), **LIMITS)
    assert not shared(ours)[0] and has(ours, "prefixes-kept", reason=code), tunecompile.report(ours)


@pytest.mark.parametrize(
    "home, name, planted, code",
    [
        (variant, "DOCUMENTS", meanings.Documents(), "states-of-branches"),
        (meanings, "_in_rows", lambda tokens: tokens, "mixes-tokens"),
    ],
)
def test_planted_leaks_keep_rows_apart(monkeypatch, home, name, planted, code):
    """Ops that are not told of rows, or are not given them, would hand on states from one branch to the next."""
    monkeypatch.setattr(home, name, planted)
    kept(*pair(lambda: hybrid("lfm2", **CONVOLUTIONS)), code)


def test_a_layer_without_a_mask_that_draws():
    """One of experts or an MLP alone, between recurrences: each copy of a token draws for itself."""
    model = hybrids.make("nemotron_h", torch.float32, num_hidden_layers=2, layers_block_type=["mamba", "mlp"])
    model.model.layers[1].mixer.up_proj = nn.Sequential(model.model.layers[1].mixer.up_proj, nn.Dropout(0.5))
    ours = optimized(model)
    zoo.step(ours, branches(side="right"))
    assert not shared(ours)[0] and has(ours, "prefixes-kept", reason="draws-random"), tunecompile.report(ours)


@pytest.mark.slow
def test_generated_code():
    """Of Inductor: one graph for all shapes of a tree."""
    ours, plain = pair(hybrid, executor="inductor")
    for seed, (prefix, length, rows) in enumerate([(40, 56, 3), (64, 70, 2), (36, 100, 4)]):
        batch = branches(prefix, length, rows, seed, "right")
        assert_close(zoo.step(ours, batch), zoo.step(plain, batch), loss=1e-5, limit=1e-3, floor=1e-3)
    assert shared(ours)[0] == 3 and all(each.compiles == 1 for each in tunecompile.report(ours).regions)
