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
from sentence_transformers import SentenceTransformer, losses
from sentence_transformers.models import Normalize, Pooling, Transformer

pytestmark = pytest.mark.filterwarnings("ignore")
TINY = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=95)
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def bert() -> nn.Module:
    still = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return transformers.BertModel(transformers.BertConfig(**TINY, **still))


def qwen3() -> nn.Module:
    heads = dict(num_key_value_heads=1, head_dim=16, pad_token_id=0, use_cache=False)
    return transformers.Qwen3Model(transformers.Qwen3Config(**TINY, **heads))


def embedder(make, pooling: str, folder) -> SentenceTransformer:
    torch.manual_seed(0)
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate([*SPECIAL, *map(str, range(90))])}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    side = "left" if make is qwen3 else "right"
    make().save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", padding_side=side
    ).save_pretrained(folder)
    chain = [Transformer(str(folder), max_seq_length=64), Pooling(32, pooling_mode=pooling), Normalize()]
    return SentenceTransformer(modules=chain, device="cpu").train()


def features(model: SentenceTransformer, seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 20, (6,), generator=draw).tolist()
    texts = [" ".join(map(str, torch.randint(0, 90, (n,), generator=draw).tolist())) for n in lengths]
    return model.preprocess(texts)


def step(model: SentenceTransformer, loss, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    value = loss([features(model, seed), features(model, seed + 100)], None)
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
    report = compared(model, LOSSES[loss](model))
    assert find(report, "padding-removed") and not find(report, "padding-kept"), report.notes
    graphs = 1 + (loss == "cached" and make is bert)  # scores have none of their own where the model is causal
    assert {region.compiles for region in report.regions} == {graphs}, report


@pytest.mark.parametrize("pooling", ["cls", "max", "weightedmean", "mean_sqrt_len_tokens"])
def test_poolings(pooling, tmp_path):
    model = embedder(bert, pooling, tmp_path)
    assert find(compared(model, losses.MultipleNegativesRankingLoss(model), 1), "padding-removed")


def own(model):
    """A loss that reads tokens, at padding too."""
    return lambda given, _: sum(model(dict(each))["token_embeddings"].square().sum() for each in given)


def hooked(model):
    model[1].register_forward_pre_hook(lambda module, args: None)
    return losses.MultipleNegativesRankingLoss(model)


@pytest.mark.parametrize("make", [bert, qwen3])
@pytest.mark.parametrize("loss", [own, hooked])
def test_whoever_may_read_padding_gets_it(make, loss, tmp_path):
    model = embedder(make, "mean", tmp_path)
    report = compared(model, loss(model), 2)
    assert find(report, "padding-kept") and not find(report, "padding-removed"), report.notes


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
