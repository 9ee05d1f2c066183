"""Packed batches, whose positions begin anew inside a row: no mask is made, and loss and gradients are those of the mask."""

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.batches import packed
from tests.support.compare import assert_same_flattened
from tests.support.models.pairs import attending, pair
from tests.support.reports import told_apart
from tunecompile.runtime.unpad.decision import refused_now

tf = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


def test_each_sequence_is_as_if_it_were_alone():
    model = tunecompile.optimize(attending(use_cache=False), executor="eager")
    inputs = packed((5, 8, 3))
    del inputs["labels"]
    together = model(**inputs).logits
    assert told_apart(model) == 1
    tunecompile.restore(model)
    for part, ids in zip(together.split((5, 8, 3), 1), inputs["input_ids"].split((5, 8, 3), 1)):
        assert torch.allclose(part, model(input_ids=ids).logits, atol=1e-5)


def test_other_attention_stays():
    owner = attending().model
    for name in ("flash_attention_2", "flex_attention", "mine"):
        owner.config._attn_implementation_internal = name
        said = refused_now(owner)
        assert said is not None and said.code == "other-attention" and said.subject == name


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


def qwen_vl():
    config = tf.Qwen2_5_VLTextConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4},
    )
    torch.manual_seed(0)
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel

    return Qwen2_5_VLTextModel(config)


def test_positions_in_four_rows():
    """Text, time, height and width: of packed rows the model itself says which tokens see each other."""
    made = packed((7, 9))
    positions = made["position_ids"][None].expand(4, -1, -1)
    states = []
    for m in pair(qwen_vl):
        hidden = m.train()(input_ids=made["input_ids"], position_ids=positions).last_hidden_state
        hidden.square().mean().backward()
        states.append((hidden.detach(), m.layers[0].self_attn.q_proj.weight.grad.clone()))
    for found, expected in zip(*states):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
