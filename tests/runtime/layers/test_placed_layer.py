"""What a layer finds around it and inside, at its first step."""

from types import SimpleNamespace

import pytest
from torch import nn

from tunecompile.runtime.layers import placed_layer
from tunecompile.runtime.layers.placed_layer import PlacedLayer


class Looked:
    """A layer before its first step, whose engines answer as given."""

    def __init__(self, monkeypatch, layer, sharded=False, forks=(), owner=None, in_tower=None, **engines):
        self.asked, self.failures = [], []
        for name in ("place", "gathered", "unit"):
            monkeypatch.setattr(
                placed_layer, name, lambda given, name=name: self.asked.append((name, given)) or engines.get(name)
            )
        monkeypatch.setattr(placed_layer, "put_states_back", lambda given: ("states", given))
        monkeypatch.setattr(placed_layer.ImageBounds, "of", lambda given: ("images", given))
        monkeypatch.setattr(placed_layer, "sharded", lambda parameter: sharded)
        monkeypatch.setattr(placed_layer, "forks_in", lambda given: given is owner and forks)
        monkeypatch.setattr(placed_layer, "separate_names", lambda given: self.asked.append(("names", given)))
        region = SimpleNamespace(
            in_tower=in_tower,
            replays=SimpleNamespace(failures=self.failures, device="cpu"),
            classes=SimpleNamespace(),
        )
        region.classes.add = lambda modules: self.asked.append(("classes", [*modules]))
        self.layer = PlacedLayer(layer, region)
        self.layer.owner = owner
        self.replays = region.replays
        self.layer.look_around()


@pytest.mark.parametrize("engine", ["place", "gathered", "unit", None])
def test_the_first_engine_that_has_to_do_with_a_layer_is_its_host(monkeypatch, engine):
    """The others are not asked: each changes what it finds."""
    engines, order = (
        ({engine: f"host by {engine}", "unit": "the last"} if engine else {}),
        ["place", "gathered", "unit"],
    )
    if engine == "unit":
        engines["unit"] = "host by unit"
    looked = Looked(monkeypatch, layer := nn.Tanh(), **engines)
    assert looked.layer.placement == (engine and f"host by {engine}")
    asked = order[: order.index(engine) + 1] if engine else order
    assert looked.asked == [*((name, layer) for name in asked), ("names", layer), ("classes", [layer])]
    assert looked.layer.inside.own == [vars(layer)]
    assert (looked.layer.states, looked.layer.images) == (("states", layer), ("images", layer))


@pytest.mark.parametrize(
    "owner, forks, known, expected",
    [
        (None, ("fork",), None, False),
        ("tower", (), None, False),
        ("tower", ("fork",), None, True),
        ("tower", ("fork",), False, False),
        ("tower", (), True, True),
    ],
)
def test_a_tower_is_known_by_what_its_layers_may_be_told(monkeypatch, owner, forks, known, expected):
    assert Looked(monkeypatch, nn.Tanh(), owner=owner, forks=forks, in_tower=known).layer.region.in_tower is expected


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("layer", [nn.Linear(2, 2), nn.Tanh()])
def test_gathered_weights_are_not_recorded(monkeypatch, sharded, layer):
    """They lie elsewhere at every call: a recording would read what is there by then."""
    looked = Looked(monkeypatch, layer, sharded=sharded)
    leaves = sharded and isinstance(layer, nn.Linear)
    assert looked.layer.region.replays is (None if leaves else looked.replays)
    for _ in range(2):
        assert [each.detail.code for each in looked.failures] == ["weights-of-several-processes"] * leaves
        looked.layer.look_around()
