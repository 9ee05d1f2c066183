"""Steps of models beside eager's, a row each: whether batches ran without their padding, and if not, why.

Who may look at a padded batch: hooks, a second loss, code of the user's in the place of a model's own, checkpoints.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tunecompile
from tests.support import zoo
from tests.support.batches import packed, padded
from tests.support.models.pairs import adapted_layers, attending, token_wise
from tests.support.notes import has
from tests.support.reports import flattened
from tests.support.runs import EXACT, Run, cases, checkpoints

tf = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


def uncached() -> nn.Module:
    return attending(use_cache=False)


TWO = (padded(seed=0), padded(seed=1))
SIDES = (padded(), padded(seed=1, side="left"))
LLAMA = "transformers.models.llama.modeling_llama"

# -- losses of the user's own --------------------------------------------------------------------------------------------


def of_logits(read: Callable, own: bool = False) -> Callable:
    def loss(model, batch):
        out = model(**batch)
        return read(out.logits) + (out.loss if own else 0)

    return loss


def after_metrics(logits: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits.argmax(-1)
    return logits.logsumexp(-1).mean()


class Pooling(nn.Module):
    """A loss of its own beside cross-entropy, from hidden states wherever they stand."""

    def __init__(self, read):
        super().__init__()
        self.inner, self.read = token_wise(), read

    def forward(self, input_ids, attention_mask, labels):
        hidden = self.inner.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
        logits = self.inner.lm_head(hidden)[:, :-1]
        return SimpleNamespace(loss=F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()) + self.read(hidden))


class Handing(nn.Module):
    """Hands labels on: its loss is the model's own."""

    def __init__(self):
        super().__init__()
        self.inner = attending()

    def forward(self, **inputs):
        return self.inner(**inputs)


def unmasked_loss(model):
    model.loss_function = lambda logits, labels, **_: F.cross_entropy(
        logits.flatten(0, 1), labels.clamp(min=0).flatten()
    )


def other_labels(model):
    model.register_forward_pre_hook(lambda mod, a, k: (a, {**k, "labels": k["input_ids"]}), with_kwargs=True)


def reads_mask(model):
    mask = "attention_mask"
    model.model.register_forward_pre_hook(lambda mod, a, k: (a, {**k, mask: k[mask] * 1}), with_kwargs=True)


# -- modules of the user's own -------------------------------------------------------------------------------------------


class Squeezed(nn.Module):
    """A gate for all tokens from the mean of them."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.gate = inner, nn.Linear(64, 64)

    def forward(self, x):
        return self.inner(x) * torch.sigmoid(self.gate(x.mean(1, keepdim=True)))


class Centred(tf.LlamaModel):
    """What owns the layers would see a batch of one row."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        out = super().forward(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs)
        out.last_hidden_state = out.last_hidden_state - out.last_hidden_state.mean(1, keepdim=True)
        return out


class Two(tf.LlamaModel):
    """Two lists of layers in one owner."""

    def __init__(self, config):
        super().__init__(config)
        self.more = nn.ModuleList(copy.deepcopy(layer) for layer in self.layers)

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        layers, self._modules["layers"] = self.layers, nn.ModuleList([*self.layers, *self.more])
        count, self.config.num_hidden_layers = self.config.num_hidden_layers, 6
        try:
            return super().forward(input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs)
        finally:
            self._modules["layers"], self.config.num_hidden_layers = layers, count


def two_stacks(model):
    model.model = Two(model.config)


def centred(model):
    model.model.__class__ = Centred


def behind(make: Callable) -> Callable:
    def change(model):
        model.model.norm = make(model.model.norm)

    return change


def inside(make: Callable) -> Callable:
    def change(model):
        for layer in model.model.layers:
            layer.inner = make(layer.inner)

    return change


def with_hook(model):
    model.lm_head.register_forward_pre_hook(lambda module, args: setattr(module, "kept", args[0]))


def with_kept(model, batch):
    """Beside the model's loss one of what its head kept, if it did."""
    loss, kept = model(**batch).loss, getattr(model.lm_head, "kept", None)
    return loss if kept is None else loss + kept.square().mean()


class InAttribute(tf.models.llama.modeling_llama.LlamaDecoderLayer):
    """Keeps its own result; a row of real tokens in its place was another mean: gradients 15 % off, without a word."""

    def forward(self, hidden_states, **kwargs):
        self.kept = super().forward(hidden_states, **kwargs)
        return self.kept


class InSharedList(tf.models.llama.modeling_llama.LlamaDecoderLayer):
    """Keeps a gate of each token where no attribute of a module leads to it."""

    values: list[torch.Tensor] = []

    def forward(self, hidden_states, **kwargs):
        out = super().forward(hidden_states, **kwargs)
        self.values.append(torch.sigmoid(out[..., :1]))
        return out


def layers_of(kind: type) -> Callable:
    def change(model):
        for layer in model.model.layers:
            layer.__class__ = kind

    return change


def of_kept_values(model, batch):
    InSharedList.values.clear()
    loss = model(**batch).loss
    kept = InSharedList.values or [layer.kept for layer in model.model.layers]
    assert len(kept) == 2
    return loss + sum(value.square().mean() for value in kept)


def two_answers(model, batch):
    """Consistency at all positions, as R-Drop has it (Liang et al. 2021)."""
    noise = 0.05 * torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    others = {name: value for name, value in batch.items() if name != "input_ids"}
    one = model(**batch)
    two = model(inputs_embeds=model.get_input_embeddings()(batch["input_ids"]) + noise, **others)
    p, q = one.logits.log_softmax(-1), two.logits.log_softmax(-1)
    return one.loss + two.loss + 4 * ((p.exp() - q.exp()) * (p - q)).sum(-1).mean()


def of_other_weights(model, batch):
    """They are put back before its logits are read."""
    weights = {name: parameter * 1.2 for name, parameter in model.named_parameters()}
    out = torch.func.functional_call(model, weights, (), dict(batch))
    return out.loss + out.logits.logsumexp(-1).square().mean()


def two_forwards(model, batch):
    """Of one mask, under a checkpoint that repeats them when the call is over."""
    rest = {name: value for name, value in batch.items() if name != "labels"}
    real = batch["attention_mask"][..., None]
    return model(**batch).loss + (model(**rest).logits * real).square().mean()


# -- functions of the user's own -----------------------------------------------------------------------------------------


def nearby(*args, and_mask_function=None, **kwargs):
    from transformers.masking_utils import create_causal_mask

    return create_causal_mask(*args, and_mask_function=lambda b, h, q, k: (q - k) < 4, **kwargs)


def with_window(model):
    """That the layers know: the mask says so, and padding goes."""
    for layer in model.model.layers:
        layer.self_attn.sliding_window = 4


ROTATE = tf.models.llama.modeling_llama.apply_rotary_pos_emb


def by_shape(q, k, cos, sin, *args, **kwargs):
    """Positions counted from a shape."""
    places = torch.arange(q.shape[-2], dtype=torch.float32) / 4
    angles = places[:, None] * 10000 ** (-torch.arange(0, q.shape[-1], 2) / q.shape[-1])
    angles = torch.cat([angles, angles], -1)[None]
    return ROTATE(q, k, angles.cos(), angles.sin())


SDPA = tf.AttentionInterface._global_mapping["sdpa"]


def sharper(module, query, key, value, attention_mask, scaling=None, **kwargs):
    return SDPA(module, query, key, value, attention_mask, scaling=(scaling or 1.0) * 1.7, **kwargs)


def rows_of(*lengths, **more) -> tuple[dict, ...]:
    return tuple(packed(*each, seed=seed) | more for seed, each in enumerate(lengths))


MANY = (((5, 6),), ((3, 3, 3, 2),), ((1,) * 5 + (4,),), ((12, 30),), ((16, 1, 1),))
ONES = {"attention_mask": torch.ones(1, 16, dtype=torch.long)}

READ = dict(build=token_wise, batches=TWO, removed=1, kept="logits-read")
MASKS = dict(batches=SIDES, build=uncached, kept="masks-not-understood")
HELD = dict(batches=TWO, loss=of_kept_values, kept="output-holds-more", limits={"loss": 1e-5, "limit": 1e-4})
LAYERS = ("model.layers.0", "model.layers.1")
TABLE = {**tf.AttentionInterface._global_mapping, "sdpa": sharper}


def put(home: str, value: object) -> Callable:
    """What stands at a place of transformers."""
    return lambda patch: patch.setattr(home, value)


def in_fp64() -> nn.Module:
    return token_wise().double()


def module(change: Callable, code: str, subject: str) -> Run:
    return Run(change, TWO, build=token_wise, kept=code, said={code: subject}, loss=with_kept)


NEARBY = put(f"{LLAMA}.create_causal_mask", nearby)
DISTANCE = torch.arange(12) - torch.arange(12)[:, None]
BIAS = torch.where(DISTANCE <= 0, 0.1 * DISTANCE, torch.finfo(torch.float32).min).expand(2, 1, 12, 12).contiguous()
QUICK = {
    "a loss of logits behind a metric": Run(loss=of_logits(after_metrics), **READ),
    "a loss of two calls' logits": Run(loss=two_answers, limits=EXACT, **{**READ, "build": in_fp64, "removed": 2}),
    "a loss of other weights": Run(
        batches=TWO, build=in_fp64, loss=of_other_weights, limits=EXACT, kept="weights-of-call"
    ),
    "a mean over all positions": Run(
        build=lambda: Pooling(lambda h: h.mean(1).square().mean()),
        kept="unknown-forward",
        said={"unknown-forward": "Pooling"},
    ),
    "results that layers keep": Run(layers_of(InAttribute), **HELD),
    "gates that layers share": Run(layers_of(InSharedList), **HELD),
    "labels that a later hook replaces": Run(other_labels, build=token_wise, kept="labels-at-padding"),
    "a loss function": Run(
        unmasked_loss, build=token_wise, kept="unknown-loss-function", said={"unknown-loss-function": __name__}
    ),
    "a hook of the owner that reads the mask": Run(reads_mask, build=token_wise, kept="hook-on-module"),
    "a window of a mask function": Run(patched=NEARBY, **MASKS),
    "a window of a mask function and of layers": Run(with_window, build=uncached, patched=NEARBY, removed=1),
    "a bias that is no mask": Run(
        build=lambda: attending(attn_implementation="eager"),
        batches=(zoo.batch(256, 2, 12) | {"attention_mask": BIAS},),
        kept="masks-not-understood",
    ),
    "positions counted from a shape": Run(
        batches=SIDES[1:], patched=put(f"{LLAMA}.apply_rotary_pos_emb", by_shape), kept="mixes-tokens"
    ),
    "two forwards under a checkpoint": Run(
        checkpoints("model", reentrant=False), build=token_wise, loss=two_forwards, kept="checkpoint-around-layers"
    ),
    "unknown-module: Softmax": module(
        behind(lambda norm: nn.Sequential(norm, nn.Softmax(1))), "unknown-module", "Softmax"
    ),
    "unknown-module: LayerNorm": module(behind(lambda _: nn.LayerNorm((20, 64))), "unknown-module", "LayerNorm"),
    "unknown-module: Squeezed": module(inside(Squeezed), "unknown-module", "Squeezed"),
    "hook-on-module: Linear": module(with_hook, "hook-on-module", "Linear"),
    "any number of sequences": Run(batches=rows_of(*MANY), build=uncached, apart=5),
}
SLOW = {
    "beside the labels": Run(loss=of_logits(lambda logits: logits.logsumexp(-1).square().mean(), own=True), **READ),
    "a wrapper that hands labels on": Run(build=Handing, removed=1),
    "a forward of the owner": Run(centred, kept="unknown-caller", said={"unknown-caller": f"{__name__}.forward"}),
    "two lists of layers": Run(two_stacks, build=uncached, kept="one-owner-several-lists"),
    "attention under sdpa": Run(
        batches=TWO, patched=put("transformers.AttentionInterface._global_mapping", TABLE), removed=2
    ),
    "re-entrant checkpoints around layers": Run(
        checkpoints(*LAYERS, reentrant=True), build=uncached, kept="unknown-caller"
    ),
    "hidden states that are required": Run(
        batches=rows_of(((7, 9),), output_hidden_states=True),
        build=uncached,
        kept="output-required",
        said={"output-required": "output_hidden_states"},
    ),
    "a sequence a row, and a mask beside positions": Run(
        batches=(*rows_of(((16,), (16,))), *rows_of(((7, 9),), **ONES)), build=uncached
    ),
    "sequences that see each other": Run(batches=rows_of(((7, 9),)), kept="sequences-see-each-other"),
}


@cases(QUICK, SLOW)
def test_steps_and_what_is_said_of_them(run, monkeypatch):
    """Modules of the user's own, also of torch's that mix tokens, see rows in layers, and zeros at padding behind them:
    gradients were 30 to 90 % off.
    """
    run.check(monkeypatch)


def test_hooks_on_all_modules_keep_the_padding():
    model = tunecompile.optimize(token_wise(), executor="eager")
    with nn.modules.module.register_module_forward_pre_hook(lambda module, args: None):
        zoo.step(model, padded())
    assert has(model, "padding-kept", reason="hook-on-all-modules") and not flattened(model)


def test_with_dropout_a_loss_is_that_of_its_calls_logits():
    """The call is made once more for what stands at padding, and draws other masks then."""
    model = adapted_layers(lora_dropout=0.4, lora_alpha=64).double()
    tunecompile.optimize(model.train(), executor="eager")
    for seed in range(2):
        batch = padded(seed=seed)
        out = model(**batch)
        again = F.cross_entropy((out.logits + 0).transpose(1, 2)[:, :, :-1], batch["labels"][:, 1:])
        assert out.loss.item() == pytest.approx(again.item(), rel=1e-5)
