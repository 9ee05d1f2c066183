"""Who else may look at a padded batch: hooks, adapters by row, a second loss, checkpoints. Then the padding stays, and the report says so."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support import zoo
from tests.support.batches import padded
from tests.support.models.pairs import attending, pair
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


def test_hooks_see_the_padded_batch():
    shapes = []
    for m in pair(attending):
        m.get_submodule("model").register_forward_hook(
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
