"""Attention that a family's own code writes out (`attn_implementation="eager"`): found in each, and as near to fp32 as eager code is."""

import copy

import pytest

import tunecompile
from tests.support import zoo

pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

FAMILIES = ("llama", "mistral", "qwen3", "gemma2", "gemma3", "phi3", "olmo2", "cohere", "glm4", "granite")
OLDER = ("starcoder2", "gpt_neox", "gpt2")
#: their blocks return their weights; BLOOM's product is added to ALiBi, GPT-Neo fills scores, CodeGen divides masked ones
RETURNED = {"gptj": "document_attention", "codegen": "document_attention"}
RETURNED |= dict.fromkeys(("mpt", "gpt_neo", "bloom"), "attention")  # ALiBi, and a mask of its own


@pytest.mark.parametrize("family", FAMILIES + OLDER)
def test_gradients_are_no_further_from_fp32_than_eagers(family):
    found = compared(zoo.make(family, attn_implementation="eager", num_hidden_layers=2))
    assert found == {"document_attention": (1, 1)}


@pytest.mark.parametrize("family", RETURNED)
def test_weights_that_are_returned_and_not_read_are_not_made(family):
    found = compared(zoo.make(family, attn_implementation="eager", num_hidden_layers=2))
    assert found == {RETURNED[family]: (1, 1)}


def compared(model) -> dict[str, tuple[int, int]]:
    """Attention that was found and rewritten in a model, whose gradients are compared."""
    plain = model.bfloat16().train()
    wide, ours = copy.deepcopy(plain).float(), tunecompile.optimize(copy.deepcopy(plain), executor="eager")
    inputs = zoo.batch(256, 2, 24)
    (_, true), (_, theirs), (_, got) = (zoo.step(model, inputs) for model in (wide, plain, ours))
    eagers, errors = (sum(zoo.errors(each, true, 1e-3).values()) for each in (theirs, got))
    assert errors <= 1.1 * eagers
    matches = [m for m in tunecompile.report(ours).matches if m.family in ("document_attention", "attention")]
    return {m.family: (m.found, m.rewritten) for m in matches}
