"""Steps of models beside eager's, a row each: whether batches ran without their padding, and if not, why.

Who may look at a padded batch: hooks, a second loss, code of the user's in the place of a model's own, checkpoints.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import tunecompile
from tests.support import zoo
from tests.support.batches import packed, padded
from tests.support.compare import assert_close
from tests.support.models.pairs import attending, pair
from tests.support.notes import find, has
from tests.support.reports import flattened, told_apart

tf = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


@dataclass(frozen=True)
class Run:
    """A model, its batches, and what its report says behind them.

    change: of the model.   replaced: (where, name, what stands there).   loss: of a model and a batch.
    removed, apart: how many batches ran without padding, and packed ones without a mask.   kept: why others did not.
    said: a note beside that, and its subject.
    """

    change: Callable[[nn.Module], object] = lambda model: None
    batches: Sequence[dict] = (padded(),)
    removed: int = 0
    apart: int = 0
    kept: str | None = None
    said: tuple[str, str] | None = None
    build: Callable[[], nn.Module] = attending
    replaced: tuple | None = None
    loss: Callable | None = None


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
        self.inner, self.read = attending(), read

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


def of_mlps(make: Callable) -> Callable:
    def change(model):
        for layer in model.model.layers:
            layer.mlp = make(layer.mlp)

    return change


def behind(make: Callable) -> Callable:
    def change(model):
        model.model.norm = make(model.model.norm)

    return change


def with_hook(model):
    model.lm_head.register_forward_pre_hook(lambda module, args: setattr(module, "kept", args[0]))


def with_kept(model, batch):
    """Beside the model's loss one of what its head kept, if it did."""
    loss, kept = model(**batch).loss, getattr(model.lm_head, "kept", None)
    return loss if kept is None else loss + kept.square().mean()


def module(change, *said):
    return pytest.param(Run(change, TWO, kept=said[0], said=said, loss=with_kept), id=f"{said[0]}: {said[1]}")


def checkpoints(*path: str, reentrant: bool) -> Callable:
    """Around a module, by code that might read what stands at padding. The layers do not know that they are repeated."""

    def change(model):
        model.enable_input_require_grads()
        kind = type(model.get_submodule(path[0]))

        def call(self, *args, **kwargs):
            return checkpoint(lambda *a: kind.__call__(self, *a, **kwargs), *args, use_reentrant=reentrant)

        checkpointed = type("Checkpointed", (kind,), {"__call__": call})
        for name in path:
            model.get_submodule(name).__class__ = checkpointed

    return change


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

READ = dict(batches=TWO, removed=1, kept="logits-read")
POOLED = dict(kept="unknown-forward", said=("unknown-forward", "Pooling"))
MASKS = dict(batches=SIDES, build=uncached, kept="masks-not-understood")
LAYERS = ("model.layers.0", "model.layers.1")
TABLE = {**tf.AttentionInterface._global_mapping, "sdpa": sharper}
QUICK = {
    "a loss of logits behind a metric": Run(loss=of_logits(after_metrics), **READ),
    "a mean over all positions": Run(build=lambda: Pooling(lambda h: h.mean(1).square().mean()), **POOLED),
    "labels that a later hook replaces": Run(other_labels, kept="labels-at-padding"),
    "a loss function": Run(unmasked_loss, kept="unknown-loss-function", said=("unknown-loss-function", __name__)),
    "a hook of the owner that reads the mask": Run(reads_mask, kept="hook-on-module"),
    "a window of a mask function": Run(replaced=(LLAMA, "create_causal_mask", nearby), **MASKS),
    "a window of a mask function and of layers": Run(
        with_window, build=uncached, replaced=(LLAMA, "create_causal_mask", nearby), removed=1
    ),
    "positions counted from a shape": Run(
        batches=SIDES[1:], replaced=(LLAMA, "apply_rotary_pos_emb", by_shape), kept="mixes-tokens"
    ),
}
SLOW = {
    "beside the labels": Run(loss=of_logits(lambda logits: logits.logsumexp(-1).square().mean(), own=True), **READ),
    "a wrapper that hands labels on": Run(build=Handing, removed=1),
    "a forward of the owner": Run(centred, kept="unknown-caller", said=("unknown-caller", f"{__name__}.forward")),
    "two lists of layers": Run(two_stacks, build=uncached, kept="one-owner-several-lists"),
    "attention under sdpa": Run(
        batches=TWO, replaced=("transformers", "AttentionInterface._global_mapping", TABLE), removed=2
    ),
    "a checkpoint around the owner": Run(
        checkpoints("model", reentrant=False), build=uncached, kept="checkpoint-around-layers"
    ),
    "re-entrant checkpoints around layers": Run(
        checkpoints(*LAYERS, reentrant=True), build=uncached, kept="unknown-caller"
    ),
    "hidden states that are required": Run(
        batches=rows_of(((7, 9),), output_hidden_states=True),
        build=uncached,
        kept="output-required",
        said=("output-required", "output_hidden_states"),
    ),
    "any number of sequences": Run(batches=rows_of(*MANY), build=uncached, apart=5),
    "a sequence a row, and a mask beside positions": Run(
        batches=(*rows_of(((16,), (16,))), *rows_of(((7, 9),), **ONES)), build=uncached
    ),
    "sequences that see each other": Run(batches=rows_of(((7, 9),)), kept="sequences-see-each-other"),
}
MODULES = [
    module(behind(lambda norm: nn.Sequential(norm, nn.Softmax(1))), "unknown-module", "Softmax"),
    module(behind(lambda _: nn.LayerNorm((20, 64))), "unknown-module", "LayerNorm"),
    module(of_mlps(Squeezed), "unknown-module", "Squeezed"),
    module(with_hook, "hook-on-module", "Linear"),
]


@pytest.mark.parametrize(
    "run",
    [
        *(pytest.param(run, id=name) for name, run in QUICK.items()),
        *(pytest.param(run, id=name, marks=pytest.mark.slow) for name, run in SLOW.items()),
        *MODULES,
    ],
)
def test_steps_and_what_is_said_of_them(run, monkeypatch):
    """Modules of the user's own, also of torch's that mix tokens, see rows in layers, and zeros at padding behind them:
    gradients were 30 to 90 % off.
    """
    if run.replaced is not None:
        home, name, value = run.replaced
        monkeypatch.setattr(f"{home}.{name}", value)

    def build():
        torch.manual_seed(0)
        model = run.build()
        run.change(model)
        return model

    model, reference = pair(build)
    for batch in run.batches:
        steps = [zoo.step(each, dict(batch), **({"loss": run.loss} if run.loss else {})) for each in (model, reference)]
        assert_close(*steps, loss=1e-5 if run.loss else 1e-6, limit=1e-4)
    report = tunecompile.report(model)
    assert (flattened(model), told_apart(model)) == (run.removed, run.apart), report
    kept = find(report, "padding-kept", "packing-kept", reason=run.kept or "")
    assert bool(kept) is bool(run.kept), report
    assert run.said is None or has(report, run.said[0], subject=run.said[1]), report
    assert all(region.compiles <= 2 and not region.recompiles for region in report.regions) or run.kept, report
