"""Attention that a family's own code writes out (`attn_implementation="eager"`): found in each, and as near to fp32 as eager code is."""

import copy

import pytest

import tunecompile
from tests.support import zoo

pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

FAMILIES = ("llama", "mistral", "qwen3", "gemma2", "gemma3", "phi3", "olmo2", "cohere", "glm4", "granite")
OLDER = ("starcoder2", "gpt_neox", "gpt2")


@pytest.mark.parametrize("family", FAMILIES + OLDER)
def test_gradients_are_no_further_from_fp32_than_eagers(family):
    plain = zoo.make(family, attn_implementation="eager", num_hidden_layers=2).bfloat16().train()
    wide, ours = copy.deepcopy(plain).float(), tunecompile.optimize(copy.deepcopy(plain), executor="eager")
    inputs = zoo.batch(256, 2, 24)
    (_, true), (_, theirs), (_, got) = (zoo.step(model, inputs) for model in (wide, plain, ours))
    eagers, errors = (sum(zoo.errors(each, true, 1e-3).values()) for each in (theirs, got))
    assert errors <= 1.1 * eagers
    (found,) = [m for m in tunecompile.report(ours).matches if m.family == "document_attention"]
    assert (found.found, found.rewritten) == (1, 1)
