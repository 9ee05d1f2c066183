"""Packed batches, whose positions begin anew inside a row: no mask is made, and loss and gradients are those of the mask."""

import copy

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.batches import packed
from tests.support.compare import assert_same_flattened
from tests.support.models.pairs import attending, pair
from tests.support.notes import find, has
from tests.support.reports import told_apart
from tunecompile.runtime.unpad.decision import refused_now

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    "family, changes",
    [("gemma3", {"sliding_window": 4}), ("llama", {}), ("qwen3", {}), ("mistral", {"sliding_window": 4})],
)
@pytest.mark.slow
def test_families(family, changes):
    model, reference = pair(lambda: zoo.make(family, use_cache=False, **changes))
    assert_same_flattened(model, reference, packed((5, 1, 9)))
    assert_same_flattened(model, reference, packed((7, 2, 3, 1), (1, 4, 6, 2), seed=1))
    assert told_apart(model) == 2 and model.config._attn_implementation == "sdpa"


def test_each_sequence_is_as_if_it_were_alone():
    model = tunecompile.optimize(attending(use_cache=False), executor="eager")
    inputs = packed((5, 8, 3))
    del inputs["labels"]
    together = model(**inputs).logits
    assert told_apart(model) == 1
    tunecompile.restore(model)
    for part, ids in zip(together.split((5, 8, 3), 1), inputs["input_ids"].split((5, 8, 3), 1)):
        assert torch.allclose(part, model(input_ids=ids).logits, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("quantized", [True, False])
def test_adapters_under_checkpointing(quantized):
    pytest.importorskip("peft")

    def build():
        torch.manual_seed(0)
        model = attending(use_cache=False)
        model = zoo.adapt(zoo.quantize(model, torch.float32) if quantized else model)
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable()
        return model

    model, reference = pair(build)
    assert_same_flattened(model, reference, packed((6, 5, 5), (1, 1, 14)))
    assert told_apart(model) == 1


@pytest.mark.slow
def test_one_compilation_for_any_number_of_sequences():
    model, reference = pair(lambda: attending(use_cache=False))
    for number, lengths in enumerate([(5, 6), (3, 3, 3, 2), (1,) * 5 + (4,), (12, 30), (16, 1, 1)]):
        assert_same_flattened(model, reference, packed(lengths, seed=number))
    report = tunecompile.report(model)
    assert told_apart(model) == 5 and all(
        region.compiles <= 2 and not region.recompiles for region in report.regions
    ), report


@pytest.mark.slow
def test_what_is_not_packed_goes_on_as_it_came():
    """One sequence a row; and a mask, beside which transformers does not look at positions."""
    model, reference = pair(lambda: attending(use_cache=False))
    assert_same_flattened(model, reference, packed((16,), (16,)))
    inputs = packed((7, 9))
    assert_same_flattened(model, reference, inputs | {"attention_mask": torch.ones_like(inputs["input_ids"])})
    assert not told_apart(model) and not find(model, "packed-without-mask", "packing-kept")


def test_what_keeps_its_mask_says_why():
    model, reference = pair(lambda: attending(use_cache=False))
    assert_same_flattened(model, reference, packed((7, 9)) | {"output_hidden_states": True})
    assert has(model, "packing-kept", reason="output-required"), tunecompile.report(model)
    assert has(model, "output-required", subject="output_hidden_states")


def test_other_attention_stays():
    owner = attending().model
    for name in ("flash_attention_2", "flex_attention", "mine"):
        owner.config._attn_implementation_internal = name
        said = refused_now(owner)
        assert said is not None and said.code == "other-attention" and said.subject == name


@pytest.mark.slow
def test_sequences_that_see_each_other_go_on_doing_so():
    """With a cache, which is the default of a configuration, transformers does not look at positions."""
    model, reference = pair(attending)
    inputs = packed((7, 9))
    assert_same_flattened(model, reference, inputs)
    assert not told_apart(model) and has(model, "packing-kept", reason="sequences-see-each-other")
    assert_same_flattened(model, reference, inputs | {"use_cache": False})
    assert told_apart(model) == 1


@pytest.mark.slow
def test_logits_may_be_read_beside_the_loss():
    """Nothing is given up, so nothing is taken back."""
    reference = attending(use_cache=False).train()
    model = tunecompile.optimize(copy.deepcopy(reference), executor="eager")
    for _ in range(2):
        inputs = packed((7, 9))
        assert torch.allclose(model(**inputs).logits, reference(**inputs).logits, atol=1e-5)
    assert told_apart(model) == 2


@pytest.mark.slow
def test_a_collator_of_transformers():
    from transformers import DataCollatorWithFlattening

    model, reference = pair(lambda: attending(use_cache=False))
    rows = [{"input_ids": zoo.batch(256, 1, length, seed=length)["input_ids"][0].tolist()} for length in (4, 9, 6)]
    assert_same_flattened(model, reference, dict(DataCollatorWithFlattening()(rows)))
    both = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)  # as TRL's does by default
    for count in (3, 2, 3):
        assert_same_flattened(model, reference, dict(both(rows[:count])))
    report = tunecompile.report(model)  # what it says beside the mask is another kind of call, whatever it says
    assert told_apart(model) == 4 and report.compiles == 2 and not report.regions[0].recompiles, report


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.slow
def test_a_verified_step(use_cache):
    """What is compared sees the same tokens: with a cache, as in an eager step with one."""
    reference = attending(use_cache=use_cache).train()
    expected = reference(**packed((7, 9))).loss.item()
    found = tunecompile.verify(tunecompile.optimize(copy.deepcopy(reference), executor="eager"), packed((7, 9)))
    assert (
        found.passed
        and found.losses["optimized"] == pytest.approx(expected, rel=1e-6)
        and found.losses["eager"] == pytest.approx(expected, rel=1e-6)
    ), found
