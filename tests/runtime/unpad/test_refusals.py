"""Who else may look at a padded batch: hooks, adapters by row, a second loss, checkpoints. Then the padding stays, and the report says so."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support import zoo
from tests.support.batches import padded
from tests.support.compare import assert_same_flattened
from tests.support.models.pairs import attending, pair
from tests.support.notes import find, has
from tests.support.reports import flattened
from tunecompile.runtime.unpad import refusals

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


def test_noise_on_embeddings_keeps_its_size():
    """NEFTune's is alpha / sqrt(T * H), so its hook must see the batch as it is."""
    neftune_post_forward_hook = pytest.importorskip("transformers.integrations.neftune").neftune_post_forward_hook
    size = []
    for m in pair(attending):
        embed = m.get_input_embeddings()
        embed.neftune_noise_alpha = 5.0
        embed.register_forward_hook(neftune_post_forward_hook)
        embed.register_forward_hook(
            lambda mod, a, o: size.append((o - F.embedding(a[0], mod.weight)).abs().max().item())
        )
        zoo.step(m, padded(8, 32))
    assert size[0] == pytest.approx(size[1], rel=0.05)


@pytest.mark.slow
def test_another_loss_beside_the_labels():
    """Distillation or a z-loss may read what stands at padding: layers run once more in the first such step."""
    model, reference = pair(attending)
    for seed in range(3):
        losses = []
        for m in (model, reference):
            out = m.train()(**padded(seed=seed))
            losses.append((out.loss + out.logits.float().logsumexp(-1).square().mean()).item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-4), seed
    assert flattened(model) == 1 and has(model, "padding-kept", reason="logits-read")


def every_token(logits: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    return F.cross_entropy(
        logits.flatten(0, 1), zoo.batch(rows=4, length=20)["input_ids"].flatten(), reduction=reduction
    ).mean()


def after_metrics(logits: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits.argmax(-1)
    return logits.logsumexp(-1).mean()


@pytest.mark.parametrize(
    "loss",
    [
        after_metrics,
        *(
            pytest.param(loss, marks=pytest.mark.slow)
            for loss in (
                every_token,
                lambda logits: every_token(logits, "none"),
                lambda logits: torch.cat([logits, logits]).logsumexp(-1).mean(),
            )
        ),
    ],
    ids=["after metrics", "own labels", "no reduction", "joined"],
)
def test_a_loss_of_the_users_own_counts_padding(loss):
    """Beside labels that do not. Numbers are right in the first step, and from the next one on the padding stays."""
    model, reference = pair(attending)
    for _ in range(2):
        losses = [loss(m.train()(**padded()).logits).item() for m in (model, reference)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert flattened(model) == 1 and has(model, "padding-kept", reason="logits-read")


@pytest.mark.slow
def test_a_loss_of_the_users_own_leaves_padding_out():
    """Then it is flattened, until logits are read otherwise; also those of a call that was not the last one."""
    model, reference = pair(attending)
    labels = padded()["labels"][:, 1:].flatten()
    outputs = [m.train()(**padded()).logits for m in (model, reference)]
    losses = [F.cross_entropy(logits[:, :-1].flatten(0, 1), labels).item() for logits in outputs]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert flattened(model) == 1 and not find(model, "logits-read")
    model(**zoo.batch())
    outputs[0].logsumexp(-1).mean().item()
    assert has(model, "padding-kept", reason="logits-read")


class Pooling(nn.Module):
    """A loss of its own beside cross-entropy, from hidden states wherever they stand."""

    def __init__(self, read):
        super().__init__()
        self.inner, self.read = attending(), read

    def forward(self, input_ids, attention_mask, labels):
        hidden = self.inner.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
        loss = F.cross_entropy(self.inner.lm_head(hidden)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()) + self.read(
            hidden
        )
        return SimpleNamespace(loss=loss)


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(lambda h: h.mean(1).square().mean(), id="mean over all positions"),
        pytest.param(lambda h: h[:, -1].square().mean(), id="last position", marks=pytest.mark.slow),
        pytest.param(lambda h: h.square().mean(), id="regulariser", marks=pytest.mark.slow),
    ],
)
def test_a_wrapper_that_reads_hidden_states_at_padding(read):
    """Its labels say nothing of that."""
    model, reference = pair(lambda: Pooling(read))
    assert_same_flattened(model, reference, padded())
    assert has(model, "padding-kept", reason="unknown-forward")
    assert has(model, "unknown-forward", subject="Pooling", home=__name__)


@pytest.mark.slow
def test_a_wrapper_that_hands_labels_on():
    """Its loss is the model's own."""

    class Handing(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = attending()

        def forward(self, **inputs):
            return self.inner(**inputs)

    model, reference = pair(Handing)
    assert_same_flattened(model, reference, padded())
    assert flattened(model) == 1


def test_labels_that_a_later_hook_replaces():
    model, reference = pair(attending)
    for m in (model, reference):
        m.register_forward_pre_hook(lambda mod, a, k: (a, {**k, "labels": k["input_ids"]}), with_kwargs=True)
    assert_same_flattened(model, reference, padded())
    assert has(model, "padding-kept", reason="labels-at-padding")


def test_a_loss_function_of_the_users_own():
    model, reference = pair(attending)
    for m in (model, reference):
        m.loss_function = lambda logits, labels, **_: F.cross_entropy(
            logits.flatten(0, 1), labels.clamp(min=0).flatten()
        )
    assert_same_flattened(model, reference, padded())
    assert has(model, "padding-kept", reason="unknown-loss-function")
    assert has(model, "unknown-loss-function", subject=__name__)


@pytest.mark.slow
def test_a_forward_of_the_users_own():
    """Of what owns the layers: it would see a batch of one row."""
    import transformers as tf

    class Centred(tf.LlamaModel):
        def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
            out = super().forward(
                input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs
            )
            out.last_hidden_state = out.last_hidden_state - out.last_hidden_state.mean(1, keepdim=True)
            return out

    def build():
        model = attending()
        model.model.__class__ = Centred
        return model

    model, reference = pair(build)
    assert_same_flattened(model, reference, padded())
    assert has(model, "padding-kept", reason="unknown-caller")
    assert has(model, "unknown-caller", subject=f"{__name__}.forward")


class Squeezed(nn.Module):
    """A gate for all tokens from the mean of them."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.gate = inner, nn.Linear(64, 64)

    def forward(self, x):
        return self.inner(x) * torch.sigmoid(self.gate(x.mean(1, keepdim=True)))


class Keeping(nn.Linear):
    """A head that leaves what it is given to a loss beside the model's."""

    def forward(self, x):
        self.kept = x
        return super().forward(x)


def squeezed(model):
    for layer in model.model.layers:
        layer.mlp = Squeezed(layer.mlp)


def keeping(model):
    model.lm_head.__class__ = Keeping


def with_hook(model):
    model.lm_head.register_forward_pre_hook(lambda module, args: setattr(module, "kept", args[0]))


def over_tokens(model):
    model.model.norm = nn.Sequential(model.model.norm, nn.Softmax(1))


def over_a_row(model):
    model.model.norm = nn.LayerNorm((padded()["input_ids"].shape[1], 64))


def over_a_batch(model):
    model.model.norm = nn.BatchNorm1d(padded()["input_ids"].shape[1])


def over_tokens_of_logits(model):
    model.lm_head = nn.Sequential(model.lm_head, nn.Softmax(1))


@pytest.mark.parametrize(
    "change, said",
    [
        (over_tokens, ("unknown-module", "Softmax")),
        (over_a_row, ("unknown-module", "LayerNorm")),
        pytest.param(over_a_batch, ("unknown-module", "BatchNorm1d"), marks=pytest.mark.slow),
        pytest.param(over_tokens_of_logits, ("unknown-module", "Softmax"), marks=pytest.mark.slow),
        (squeezed, ("unknown-module", "Squeezed")),
        pytest.param(keeping, ("unknown-module", "Keeping"), marks=pytest.mark.slow),
        (with_hook, ("hook-on-module", "Linear")),
    ],
)
def test_modules_of_the_users_own(change, said):
    """In layers they would see one row of all tokens; behind them, zeros at padding. Modules of torch's may mix tokens, too:
    gradients were 30 to 90 % off.
    """

    def build():
        torch.manual_seed(0)
        model = attending()
        change(model)
        return model

    model, reference = pair(build)
    for seed in range(2):
        batch, losses = padded(seed=seed), []
        for m in (model, reference):
            m.zero_grad()
            found = m(**batch).loss
            losses.append(found + m.lm_head.kept.square().mean() if hasattr(m.lm_head, "kept") else found)
            losses[-1].backward()
        torch.testing.assert_close(*losses)
        assert (
            max(zoo.errors(*({name: p.grad for name, p in m.named_parameters()} for m in (model, reference))).values())
            < 1e-4
        )
    assert has(model, "padding-kept", reason=said[0]) and has(model, said[0], subject=said[1])


def test_labels_of_which_the_loss_reads_others(monkeypatch):
    """TRL's fused head reads shift_labels, where they are given."""
    from tunecompile.integrations import loss_caller

    model = attending()
    monkeypatch.setattr(loss_caller, "_LOSSES", (__name__, "transformers."))

    def forward(self, labels, shift_labels):
        return loss_caller.causal_labels()

    batch = padded()
    assert (
        forward(model, batch["labels"], None)[0] is batch["labels"]
        and forward(model, batch["labels"], batch["labels"])[0] is None
    )


def test_labels_of_a_call_that_was_interrupted():
    """No hook is told of its end."""
    model, reference = pair(attending)

    def interrupt(*_):
        raise KeyboardInterrupt

    inputs, found = padded(), []
    for m in (model, reference):
        with m.train().model.layers[1].register_forward_pre_hook(interrupt), pytest.raises(KeyboardInterrupt):
            m(**inputs)
        found.append(m.model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).last_hidden_state)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(
    "where", ["model", *(pytest.param(name, marks=pytest.mark.slow) for name in ("model.layers.1", "model.norm"))]
)
def test_hooks_see_the_padded_batch(where):
    shapes = []
    for m in pair(attending):
        m.get_submodule(where).register_forward_hook(
            lambda mod, a, o: shapes.append(tuple((o[0] if not isinstance(o, torch.Tensor) else o).shape))
        )
        zoo.step(m, padded())
    assert shapes[0] == shapes[1]


@pytest.mark.slow
def test_hooks_on_all_modules_see_the_padded_batch():
    shapes = []
    for m in pair(attending):
        with nn.modules.module.register_module_forward_pre_hook(
            lambda mod, a: shapes.append(tuple(a[0].shape)) if isinstance(mod, nn.Linear) else None
        ):
            zoo.step(m, padded())
    assert len(shapes) > 2 and shapes[: len(shapes) // 2] == shapes[len(shapes) // 2 :]


@pytest.mark.slow
def test_adapters_that_begin_at_a_row_s_place():
    """PEFT hands them to the layers by hooks."""
    pytest.importorskip("peft")
    from peft import LoraConfig, get_peft_model

    def build():
        torch.manual_seed(0)
        return get_peft_model(
            attending(),
            LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", alora_invocation_tokens=[5, 6]),
        )

    batch = padded()
    batch["input_ids"][0, 6:8] = torch.tensor([5, 6])
    assert_same_flattened(*pair(build), batch)


def two_stacks():
    import transformers as tf

    class Two(tf.LlamaModel):
        def __init__(self, config):
            super().__init__(config)
            self.more = nn.ModuleList(copy.deepcopy(layer) for layer in self.layers)

        def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
            layers, self._modules["layers"] = self.layers, nn.ModuleList([*self.layers, *self.more])
            count, self.config.num_hidden_layers = self.config.num_hidden_layers, 6
            try:
                return super().forward(
                    input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs
                )
            finally:
                self._modules["layers"], self.config.num_hidden_layers = layers, count

    model = attending(use_cache=False)
    model.model = Two(model.config)
    return model


@pytest.mark.slow
def test_two_lists_of_layers_in_one_owner():
    assert_same_flattened(*pair(two_stacks), padded())


def test_a_hook_of_the_owner_that_reads_the_mask():
    model, reference = pair(attending)
    for m in (model, reference):
        m.model.register_forward_pre_hook(
            lambda mod, a, k: (a, {**k, "attention_mask": k["attention_mask"] * 1}), with_kwargs=True
        )
    assert_same_flattened(model, reference, padded())


def test_configs_stay_as_they_are():
    """Another model may share them, and be under way in another thread."""
    model, _ = pair(attending)
    seen = []
    model.config.__class__ = type(
        "Watched",
        (type(model.config),),
        {"__setattr__": lambda self, name, value: (seen.append(name), object.__setattr__(self, name, value))[1]},
    )
    zoo.step(model, padded())
    assert flattened(model) == 1 and not seen


def test_convolutions_before_the_layers_see_what_they_always_saw():
    """Those behind, and other modules wherever they are, would see rows that padding is missing from."""
    layers = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.Conv1d(2, 2, 1))])
    owner = nn.ModuleDict(
        {"first": nn.Conv1d(2, 2, 1), "embed": nn.Linear(2, 2), "layers": layers, "last": nn.Conv1d(2, 2, 1)}
    )
    found = [*refusals._outside(owner, [*layers])]
    assert {id(module) for module in found} == {id(m) for m in (owner, owner["embed"], layers, owner["last"])}
