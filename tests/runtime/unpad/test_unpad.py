"""Padded batches without their padding: loss and gradients as the padded run gives them, and the padded run wherever in doubt."""

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.batches import padded
from tests.support.compare import assert_same_flattened
from tests.support.models.pairs import attending, pair
from tests.support.notes import has
from tests.support.reports import flattened

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


# -- the same numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["right", pytest.param("left", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "family, changes",
    [
        ("llama", {}),
        pytest.param("qwen3", {}, marks=pytest.mark.slow),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("gemma3", {"sliding_window": 4}),
                ("mistral", {"sliding_window": 4}),
                ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
            )
        ),
    ],
)
def test_families(family, changes, side):
    model, reference = pair(lambda: zoo.make(family, **changes))
    for seed in range(2):
        assert_same_flattened(model, reference, padded(3 + seed, 20 + seed, side, seed))
    kinds = set(getattr(model.config, "layer_types", None) or ["all"])
    assert flattened(model) == 2 and tunecompile.report(model).compiles == len(kinds)
    assert model.config._attn_implementation == reference.config._attn_implementation == "sdpa"
    for m in (model, reference):
        m.eval()
    inputs = padded(side=side)
    assert torch.allclose(model(**inputs).logits, reference(**inputs).logits, atol=1e-5)
    prompt = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"].flip(1)}
    assert torch.equal(
        model.generate(**prompt, max_new_tokens=3, do_sample=False),
        reference.generate(**prompt, max_new_tokens=3, do_sample=False),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"modules_to_save": ["embed_tokens"]}, {"trainable_token_indices": [1, 2]}],
    ids=str,
)
def test_an_adapter_that_trains_tokens(options):
    """A copy of the table beside the table, or a few rows of it: it still embeds nothing but tokens."""
    pytest.importorskip("peft")
    model, reference = pair(lambda: zoo.adapt(attending(), target_modules=["q_proj"], **options))
    assert_same_flattened(model, reference, padded(), limit=1e-4)
    assert flattened(model) == 1, tunecompile.report(model)


@pytest.mark.slow
def test_positions_and_embeddings_of_the_callers():
    model, reference = pair(attending)
    inputs = padded(side="left")
    inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    assert_same_flattened(model, reference, inputs)
    states = []
    for m in (model, reference):
        batch = padded(side="left")
        embedded = m.get_input_embeddings()(batch.pop("input_ids")).detach().requires_grad_()
        m.train()(inputs_embeds=embedded, **batch).loss.backward()
        states.append(embedded.grad)
        m.zero_grad(set_to_none=True)
    torch.testing.assert_close(*states)
    assert flattened(model) == 2


def test_logits_that_are_read_are_those_of_the_whole_batch():
    """Hidden states at padding would be zero without it: so the layers run again, with it. Nobody else holds what the
    layers' owner returned: its last norm's result is a view of a larger row."""
    (model, reference), inputs = pair(attending), padded()
    for _ in range(2):
        torch.testing.assert_close(model(**inputs).logits, reference(**inputs).logits, rtol=1e-4, atol=1e-5)
    assert flattened(model) == 1 and has(model, "padding-kept", reason="logits-read")


# -- any loop -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_exception_leaves_everything_as_it_was():
    model, reference = pair(attending)

    def fail(*_):
        raise KeyError("of the user's hook")

    handle = model.model.layers[1].register_forward_hook(fail)
    with pytest.raises(KeyError):
        model.train()(**padded())
    assert model.config._attn_implementation == "sdpa"
    handle.remove()
    assert_same_flattened(model, reference, padded())
    tunecompile.restore(model)
    assert (
        not [m for m in model.modules() if m._compiled_call_impl is not None]
        and not model._forward_hooks
        and not model._forward_pre_hooks
    )
