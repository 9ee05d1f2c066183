"""Hooks on modules inside layers, and on all modules: called as eager calls them, whenever they come and go."""

import contextlib
from collections import OrderedDict

import pytest
import torch
from torch import nn

import tunecompile
from tests.support import zoo
from tests.support.compare import assert_same_run
from tests.support.models.pairs import of_plain_layers, pair
from tests.support.notes import has
from tunecompile.runtime.watch.module_watch import TURNS

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


def test_hooks_on_layers_fire():
    model, reference = pair(of_plain_layers)
    seen: dict = {}
    for m in (model, reference):
        for layer in m.model.layers:
            layer.register_forward_hook(
                lambda module, args, out, m=m: seen.setdefault(id(m), []).append(
                    (out[0] if isinstance(out, tuple) else out).detach().norm()
                )
            )
            layer.inner.register_full_backward_hook(
                lambda module, i, o, m=m: seen.setdefault(id(m), []).append(o[0].norm())
            )
    assert_same_run(model, reference, lambda m: m(**zoo.batch()).loss)
    assert len(seen[id(model)]) == len(seen[id(reference)]) == 4
    assert torch.allclose(torch.stack(seen[id(model)]), torch.stack(seen[id(reference)]), rtol=1e-4)


def scaling(kind: str, scale: float):
    """A hook that changes what linears inside layers are given, or sends back."""

    def mine(module) -> bool:
        return getattr(module, "out_features", 0) == zoo.SMALL["hidden_size"]

    return {
        "forward_pre": lambda module, args: (args[0] * scale,) if mine(module) else None,
        "full_backward": lambda module, grads, _: (grads[0] * scale,) if mine(module) else None,
    }[kind]


@pytest.mark.parametrize("where, kind", [("its own", "forward_pre"), ("all modules", "full_backward")])
def test_hooks_that_come_after_compilation_change_numbers(kind, where):
    """Each time of the same code, with another scale; then none, and what was compiled without them serves again."""
    model, reference = pair(of_plain_layers)

    def norm() -> torch.Tensor:
        """Of the reference's gradients, which are the model's."""
        assert_same_run(model, reference, lambda m: m(**zoo.batch()).loss)
        return reference.model.embed_tokens.weight.grad.norm()

    first, compiled = norm(), tunecompile.report(model).compiles
    for scale in (1.5, 3.0):
        handles = (
            [getattr(nn.modules.module, f"register_module_{kind}_hook")(scaling(kind, scale))]
            if where == "all modules"
            else [
                getattr(layer.inner, f"register_{kind}_hook")(scaling(kind, scale))
                for m in (model, reference)
                for layer in m.model.layers
            ]
        )
        with contextlib.ExitStack() as placed:
            for handle in handles:
                placed.enter_context(handle)
            assert not torch.allclose(norm(), first)
    hooked = tunecompile.report(model).compiles
    assert hooked > compiled and torch.equal(norm(), first)
    assert tunecompile.report(model).compiles == hooked


class Around(nn.Module):
    """A module that takes another's place, as adapters do."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def test_hooks_on_modules_that_come_after_the_first_step():
    """The module is there for a step before its hook is."""
    model, reference = pair(of_plain_layers)
    assert_same_run(model, reference, lambda m: m(**zoo.batch()).loss)
    layers = [layer for m in (model, reference) for layer in m.model.layers]
    for layer in layers:
        layer.inner = Around(layer.inner)
    assert_same_run(model, reference, lambda m: m(**zoo.batch()).loss)
    for layer in layers:
        layer.inner.register_forward_hook(lambda module, args, out: out * 3)
    assert_same_run(model, reference, lambda m: m(**zoo.batch()).loss)


@pytest.mark.slow
def test_a_kept_dictionary_of_hooks_is_noticed_soon():
    """In place of an empty one that somebody keeps, and filled by hand: the one case that may be late, which is said."""
    models, kept = pair(of_plain_layers), []
    assert_same_run(*models, lambda m: m(**zoo.batch()).loss)
    for m in models:
        mlp = m.model.layers[1].inner
        kept.append(mlp._forward_hooks)
        mlp._forward_hooks = OrderedDict({0: lambda module, args, out: out * 3})
    for _ in range(TURNS):
        models[0](**zoo.batch()).loss.backward()
    assert_same_run(*models, lambda m: m(**zoo.batch()).loss)
    assert has(tunecompile.report(models[0]).notes, "hooks-replaced")
