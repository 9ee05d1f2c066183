"""On a real GPU: one graph of a kind of layer for all numbers of tokens, and gradients no further from fp32 than eager's."""

import copy

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.models.gpu import against_fp32, build, median
from tests.support.notes import EAGER, find
from tests.support.reports import flattened
from tests.support.sizes import TOKENS, in_half, rows_of

pytest.importorskip("bitsandbytes")
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_one_graph(checkpointing):
    model = in_half(build("llama", "qlora", max_position_embeddings=1024))
    if checkpointing:
        model.gradient_checkpointing_enable()
    reference, plain = zoo.in_fp32(model), copy.deepcopy(model)
    tunecompile.optimize(model)
    batches = [rows_of(tokens, 4099, "cuda") for tokens in TOKENS]
    zoo.step(model, batches[0])  # of one token, which has no other to predict
    mine, theirs = against_fp32(reference, [model, plain], batches[1:])
    report = tunecompile.report(model)
    assert report.compiles == 1 and flattened(model) == len(TOKENS), report
    assert not find(report, *EAGER, "compiled-without-rewrites"), report
    assert {m.family: m.rewritten for m in report.matches}["lora_mlp"] == 1, report
    assert median(mine.values()) <= 1.02 * median(theirs.values())
    floor = torch.finfo(torch.bfloat16).eps
    assert max(error / max(theirs[name], floor) for name, error in mine.items()) < 1.25
