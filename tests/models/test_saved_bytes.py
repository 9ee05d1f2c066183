"""The report's saved bytes are those autograd holds between forward and backward."""

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.matrix.families import EMBEDDED
from tunecompile.cli.compare.meters import count_saved_bytes
from tunecompile.runtime.unpad.masks import recorder

tf = pytest.importorskip("transformers")
pytest.importorskip("peft")
ROWS, LENGTH = 2, 16


def measure(layers: int) -> tuple[int, int]:
    """(bytes autograd saved in the whole model, bytes a layer by the report)"""
    model = tunecompile.optimize(zoo.adapt(zoo.make("llama", num_hidden_layers=layers)).train(), executor="eager")
    total = count_saved_bytes(model, lambda: model(**zoo.batch(rows=ROWS, length=LENGTH)).loss)
    return total, tunecompile.report(model).regions[0].saved_bytes[-1]


def test_a_layer_saves_what_the_report_says():
    (few, by_report), (many, _) = measure(3), measure(5)
    layer_input = ROWS * LENGTH * zoo.SMALL["hidden_size"] * 4  # saved as well, but it is the layer before that made it
    assert (many - few) // 2 == by_report + layer_input


@pytest.mark.slow
@pytest.mark.parametrize("long", [False, True], ids=["read", "recorded"])
@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_masks_of_windows_are_saved_once(family, long, monkeypatch):
    """The bools that layers share, and no numbers of each layer's own; in long rows, nothing that grows faster."""
    if family == "gemma4" and not hasattr(tf, "Gemma4TextConfig"):
        pytest.skip("a later transformers has it")
    more = EMBEDDED if family == "gemma4" else {key: EMBEDDED[key] for key in ("num_hidden_layers", "layer_types")}
    made = zoo.make(family, **more, sliding_window=8, use_cache=False)
    model = tunecompile.optimize(zoo.adapt(made).train(), executor="eager")
    if long:
        monkeypatch.setattr(recorder, "LONG", 1)
    lengths = (64, 128, 256)
    few, some, many = (
        count_saved_bytes(model, lambda: model(**zoo.batch(rows=1, length=length)).loss) for length in lengths
    )
    grows = (many - some) - 2 * (some - few)  # nothing, if bytes are some number of them for each token
    assert abs(grows - (0 if long else 256**2 + 2 * 64**2 - 3 * 128**2)) < 1024


def test_weights_are_saved_themselves_and_not_as_views():
    """An engine that frees a gathered weight and gathers it again (ZeRO-3) cannot reach a view of it."""
    model, views = tunecompile.optimize(zoo.make("llama", num_hidden_layers=2).train(), executor="eager"), []
    weights = {p.untyped_storage().data_ptr() for layer in model.model.layers for p in layer.parameters()}

    def pack(saved):
        views.extend(
            [tuple(saved.shape)]
            if saved.untyped_storage().data_ptr() in weights and not isinstance(saved, torch.nn.Parameter)
            else []
        )
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        model(**zoo.batch(rows=ROWS, length=LENGTH)).loss.backward()
    assert not views
