"""How often layers are compiled, whatever batches come: as few graphs as there are kinds of calls, and a second for changing sizes."""

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.compare import assert_same_step
from tests.support.models.pairs import pair, small
from tunecompile.runtime.dynamic_shapes import DynamicShapes

tf = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

SHAPES = ((4, 20), (3, 33), (2, 47), (5, 15), (4, 20), (2, 90))
SEQ2SEQ = dict(vocab_size=256, d_model=32, dropout=0.0, pad_token_id=0, decoder_start_token_id=2, bos_token_id=1)


def compiles(model) -> list[int]:
    return [region.compiles for region in tunecompile.report(model).regions]


def bart():
    torch.manual_seed(0)
    halves = {
        f"{half}_{name}": value
        for half in ("encoder", "decoder")
        for name, value in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))
    }
    return tf.BartForConditionalGeneration(tf.BartConfig(**SEQ2SEQ, **halves, eos_token_id=2, attention_dropout=0.0))


def translation(rows: int, length: int, target: int, seed: int) -> dict:
    source, labels = (zoo.batch(256, rows, n, seed=seed + n)["input_ids"] for n in (length, target))
    return {"input_ids": source, "labels": labels}


def test_batches_of_many_shapes():
    model, reference = pair(small)
    for seed, (rows, length) in enumerate(SHAPES):
        assert_same_step(model, reference, zoo.batch(256, rows, length, seed=seed))
    assert compiles(model) == [2]


def test_an_encoders_length_that_the_decoders_does_not_follow():
    model, reference = pair(bart)
    for seed, ((rows, length), target) in enumerate(zip(SHAPES, (12, 17, 9, 22, 12, 40))):
        inputs = translation(rows, length, target, seed)
        assert model(**inputs).loss.item() == pytest.approx(reference(**inputs).loss.item(), rel=1e-5)
    assert compiles(model) == [2, 2]


def test_a_reference_without_adapters_has_one_graph_for_all_shapes():
    """As DPO runs it beside each training step."""
    pytest.importorskip("peft")
    model, reference = pair(lambda: zoo.adapt(small()))
    counts = []
    for seed, (rows, length) in enumerate(SHAPES[:4]):
        inputs, logits = {**zoo.batch(256, rows, length, seed=seed), "use_cache": False}, []
        for m in (model, reference):
            with torch.no_grad(), m.disable_adapter():
                logits.append(m(**inputs).logits)
        torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)
        assert_same_step(model, reference, inputs)
        counts.append(sum(compiles(model)))
    assert counts == [2, 3, 3, 3]


def learnt(*calls: dict, at_once: bool = False) -> dict:
    """Which dimensions are marked at the last of these calls; values are shapes."""
    shapes = DynamicShapes()
    for call in calls:
        tensors = [(where, torch.empty(size, dtype=dtype)) for where, (dtype, *size) in call.items()]
        (shapes.mark_all if at_once else shapes.mark)(tensors, shapes.of(tensors))
    return {where: sorted(getattr(tensor, "_dynamo_weak_dynamic_indices", ())) for where, tensor in tensors}


FLOAT, INT = torch.float32, torch.int64


def text(rows: int, length: int, encoder: int, heads: int = 4, images: int = 3) -> dict:
    return {
        0: (FLOAT, rows, length, 32),
        "states": (FLOAT, rows, encoder, 32),
        "mask": (FLOAT, rows, 1, length, encoder),
        "bias": (FLOAT, 1, heads, length, length),
        "table": (FLOAT, 1, length, 8),
        "offsets": (INT, images),
    }


ALL = {0: [0, 1], "states": [0, 1], "mask": [0, 2, 3], "bias": [2, 3], "table": [1], "offsets": [0]}


@pytest.mark.parametrize(
    "calls, expected",
    [
        ([text(5, 20, 30)], {where: [0] if where == "offsets" else [] for where in ALL}),
        ([text(5, 20, 30), text(5, 20, 30)], {where: [0] if where == "offsets" else [] for where in ALL}),
        ([text(5, 20, 30), text(3, 33, 41)], ALL),
        ([text(5, 20, 30), text(5, 20, 31)], ALL),  # an encoder's length alone
        ([text(4, 20, 30), text(3, 33, 41)], ALL),  # heads equal the rows by chance
        ([text(5, 20, 20), text(3, 33, 41)], ALL),  # so do lengths
        ([text(5, 20, 30), {0: (FLOAT, 3, 33, 32)}, text(2, 9, 12)], ALL),
        ([text(5, 20, 30), text(3, 33, 41), text(5, 20, 30)], {w: [0] if w == "offsets" else [] for w in ALL}),
    ],
)
def test_which_sizes_are_symbols(calls, expected):
    assert learnt(*calls) == expected


def test_forwards_that_score_have_symbols_at_once():
    assert learnt(text(5, 20, 30), at_once=True) == ALL


def test_an_argument_that_comes_later_follows_at_once():
    """A mask, say: its encoder's length was seen to change before."""
    plain = [
        {0: (FLOAT, rows, length, 32), "states": (FLOAT, rows, n, 32)} for rows, length, n in ((4, 9, 8), (3, 7, 6))
    ]
    assert learnt(*plain, text(2, 20, 30))["mask"] == [0, 2, 3]
