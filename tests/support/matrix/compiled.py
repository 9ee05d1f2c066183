"""Families compiled for real, in shapes that change: five batches one after another, against fp32 beside eager.

`run` gives the row of a cell. On a CPU it goes operation by operation, to try the cell itself.
"""

from __future__ import annotations

import copy
import gc
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import tunecompile
from tests.support import zoo
from tests.support.batches import padded
from tests.support.models import hybrids, images, mixtures, speech

MODES = ("lora", "nf4", "dora", "full")
VOCABULARY = 1024
SIZES = dict(
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=VOCABULARY,
    max_position_embeddings=512,
)
#: of families that have these
WIDER = {"head_dim": 64, "ffn_dim": 512, "word_embed_proj_dim": 256, "linear_key_head_dim": 32} | {
    "linear_value_head_dim": 32,
    "mamba_d_head": 64,
    "mamba_n_heads": 8,
    "mamba_d_ssm": 512,
    "mamba_headdim": 64,
    "n_mamba_heads": 8,
    "mamba_head_dim": 64,
    "mamba_num_heads": 8,
}
MOST, WORST, LEAST = 1.1, 3.0, 5e-3  #: of eager's error: the median parameter's, any one's, and what rounding excuses
NOISE = 1e-3  #: of the largest gradient
Batches = list[dict[str, Tensor]]


@dataclass(frozen=True)
class Family:
    """Models of one kind, and what they are trained on."""

    build: Callable[[], nn.Module]
    batches: Callable[[], Batches]
    targets: str | list[str] = "all-linear"  #: the linears that are adapted
    modes: tuple[str, ...] = MODES


def text() -> Batches:
    """Other rows, other lengths, padding on either side, and the first shape again."""
    return [
        zoo.batch(VOCABULARY, 2, 64, seed=1),
        padded(3, 48, "right", seed=2, vocabulary=VOCABULARY),
        padded(4, 80, "left", seed=3, vocabulary=VOCABULARY),
        zoo.batch(VOCABULARY, 5, 96, seed=4),
        zoo.batch(VOCABULARY, 2, 64, seed=5),
    ]


def of_text(family: str, **changes: Any) -> Callable[[], nn.Module]:
    _, settings = zoo.NAMES[family]
    return partial(zoo.make, family, **_sizes(settings), **changes)


def _sizes(settings: dict) -> dict:
    return {**SIZES, **{name: size for name, size in WIDER.items() if name in settings}}


def of_mixture(family: str) -> Callable[[], nn.Module]:
    return partial(mixtures.make, family, **_sizes(mixtures.MIXTURES[family][1]) | _kept(mixtures.MIXTURES[family][1]))


def _kept(settings: dict) -> dict:
    """What stays as the family's own table has it."""
    return {name: settings[name] for name in ("num_key_value_heads", "num_hidden_layers") if name in settings}


def of_hybrid(family: str) -> Callable[[], nn.Module]:
    settings = hybrids.HYBRIDS[family][1]
    types = settings.get("layer_types") or settings.get("layers_block_type")
    layers = {"num_hidden_layers": len(types)} if types else {}
    return partial(hybrids.make, family, torch.float32, **_sizes(settings) | layers | _kept(settings))


def of_images(make: Callable) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        model = make()[0]
        for parameter in model.parameters():  # gates and projections that begin at zero let no gradient through
            if parameter.dim() and not parameter.any():
                nn.init.normal_(parameter, std=0.3)
        return model

    return build


def several_sizes() -> Batches:
    """Images of several sizes, two and one in a batch; the first sizes again."""
    return [images.images_of(images.GRIDS[at]) for at in (0, 1, 2, 7, 0)]


def whole_and_padded(make: Callable) -> Callable[[], Batches]:
    def batches() -> Batches:
        torch.manual_seed(1)
        inputs = make()[1]
        wide = {**inputs, **{key: _longer(inputs[key], 8) for key in _BY_TOKEN if key in inputs}}
        return [inputs, images.padded(inputs), wide, images.padded(wide), inputs]

    return batches


_BY_TOKEN = ("input_ids", "labels", "token_type_ids", "cross_attention_mask")


def _longer(values: Tensor, count: int) -> Tensor:
    """Its last tokens once more."""
    return torch.cat([values, values[:, -count:]], 1)


def translations() -> Batches:
    made = []
    for seed, (rows, length, target) in enumerate(
        ((2, 32, 12), (3, 24, 20), (4, 40, 9), (2, 56, 16), (2, 32, 12)), start=1
    ):
        batch = padded(rows, length, seed=seed) if seed in (2, 3) else zoo.batch(256, rows, length, seed=seed)
        batch["labels"] = zoo.batch(256, rows, target, seed=seed)["input_ids"]
        made.append(batch)
    return made


def classified() -> Batches:
    """A class a row."""
    made = [{**batch, "labels": torch.arange(len(batch["labels"])) % 3} for batch in text()]
    return [{"attention_mask": torch.ones_like(batch["input_ids"]), **batch} for batch in made]


def classifier() -> nn.Module:
    import transformers as tf

    torch.manual_seed(0)
    return tf.LlamaForSequenceClassification(tf.LlamaConfig(**SIZES, num_labels=3, pad_token_id=0))


def bert() -> nn.Module:
    import transformers as tf

    torch.manual_seed(0)
    off = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    sizes = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
    return tf.BertForSequenceClassification(tf.BertConfig(**sizes, **off, num_labels=3))


def bart() -> nn.Module:
    import transformers as tf

    torch.manual_seed(0)
    tokens = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2)
    return tf.BartForConditionalGeneration(
        tf.BartConfig(vocab_size=256, d_model=64, dropout=0.0, attention_dropout=0.0, **speech.SIDES, **tokens)
    )


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
DENSE = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "granite", "olmo2", "cohere2"),
    *("smollm3", "starcoder2", "glm4", "stablelm", "nemotron", "hunyuan", "opt", "gpt2", "gpt_neox", "falcon", "phi"),
)
EXPERTS = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe", "granitemoe", "olmoe", "gemma4")
HYBRIDS = ("qwen3_5", "olmo_hybrid", "lfm2", "bamba", "granite_hybrid")
#: where not all linears can be adapted: PEFT refuses `out_proj` beside a scan, and DoRA of experts
NARROW = ("qwen3_next", "falcon_h1", "nemotron_h")
OTHERS = {
    "Qwen2.5-VL": Family(of_images(images.qwen2_5_vl), several_sizes, [*images.TEXT, "qkv"]),
    "Qwen3-VL": Family(of_images(images.qwen3_vl), several_sizes, [*images.TEXT, "qkv", "linear_fc1", "linear_fc2"]),
    "Gemma 3 with images": Family(of_images(images.gemma3), whole_and_padded(images.gemma3), [*images.TEXT, "fc1"]),
    "Llama 3.2 Vision": Family(of_images(images.mllama), whole_and_padded(images.mllama), [*images.TEXT, "fc1"]),
    "T5": Family(of_images(images.t5), translations, ["q", "k", "v", "o"], ("lora", "dora", "full")),
    "BART": Family(bart, translations, ["q_proj", "v_proj", "fc1", "fc2"]),
    "Whisper": Family(speech.whisper, speech.batches, ["q_proj", "v_proj", "fc1", "fc2"]),
    "ModernBERT": Family(of_images(images.modernbert), whole_and_padded(images.modernbert), ["Wqkv", "Wo", "Wi"]),
    "BERT, classification": Family(bert, classified, ["query", "value", "dense"]),
    "Llama, classification": Family(classifier, classified, [*images.TEXT]),
}
FAMILIES: dict[str, Family] = {
    **{name: Family(of_text(name), text) for name in DENSE},
    **{name: Family(of_mixture(name), text, ATTENTION) for name in EXPERTS},
    **{name: Family(of_hybrid(name), text) for name in HYBRIDS},
    **{name: Family(of_hybrid(name), text, [*ATTENTION, "in_proj"]) for name in NARROW},
    **OTHERS,
}
CELLS = [(name, mode) for mode in MODES for name, family in FAMILIES.items() if mode in family.modes]


def prepared(name: str, mode: str, device: str) -> nn.Module:
    """A family's model as it is trained in this way, in bf16."""
    family = FAMILIES[name]
    model = family.build().to(device, torch.bfloat16)
    if mode == "nf4":
        model = zoo.quantize(model, torch.bfloat16)
    if mode != "full":
        model = zoo.adapt(
            model, r=16, lora_alpha=16, target_modules=family.targets, task_type=None, use_dora=mode == "dora"
        )
    return model.train()


class EagerFails(Exception):
    """The model cannot be trained so, without us either."""


def run(name: str, mode: str, device: str) -> dict[str, Any]:
    """The row of a cell.

    Raises:
        EagerFails: so does the plain model.
    """
    torch._dynamo.reset()
    batches = [{key: value.to(device) for key, value in batch.items()} for batch in FAMILIES[name].batches()]
    batches = [in_half(batch) for batch in batches]
    try:
        plain = prepared(name, mode, device)
        exact, model = zoo.in_fp32(plain), copy.deepcopy(plain)
        truth = [zoo.step(exact, _in_single(batch)) for batch in batches]
        eagers = [zoo.step(plain, dict(batch)) for batch in batches]
    except Exception as error:
        raise EagerFails(f"{type(error).__name__}: {error}") from error
    tunecompile.optimize(model, executor="inductor" if device == "cuda" else "eager")
    ours, seconds = [], []
    for batch in batches:
        begun = time.perf_counter()
        ours.append(zoo.step(model, dict(batch)))
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(round(time.perf_counter() - begun, 3))
    row = {**_judged(ours, eagers, truth), "seconds": seconds, **_told(model)}
    del model, plain, exact, ours, eagers, truth
    gc.collect()
    return row


def in_half(batch: dict) -> dict:
    return {k: v.bfloat16() if v.is_floating_point() else v for k, v in batch.items()}


def _in_single(batch: dict) -> dict:
    return {k: v.float() if v.is_floating_point() else v for k, v in batch.items()}


def _judged(ours: list, eagers: list, truth: list) -> dict[str, Any]:
    """Errors over all batches together, and what is wrong."""
    mine, theirs = (_errors(steps, truth) for steps in (ours, eagers))
    floor = LEAST / WORST
    worst = max(mine, key=lambda name: mine[name] / max(theirs[name], floor))
    losses = [(loss.item(), plain.item(), real.item()) for (loss, _), (plain, _), (real, _) in zip(ours, eagers, truth)]
    off = max((abs(loss - real) - 2 * abs(plain - real)) / abs(real) for loss, plain, real in losses)
    own, eager, ratio = median(mine.values()), median(theirs.values()), mine[worst] / max(theirs[worst], floor)
    wrong = [
        *([f"the median gradient is {own:.4f} from fp32, eager's {eager:.4f}"] if own > MOST * eager + 1e-4 else []),
        *([f"{worst} is {mine[worst]:.4f} from fp32, eager's {theirs[worst]:.4f}"] if not ratio < WORST else []),
        *([f"losses {losses}"] if not off < 2**-7 else []),
    ]
    return {"error": own, "eager_error": eager, "worst": ratio, "loss_error": max(off, 0.0), "wrong": wrong}


def _errors(steps: list, truth: list) -> dict[str, float]:
    """Of each gradient, relative, in the root of the mean square of all batches."""
    apart, size = defaultdict(float), defaultdict(float)
    for (_, found), (_, real) in zip(steps, truth, strict=True):
        assert found.keys() == real.keys(), sorted(found.keys() ^ real.keys())[:4]
        for name, gradient in real.items():
            apart[name] += (found[name].double() - gradient.double()).square().sum().item()
            size[name] += gradient.double().square().sum().item()
    least = NOISE**2 * max(size.values())
    return {name: (apart[name] / max(size[name], least)) ** 0.5 for name in size}


def _told(model: nn.Module) -> dict[str, Any]:
    """What the report says: compilations and pieces of each kind of layer, rewrites, notes."""
    report = tunecompile.report(model)
    frames = [
        Counter(context.frame for backend in region.backends.values() for context in backend.contexts)
        for region in model._tunecompile.regions
    ]
    return {
        "compiles": [region.compiles for region in report.regions],
        "pieces": [len(counts) for counts in frames],
        "compile_seconds": [round(region.seconds, 2) for region in report.regions],
        "recompiled": [reason[:160] for region in report.regions for reason in region.recompiles],
        "found": sum(m.found for m in report.matches),
        "rewritten": sum(m.rewritten for m in report.matches),
        "notes": [f"{getattr(each, 'code', '')}: {each}"[:240] for each in report.notes],
    }
