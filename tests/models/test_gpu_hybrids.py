"""Delta rules by their templates in whole models: gradients no further from fp32 than eager's, padded or not."""

import copy

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.batches import branches, padded
from tests.support.compare import equal_bits
from tests.support.models import hybrids
from tests.support.models.gpu import against_fp32, median
from tests.support.notes import EAGER, find
from tests.support.reports import flattened, shared
from tunecompile.runtime.cuda_graphs import launch_bound
from tunecompile.runtime.model_state import state_of

pytestmark = pytest.mark.gpu
#: nothing but the rule's heads is a power of two
WIDE = dict(
    hidden_size=576,
    intermediate_size=1536,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    vocab_size=4099,
    linear_num_key_heads=3,
    linear_num_value_heads=6,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
)


SHARED = {name: size for name, size in WIDE.items() if not name.startswith("linear_")}
FAMILIES = {  #: family -> what its config needs, and the op in its layers
    "qwen3_5": (WIDE, "gated_delta_rule"),
    "granite_hybrid": (
        dict(
            **{name: size for name, size in SHARED.items() if name != "head_dim"},
            shared_intermediate_size=1536,
            mamba_n_heads=18,
            mamba_d_head=64,
            mamba_d_state=128,
            mamba_chunk_size=256,
        ),
        "ssd_scan",
    ),
    "kimi_linear": (
        dict(hidden_size=192, intermediate_size=320, vocab_size=4099, linear_head_dim=64, linear_num_heads=3),
        "channel_delta_rule",
    ),
    "mamba": (dict(hidden_size=192, vocab_size=4099, state_size=16, time_step_rank=12), "selective_scan"),
}


def crossed(mode, side):
    """Each mode and each side is in a quick case; compiling all pairs of them takes minutes."""
    quick = (mode, side) in [("lora", None), ("full", "right"), ("lora", "left")]
    return pytest.param(mode, side, marks=[] if quick else pytest.mark.slow)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode, side", [crossed(m, s) for m in ("lora", "full") for s in (None, "right", "left")])
def test_no_further_from_fp32_than_eager(family, mode, side):
    settings, op = FAMILIES[family]
    model = hybrids.make(family, torch.bfloat16, **settings).cuda()
    model = hybrids.adapt(model, r=16, lora_alpha=16) if mode == "lora" else model
    reference, plain = zoo.in_fp32(model), copy.deepcopy(model)
    tunecompile.optimize(model)
    batches = [
        padded(*shape, side, seed, "cuda", 4099) if side else zoo.batch(4099, *shape, "cuda", seed=seed)
        for seed, shape in enumerate(3 * ((4, 256), (3, 391)))
    ]
    theirs, mine = against_fp32(reference, (plain, model), batches)
    ratios = {name: mine[name] / max(theirs[name], torch.finfo(torch.bfloat16).eps) for name in mine}
    worst = max(ratios, key=ratios.__getitem__)
    print(f"median {median(mine.values()) / median(theirs.values()):.3f}, {worst}: {ratios[worst]:.3f}")
    assert median(mine.values()) <= 1.1 * median(theirs.values())
    assert ratios[worst] < 2, (worst, mine[worst], theirs[worst])
    told = tunecompile.report(model)
    assert not find(told, *EAGER) and flattened(model) == (6 if side else 0), told
    found = {name for region in told.regions for name in region.providers}
    assert {f"{op}: triton", f"{op}_backward: triton"} <= found, told


@pytest.mark.parametrize("family", ["qwen3_5", "granite_hybrid"])
def test_prefixes_that_rows_share(family):
    """Recurrences read whole rows of the forest, by their templates; two runs give the same bits."""
    settings, op = FAMILIES[family]
    model = hybrids.make(family, torch.bfloat16, **settings).cuda()
    reference, plain = zoo.in_fp32(model), copy.deepcopy(model)
    tunecompile.optimize(model)
    batches = [branches(200, 256 + 77 * seed, 4, seed, "right") for seed in range(4)]
    batches = [{name: value.cuda() for name, value in batch.items()} for batch in batches]
    theirs, mine = against_fp32(reference, (plain, model), batches)
    assert median(mine.values()) <= 1.1 * median(theirs.values())
    assert equal_bits(zoo.step(model, batches[0]), zoo.step(model, batches[0]))
    told = tunecompile.report(model)
    assert not find(told, *EAGER) and shared(model)[0] == 6, told
    found = {name for region in told.regions for name in region.providers}
    assert {f"{op}: triton", f"{op}_backward: triton", "branch_rows: reference"} <= found, told


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_recorded_as_graphs(family, monkeypatch):
    """What is replayed is what eager computes, in shapes that come again."""
    monkeypatch.setattr(launch_bound.Clock, "decide", lambda self: True)
    settings, _ = FAMILIES[family]
    reference = hybrids.adapt(hybrids.make(family, torch.float32, **settings).cuda())
    model = tunecompile.optimize(copy.deepcopy(reference))
    for seed, length in enumerate([128] * 5 + [96] * 4 + [128, 96] * 2):
        inputs = zoo.batch(4099, 2, length, "cuda", seed=seed)
        (loss, ours), (expected, theirs) = zoo.step(model, inputs), zoo.step(reference, inputs)
        torch.testing.assert_close(loss, expected, rtol=1e-3, atol=1e-3)
        assert max(zoo.errors(ours, theirs, 1e-2).values()) < 2e-2, (seed, length)
    places = [place for graph in state_of(model).replays.graphs for place in graph.places.values()]
    assert sum(place.recording is not None for place in places) >= 2
