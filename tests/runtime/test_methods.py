"""Methods of classes and functions of linears, replaced between steps: Dynamo guards on a class, and on few of its methods."""

import pytest
import torch.nn.functional as F
from torch import nn

import tunecompile
from tests.support import zoo
from tests.support.changes import attribute
from tests.support.compare import assert_same_step
from tests.support.models.pairs import of_plain_layers, pair
from tests.support.notes import has
from tunecompile.runtime.watch.module_watch import ClassWatch

pytestmark = pytest.mark.filterwarnings("ignore")


class Scaled(nn.Module):
    """A module as adapters are: its forward calls another method."""

    count = 0

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(self.before(x))

    def before(self, x):
        return x * 0.5

    @property
    def factor(self):
        return 2.0


class Adapted(Scaled):
    """Its methods are its base's."""


def scaled() -> nn.Module:
    model = of_plain_layers(num_hidden_layers=2)
    for layer in model.model.layers:
        layer.inner = Adapted(layer.inner)
    return model


def test_a_method_that_is_replaced_again_and_again():
    models = pair(scaled)
    assert_same_step(*models)
    forward = Scaled.forward
    factors = (lambda self, x: forward(self, x) * 2, lambda self, x: forward(self, x) * 3)
    for kind, name, values in ((Adapted, "forward", factors), (Scaled, "before", (lambda self, x: x.sin(),))):
        for value in values:
            with attribute(kind, name, value):
                assert_same_step(*models)
    assert_same_step(*models)


def test_what_is_watched_of_a_class():
    watch = ClassWatch()
    watch.add([Adapted(nn.Linear(2, 2))])
    assert set(watch.classes) == {Adapted, Scaled} and watch.look() == 0
    with attribute(Scaled, "count", 1):
        assert watch.look() == 0, "a number is guarded on, or counts"
    with attribute(Scaled, "factor", property(lambda self: 3.0)):
        other = watch.look()
        assert other != 0 and watch.look() == other
    assert watch.look() == 0
    with attribute(nn.Linear, "forward", lambda self, x: x):
        assert watch.look() == 0
        watch.add([nn.Linear(2, 2)])
    assert watch.look() not in (0, other)


def louder(function):
    return lambda *args, **kwargs: function(*args, **kwargs) * 1.1


def test_heads_and_layers_whose_linear_is_replaced():
    model, reference = pair(of_plain_layers)
    assert_same_step(model, reference)
    plain = zoo.step(reference, zoo.batch())[0]
    with attribute(F, "linear", louder(F.linear)):
        assert_same_step(model, reference)
        assert zoo.step(reference, zoo.batch())[0] != plain
    (head,) = [match for match in tunecompile.report(model).matches if match.family == "linear_cross_entropy"]
    assert has(head.refused, "head-eager", detail="linear")
    assert_same_step(model, reference)
