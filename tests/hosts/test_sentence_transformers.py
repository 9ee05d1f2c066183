"""Embeddings with sentence-transformers: gradients of its losses, and padding that its poolings do not read is removed.

`make test-hosts HOST=sentence_transformers` runs this in an environment of its own.
"""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn

import tunecompile
from tests.support.compare import assert_close
from tests.support.notes import BROKEN, find

pytest.importorskip("sentence_transformers")
from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from sentence_transformers.sparse_encoder.losses import SparseMultipleNegativesRankingLoss, SpladeLoss
from sentence_transformers.sparse_encoder.modules import SpladePooling

pytestmark = pytest.mark.filterwarnings("ignore")
TINY = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=95)
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def bert() -> nn.Module:
    still = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return transformers.BertModel(transformers.BertConfig(**TINY, **still))


def qwen3() -> nn.Module:
    heads = dict(num_key_value_heads=1, head_dim=16, pad_token_id=0, use_cache=False)
    return transformers.Qwen3Model(transformers.Qwen3Config(**TINY, **heads))


def saved(make, folder) -> str:
    """The folder of a model, with a tokenizer of numbers that pads decoders at the left."""
    torch.manual_seed(0)
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate([*SPECIAL, *map(str, range(90))])}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    side = "left" if make.__name__.startswith("qwen3") else "right"
    make().save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", padding_side=side
    ).save_pretrained(folder)
    return str(folder)


def embedder(make, pooling: str, folder) -> SentenceTransformer:
    chain = [Transformer(saved(make, folder), max_seq_length=64), Pooling(32, pooling_mode=pooling), Normalize()]
    return SentenceTransformer(modules=chain, device="cpu").train()


def texts(seed: int) -> list[str]:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 20, (6,), generator=draw).tolist()
    return [" ".join(map(str, torch.randint(0, 90, (n,), generator=draw).tolist())) for n in lengths]


def of_pairs(model, loss):
    """The loss of pairs of texts."""
    return lambda *pair: sum_of(loss([model.preprocess(each) for each in pair], None))


def sum_of(value: Tensor | dict[str, Tensor]) -> Tensor:
    return sum(value.values(), torch.zeros(())) if isinstance(value, dict) else value


def step(model: SentenceTransformer, loss, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    value = loss(texts(seed), texts(seed + 100))
    value.backward()
    return value.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def compared(model: SentenceTransformer, loss, batches: int = 3):
    """The report, with gradients as eager's (and those that are 0 in theory as small)."""
    expected = [step(model, loss, seed) for seed in range(batches)]
    tunecompile.optimize(model, executor="eager")
    for seed, each in enumerate(expected):
        largest = max(gradient.norm().item() for gradient in each[1].values())
        assert_close(step(model, loss, seed), each, floor=1e-3 * largest)
    report = tunecompile.report(model)
    assert not find(report, *BROKEN), report.notes
    return report


LOSSES = {
    "in batch": losses.MultipleNegativesRankingLoss,
    "cached": lambda model: losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=2),
    "matryoshka": lambda model: losses.MatryoshkaLoss(model, losses.MultipleNegativesRankingLoss(model), [32, 16]),
}


@pytest.mark.parametrize("make", [bert, qwen3])
@pytest.mark.parametrize("loss", LOSSES)
def test_losses(make, loss, tmp_path):
    model = embedder(make, "lasttoken" if make is qwen3 else "mean", tmp_path)
    report = compared(model, of_pairs(model, LOSSES[loss](model)))
    assert find(report, "padding-removed") and not find(report, "padding-kept"), report.notes
    graphs = 1 + (loss == "cached" and make is bert)  # scores have none of their own where the model is causal
    assert {region.compiles for region in report.regions} == {graphs}, report


@pytest.mark.parametrize("pooling", ["cls", "max", "weightedmean", "mean_sqrt_len_tokens"])
def test_poolings(pooling, tmp_path):
    model = embedder(bert, pooling, tmp_path)
    assert find(compared(model, of_pairs(model, losses.MultipleNegativesRankingLoss(model)), 1), "padding-removed")


def own(model):
    """A loss that reads tokens, at padding too."""
    return lambda *pair: sum(model(model.preprocess(each))["token_embeddings"].square().sum() for each in pair)


def hooked(model):
    model[1].register_forward_pre_hook(lambda module, args: None)
    return of_pairs(model, losses.MultipleNegativesRankingLoss(model))


@pytest.mark.parametrize("make", [bert, qwen3])
@pytest.mark.parametrize("loss", [own, hooked])
def test_whoever_may_read_padding_gets_it(make, loss, tmp_path):
    model = embedder(make, "mean", tmp_path)
    report = compared(model, loss(model), 2)
    assert find(report, "padding-kept") and not find(report, "padding-removed"), report.notes


def bert_words():
    return transformers.BertForMaskedLM(bert().config)


def bert_scores():
    return transformers.BertForSequenceClassification(one_label(bert()))


def qwen3_words():
    return transformers.Qwen3ForCausalLM(qwen3().config)


def qwen3_scores():
    return transformers.Qwen3ForSequenceClassification(one_label(qwen3()))


def one_label(model):
    model.config.num_labels = 1
    return model.config


def reranked(folder, *behind, **task):
    """A reranker's loss of pairs, and its model."""
    chain = [Transformer(folder, **task), *behind]
    model = CrossEncoder(modules=chain, device="cpu").train()
    loss = BinaryCrossEntropyLoss(model)
    return model, lambda *pair: loss([*pair], torch.arange(6) % 2)


@pytest.mark.parametrize("behind", [(), (LogitScore(7, 8),)], ids=["score", "logits"])
def test_rerankers_that_read_the_last_token(behind, tmp_path):
    make, task = (qwen3_words, "text-generation") if behind else (qwen3_scores, "sequence-classification")
    report = compared(*reranked(saved(make, tmp_path), *behind, transformer_task=task))
    assert find(report, "padding-removed") and not find(report, "padding-kept"), report.notes


def test_a_reranker_whose_head_is_not_known_keeps_padding(tmp_path):
    report = compared(*reranked(saved(bert_scores, tmp_path), transformer_task="sequence-classification"), 1)
    assert find(report, "padding-kept") and not find(report, "padding-removed"), report.notes


@pytest.mark.parametrize("pooling", ["max", "sum"])
def test_sparse_embeddings(pooling, tmp_path):
    words = Transformer(saved(bert_words, tmp_path), transformer_task="fill-mask")
    model = SparseEncoder(modules=[words, SpladePooling(pooling)], device="cpu").train()
    ranking = SparseMultipleNegativesRankingLoss(model)
    loss = SpladeLoss(model, ranking, document_regularizer_weight=1e-3, query_regularizer_weight=1e-3)
    report = compared(model, of_pairs(model, loss), 2)
    assert find(report, "padding-removed") and not find(report, "padding-kept"), report.notes


def test_what_is_restored_is_as_before(tmp_path):
    model = embedder(qwen3, "mean", tmp_path)
    before = [{**vars(module)} for module in model.modules()]
    tunecompile.restore(tunecompile.optimize(model, executor="eager"))
    assert [set(vars(module)) for module in model.modules()] == [set(each) for each in before]


@pytest.mark.parametrize("model, mode", [("qwen3-tiny", "lora"), ("xlm-roberta-tiny", "full")])
def test_benchmark(model, mode, tmp_path, monkeypatch):
    """Systems see the same texts by the trainer; ours compiles nothing later. (In this process.)"""
    from benchmarks.steps import embeddings

    def here(given, name, folder, *_):
        return embeddings.measure(SimpleNamespace(**{**vars(given), "systems": name, "folder": folder}))

    out = tmp_path / "steps.json"
    command = ["embeddings.py", "--model", model, "--mode", mode, "--systems", "hf,tunecompile", "--rows", "8"]
    monkeypatch.setattr(sys, "argv", [*command, "--length", "8", "--steps", "2", "--out", str(out)])
    monkeypatch.setattr(embeddings, "run", here)
    monkeypatch.setitem(embeddings.MODELS, model, still(embeddings.MODELS[model]))
    assert embeddings.main() == 0
    eager, ours = json.loads(out.read_text())["runs"]
    assert eager["losses"] == pytest.approx(ours["losses"], rel=1e-3) and len(ours["losses"]) == 10
    assert eager["trainable_parameters"] == ours["trainable_parameters"] and ours["shape"] == "8x~8"
    assert ours["compilations"] and not ours["late_compilations"] and not eager["compilations"]


def still(about):
    """A model of the benchmark without dropout, whose losses are no other in each system."""
    kind, fields = about
    return kind, fields | ({} if kind == "qwen3" else dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
