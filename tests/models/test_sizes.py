"""One graph of a kind of layer for all numbers of tokens: nothing that a layer is compiled to asks how many there are.

What a GPU shows is in test_gpu_sizes.py.
"""

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.models import hybrids, mixtures
from tests.support.reports import flattened
from tests.support.sizes import TOKENS, compiled_for_gpu, in_half, rows_of
from tunecompile.planner.solver import KEEP, RECOMPUTE, Plan

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")
pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore")

FIRST = 40  #: tokens of the batch that is compiled for
TILES, ATTENTION, WEIGHTS = Plan(None, 4), Plan(None, attention=True), Plan(weights=True)


def dense(family: str = "llama", **changes):
    """With adapters over 4-bit weights; norms are so wide that they have a template."""
    count = {} if "layer_types" in zoo.NAMES[family][1] else {"num_hidden_layers": 2}
    model = zoo.make(family, **count, **changes)
    return in_half(zoo.adapt(zoo.quantize(model, torch.bfloat16), r=8))


def traced(model, plan=KEEP, tokens=(FIRST,), least=2):
    """The graphs that a model's layers are compiled to, as for a GPU, by batches of so many tokens.

    None asks how many there are, from `least` on.
    """
    torch._dynamo.reset()
    with compiled_for_gpu(plan) as graphs:
        tunecompile.optimize(model, executor="eager")
        for count in tokens:
            zoo.step(model, rows_of(count))
    assert flattened(model) == len(tokens), tunecompile.report(model)
    if any(getattr(module, "out_features", 0) == 1 for module in model.modules()):
        least = FIRST  # a CPU's products ask whether so narrow ones have less than 32 numbers
    for graph in graphs:
        assert not graph.notes and graph.broken([n for n in (2, FIRST, *TOKENS) if n >= least]) == []
    return graphs


def test_all_numbers_of_tokens():
    model = dense("gemma3", sliding_window=64)
    (graph,) = traced(model, tokens=TOKENS[:-2])  # larger ones by their guards alone
    assert ("lora_mlp_backward", "joined") in graph.providers


@pytest.mark.slow
def test_recurrences():
    model = in_half(hybrids.adapt(hybrids.make("mamba", torch.bfloat16), r=8))
    traced(model)


#: padded batches of these keep their padding
KEPT = ("mpt", "gpt_neo", "bloom", "falcon")


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in zoo.NAMES if family not in KEPT])
def test_families(family):
    traced(dense(family))


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [family for family in mixtures.MIXTURES if family != "phimoe"]
)  # PEFT wraps its router
def test_experts_in_4_bits(family):
    model = zoo.quantize(mixtures.make(family).bfloat16(), torch.bfloat16)
    tunecompile.quantize_experts(model)
    traced(in_half(zoo.adapt(model, r=8)))


@pytest.mark.slow
@pytest.mark.parametrize("plan", [RECOMPUTE, ATTENTION, WEIGHTS, TILES], ids=lambda plan: plan.key)
def test_plans(plan):
    # a tile has two tokens or more, as it has on a GPU, whose rows are filled up to 128
    (graph,) = traced(dense(hidden_size=1024), plan, least=2 * plan.tiles)
    tiled = "lora_mlp_tiled" if plan.tiles > 1 else "lora_mlp"
    assert {(tiled, "joined"), (f"{tiled}_backward", "joined")} <= graph.providers


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "starcoder2"])
def test_gradients_of_norms(family):
    (graph,) = traced(zoo.make(family, num_hidden_layers=2, hidden_size=1024).bfloat16())
    assert {("rms_norm_backward", "triton"), ("layer_norm_backward", "triton")} & graph.providers
