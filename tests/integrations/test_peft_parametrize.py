"""Adapters over what is no linear: the experts of a mixture and their router, which PEFT parametrises at every call."""

import copy

import pytest

import tunecompile
from tests.support import zoo
from tests.support.notes import has

pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")


def wrappers(model):
    return [module for module in model.modules() if hasattr(type(module), "_activate_lora")]


def test_layers_are_compiled_once_and_for_all_steps():
    reference = zoo.adapt(zoo.make("mixtral"))
    model = tunecompile.optimize(copy.deepcopy(reference), executor="eager")
    compiles = []
    for seed in range(3):
        _, expected = zoo.step(reference, zoo.batch(seed=seed))
        _, got = zoo.step(model, zoo.batch(seed=seed))
        assert max(zoo.errors(got, expected).values()) < 1e-5
        compiles.append(tunecompile.report(model).compiles)
    assert compiles[0] == compiles[1] == compiles[2] <= 5, tunecompile.report(model)
    assert has(model, "parametrizing-modules")


def test_they_are_given_back_and_a_copy_has_its_own():
    model = tunecompile.optimize(zoo.adapt(zoo.make("mixtral")), executor="eager")
    inner = [module for module in wrappers(model) if "forward" in vars(module)]
    assert inner and all(module.forward.args[1] is module for module in inner)
    other = copy.deepcopy(model)
    assert all(module.forward.args[1] is module for module in wrappers(other) if "forward" in vars(module))
    tunecompile.restore(model)
    assert not any("forward" in vars(module) for module in wrappers(model))


@pytest.mark.slow
def test_a_forward_of_somebody_elses_is_left_alone():
    model = zoo.adapt(zoo.make("mixtral"))
    gate = next(module for name, module in model.named_modules() if name.endswith("layers.0.mlp.gate"))
    own, called = gate.forward, []
    gate.forward = lambda *args, **kwargs: (called.append(1), own(*args, **kwargs))[1]
    replaced = gate.forward
    tunecompile.optimize(model, executor="eager")
    zoo.step(model, zoo.batch())
    tunecompile.restore(model)
    assert called and gate.forward is replaced


def test_verified_in_double_precision():
    """For which torch has no grouped product."""
    result = tunecompile.verify(tunecompile.optimize(zoo.adapt(zoo.make("mixtral")), executor="eager"), zoo.batch())
    assert result.passed and result.reference == "float64", str(result)
