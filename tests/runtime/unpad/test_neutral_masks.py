"""Batches without padding by the graph of padded ones, in layers that keep their padding: gradients are eager's."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import tunecompile
from tests.support import zoo
from tests.support.batches import padded
from tests.support.compare import assert_close
from tests.support.matrix.compiled import bart
from tests.support.models.pairs import pair
from tests.support.notes import fell_back, find, has
from tests.support.rounding import whole
from tunecompile.runtime.layers import masked_graphs
from tunecompile.runtime.unpad.masks import neutral

tf = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
EXACT = dict(loss=1e-6, limit=1e-6)  #: of models in fp64, whose norms and losses are in fp32
SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=256)
OFF = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def bert(layers: int = 2):
    return tf.BertForSequenceClassification(
        tf.BertConfig(**{**SIZES, "num_hidden_layers": layers}, **OFF, num_labels=3, max_position_embeddings=64)
    )


def llama():
    sizes = dict(num_key_value_heads=2, num_labels=3, pad_token_id=0)
    return tf.LlamaForSequenceClassification(tf.LlamaConfig(**SIZES, **sizes))


def t5():
    sizes = dict(vocab_size=256, d_model=32, d_ff=48, d_kv=8, num_layers=2, num_heads=4, dropout_rate=0.0)
    return tf.T5ForConditionalGeneration(tf.T5Config(**sizes, pad_token_id=0, decoder_start_token_id=0))


def modernbert():
    sizes = dict(pad_token_id=0, local_attention=8, global_attn_every_n_layers=2, num_labels=3)
    return tf.ModernBertForSequenceClassification(tf.ModernBertConfig(**SIZES, **sizes))


def classes(batch: dict) -> dict:
    """A class a row."""
    return {**batch, "labels": torch.arange(len(batch["labels"])) % 3}


def translated(batch: dict) -> dict:
    """As many tokens as there are rows, and two."""
    rows = len(batch["labels"])
    return {**batch, "labels": zoo.batch(256, rows, rows + 2, seed=rows)["input_ids"]}


def follow(ours, plain, batches, as_task=classes, **limits) -> None:
    for batch in batches:
        assert_close(zoo.step(ours, as_task(batch)), zoo.step(plain, as_task(batch)), **{**EXACT, **limits})


def compiled(model) -> list[int]:
    return [region.compiles for region in tunecompile.report(model).regions]


WHOLE_FIRST = [whole(20), padded(), padded(3, 24, "left"), whole(24), whole(9, 5), whole(20)]
PADDED_FIRST = [padded(), whole(24), padded(3, 24, "left"), whole(9, 5), whole(20, 4)]


@pytest.mark.parametrize(
    "batches, joined",
    [(WHOLE_FIRST, 2), pytest.param(PADDED_FIRST, 3, marks=pytest.mark.slow)],
    ids=["whole", "padded"],
)
@pytest.mark.parametrize(
    "make, as_task, owners",
    [
        (bert, classes, ["BertEncoder"]),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                (llama, classes, ["LlamaModel"]),
                (bart, translated, ["BartEncoder", "BartDecoder"]),
                (t5, translated, ["T5Stack"]),
                (modernbert, classes, ["ModernBertModel"]),
            )
        ),
    ],
)
def test_two_graphs_serve_all_batches(make, as_task, owners, batches, joined):
    ours, plain = pair(lambda: make().double())
    follow(ours, plain, batches, as_task)
    assert set(compiled(ours)) == {2} and not fell_back(ours)
    assert {note.subject for note in find(ours, "whole-by-padded")} == {*owners}
    assert len(find(ours, "whole-by-padded")) == len(owners) and has(ours, "whole-by-padded", count=joined)


@pytest.mark.slow
def test_rows_that_lose_their_padding_and_see_both_ways():
    """Masked language models: padded rows are documents, and so are whole ones of another length."""

    def make():
        sizes = {name: size for name, size in SIZES.items()}
        return tf.BertForMaskedLM(tf.BertConfig(**sizes, **OFF, max_position_embeddings=64)).double()

    ours, plain = pair(make)
    follow(ours, plain, WHOLE_FIRST, dict)
    assert compiled(ours) == [2] and has(ours, "padding-removed", count=2) and has(ours, "whole-by-padded", count=2)


class Attention(nn.Module):
    """Attention both ways, and what a layer does beside it."""

    def __init__(self, width: int, place: int):
        super().__init__()
        self.linear, self.place = nn.Linear(width, width), place

    def forward(self, hidden, mask=None):
        heads = self.linear(hidden).unflatten(-1, (4, -1)).transpose(1, 2)
        made = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask).transpose(1, 2).flatten(2)
        return hidden + made if mask is not None else self.whole(hidden, made)

    def whole(self, hidden, made):
        return hidden + made


class DoesMore(Attention):
    def whole(self, hidden, made):
        return hidden + made.sin()


class SecondDoesMore(Attention):
    def whole(self, hidden, made):
        return hidden + (made.sin() if self.place == 1 else made)


class Model(nn.Module):
    def __init__(self, kind, layers: int = 3, width: int = 16, around=None):
        super().__init__()
        self.around = around
        self.embed, self.head = nn.Embedding(256, width), nn.Linear(width, 3)
        self.layers = nn.ModuleList(kind(width, place) for place in range(layers))

    def forward(self, input_ids, labels, attention_mask=None):
        hidden, mask = self.embed(input_ids), None
        if attention_mask is not None:
            rows, length = input_ids.shape
            mask = attention_mask[:, None, None, :].bool().expand(rows, 1, length, length)
        for layer in self.layers:
            hidden = layer(hidden, mask) if self.around is None else self.around(layer, hidden, mask)
        loss = F.cross_entropy(self.head(hidden[:, 0]), labels)
        return type("Output", (dict,), {"loss": loss})()


@pytest.mark.parametrize(
    "kind, graphs",
    [
        pytest.param(Attention, 2, marks=pytest.mark.slow),
        pytest.param(DoesMore, 3, marks=pytest.mark.slow),
        (SecondDoesMore, 3),
    ],
)
def test_a_layer_that_does_more_without_a_mask(kind, graphs):
    """All of them, or one among others: it has a graph of its own, and gradients are right."""
    ours, plain = pair(lambda: Model(kind).double())
    follow(ours, plain, [padded(), padded(3, 24), whole(18), whole(9, 5)], limit=1e-12, loss=1e-12)
    assert compiled(ours) == [graphs], tunecompile.report(ours)


def test_code_that_was_replaced_since(monkeypatch):
    """Under a mask it does more now: the graph that was compared is not what would run."""
    ours, plain = pair(lambda: Model(Attention).double())
    limits = dict(limit=1e-12, loss=1e-12)
    follow(ours, plain, [padded(), padded(3, 24), whole(18)], **limits)
    forward = Attention.forward
    monkeypatch.setattr(
        Attention, "forward", lambda self, hidden, mask=None: forward(self, hidden, mask) * (1 if mask is None else 2)
    )
    follow(ours, plain, [whole(22), padded(), whole(9, 5)], **limits)


@pytest.mark.slow
def test_many_get_a_graph_of_their_own(monkeypatch):
    monkeypatch.setattr(neutral, "OFTEN", 2)
    ours, plain = pair(lambda: Model(Attention).double())
    follow(ours, plain, [padded(), padded(3, 24), *map(whole, (18, 22, 26, 18, 20))], limit=1e-12, loss=1e-12)
    assert compiled(ours) == [3] and has(ours, "whole-by-padded", count=2)


@pytest.mark.slow
def test_two_whole_shapes_before_any_padded_one_have_their_graph():
    ours, plain = pair(lambda: Model(Attention).double())
    follow(ours, plain, [whole(18), whole(22), padded(), whole(26)], limit=1e-12, loss=1e-12)
    assert compiled(ours) == [3] and not has(ours, "whole-by-padded")


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"use_reentrant": False}, {"use_reentrant": True}])
def test_checkpoints_of_the_user_are_given_none(options):
    """They repeat layers in the backward with the arguments of the model."""
    around = functools.partial(checkpoint, **options)
    ours, plain = pair(lambda: Model(Attention, around=around).double())
    follow(ours, plain, WHOLE_FIRST, limit=1e-12, loss=1e-12)
    assert not has(ours, "whole-by-padded") and not fell_back(ours)


def test_a_graph_that_cannot_be_read_is_compiled(monkeypatch):
    """An error of ours in reading is no error of the user's."""

    def fails(*given):
        raise KeyError("an operation of another kind")

    monkeypatch.setattr(masked_graphs, "flows_of", fails)
    ours, plain = pair(lambda: Model(Attention).double())
    follow(ours, plain, [padded(), padded(3, 24), whole(18)], limit=1e-12, loss=1e-12)
    assert compiled(ours) == [3]


@pytest.mark.slow
def test_references_without_adapters():
    """They are given masks where the policy is: other kernels would round otherwise."""
    ours, plain = pair(lambda: zoo.adapt(bert().double(), target_modules=["query", "value"], task_type="SEQ_CLS"))
    for batch in map(classes, WHOLE_FIRST):
        scores = []
        for model in (ours, plain):
            with torch.no_grad(), model.disable_adapter():
                scores.append(model.train()(**{**batch, "labels": None}).logits)
        assert torch.allclose(*scores)
        follow(ours, plain, [batch], dict)
    assert has(ours, "whole-by-padded", count=2) and not fell_back(ours)
    (region,) = ours._tunecompile.regions
    wanting = [way for (way, kind), variant in region.variants.items() if kind.gives and not variant.graphs]
    assert {isinstance(way, str) for way in wanting} == {True, False}, "a policy's, and its reference's"


@pytest.mark.slow
def test_under_a_budget():
    ours, plain = pair(lambda: bert(4).double(), memory="1GiB")
    follow(ours, plain, WHOLE_FIRST)
    assert has(ours, "whole-by-padded", count=2) and not fell_back(ours)


def test_masks_of_one_row_are_written_out_once_for_all_layers():
    one, rows = torch.ones(1, 1, 6, 6, dtype=torch.bool).expand(2, 1, 6, 6), torch.ones(2, 1, 6, 6, dtype=torch.bool)
    call = type("Call", (), {"masks_in_one_form": {}})()
    (hidden, first), named = neutral.in_one_form(call, (torch.zeros(2, 6, 4), one), {"mask": one, "other": rows})
    (_, second), _ = neutral.in_one_form(call, (hidden, one), {})
    assert first is second is named["mask"] and first.is_contiguous() and not first._is_view() and first.equal(one)
    assert named["other"] is rows
    (view,), _ = neutral.in_one_form(None, (rows[:, :, :],), {})
    assert not view._is_view() and view.data_ptr() == rows.data_ptr()


@pytest.mark.gpu
def test_on_a_gpu_shapes_are_recorded_under_masks():
    """Bound by launches: whole rows and padded ones of few shapes, one after another."""
    ours, plain = pair(lambda: bert().cuda().bfloat16(), executor="inductor")
    batches = [whole(32, 4), padded(4, 32), *[each for _ in range(4) for each in (whole(24, 4), padded(4, 24))]]
    for batch in batches:
        batch = {key: value.cuda() for key, value in classes(batch).items()}
        assert_close(zoo.step(ours, dict(batch)), zoo.step(plain, dict(batch)), loss=2e-2, limit=1e-1, floor=0.1)
    assert compiled(ours) == [2] and not fell_back(ours) and has(ours, "whole-by-padded", count=4)
