"""Hooks on modules inside layers, and on all modules: called as eager calls them, whenever they come and go."""

import contextlib
import gc
import weakref
from collections import OrderedDict

import pytest
import torch
from torch import nn

import tunecompile
from tests.support import zoo
from tests.support.compare import assert_same_run
from tests.support.models.pairs import pair, small
from tests.support.notes import has
from tunecompile.runtime.watch.module_watch import TURNS

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


def test_hooks_on_layers_fire():
    model, reference = pair()
    seen: dict = {}
    for m in (model, reference):
        for layer in m.model.layers:
            layer.register_forward_hook(
                lambda module, args, out, m=m: seen.setdefault(id(m), []).append(
                    (out[0] if isinstance(out, tuple) else out).detach().norm()
                )
            )
            layer.mlp.register_full_backward_hook(
                lambda module, i, o, m=m: seen.setdefault(id(m), []).append(o[0].norm())
            )
    assert_same_run(model, reference, lambda m: m(**zoo.batch()).loss)
    assert len(seen[id(model)]) == len(seen[id(reference)]) == 4
    assert torch.allclose(torch.stack(seen[id(model)]), torch.stack(seen[id(reference)]), rtol=1e-4)


def scaling(kind: str, scale: float):
    """A hook that changes what MLPs are given, give, or send back."""

    def mine(module) -> bool:
        return "MLP" in type(module).__name__

    return {
        "forward_pre": lambda module, args: (args[0] * scale,) if mine(module) else None,
        "forward": lambda module, args, out: out * scale if mine(module) else None,
        "full_backward_pre": lambda module, grads: (grads[0] * scale,) if mine(module) else None,
        "full_backward": lambda module, grads, _: (grads[0] * scale,) if mine(module) else None,
    }[kind]


#: hooks of all modules and backward hooks are noticed in the same way
QUICK = {("its own", "forward_pre")}


@pytest.mark.parametrize(
    "where, kind",
    [
        pytest.param(where, kind, marks=[] if (where, kind) in QUICK else pytest.mark.slow)
        for where in ("all modules", "its own")
        for kind in ("forward_pre", "forward", "full_backward_pre", "full_backward")
    ],
)
def test_hooks_that_come_after_compilation_change_numbers(kind, where):
    """Each time of the same code, with another scale; then none, and what was compiled without them serves again."""
    model, reference = pair()
    assert_same_run(model, reference, lambda m: m(**zoo.batch()).loss)
    compiled = tunecompile.report(model).compiles
    for scale in (1.5, 3.0):
        handles = (
            [getattr(nn.modules.module, f"register_module_{kind}_hook")(scaling(kind, scale))]
            if where == "all modules"
            else [
                getattr(layer.mlp, f"register_{kind}_hook")(scaling(kind, scale))
                for m in (model, reference)
                for layer in m.model.layers
            ]
        )
        with contextlib.ExitStack() as placed:
            for handle in handles:
                placed.enter_context(handle)
            assert_same_run(model, reference, lambda m: m(**zoo.batch()).loss)
    hooked = tunecompile.report(model).compiles
    assert hooked > compiled
    assert_same_run(model, reference, lambda m: m(**zoo.batch()).loss)
    assert tunecompile.report(model).compiles == hooked


class Around(nn.Module):
    """A module that takes another's place, as adapters do."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def around_it(layer: nn.Module) -> nn.Module:
    layer.mlp = Around(layer.mlp)
    return layer.mlp


def beside_it(layer: nn.Module) -> nn.Module:
    """In a list of its own, which no `__setattr__` sees."""
    layer.mlp.down_proj = nn.Sequential(layer.mlp.down_proj)
    layer.mlp.down_proj._modules["1"] = nn.Identity()
    return layer.mlp.down_proj[1]


def in_its_place(layer: nn.Module) -> nn.Module:
    weight = layer.mlp.up_proj.weight
    del layer.mlp.up_proj
    layer.mlp.up_proj = nn.Linear(*reversed(weight.shape), bias=False)
    layer.mlp.up_proj.weight = weight
    return layer.mlp.up_proj


@pytest.mark.parametrize(
    "put", [around_it, *(pytest.param(each, marks=pytest.mark.slow) for each in (in_its_place, beside_it))]
)
def test_hooks_on_modules_that_come_after_the_first_step(put):
    """The module is there for a step before its hook is."""
    model, reference = pair(small)
    assert_same_run(model, reference, lambda m: m(**zoo.batch()).loss)
    placed = [put(layer) for m in (model, reference) for layer in m.model.layers]
    assert_same_run(model, reference, lambda m: m(**zoo.batch()).loss)
    for module in placed:
        module.register_forward_hook(lambda module, args, out: out * 3)
    assert_same_run(model, reference, lambda m: m(**zoo.batch()).loss)


def replace(name: str, entries, keep: list | None = None):
    """Put a dictionary of hooks in the place of an MLP's; `keep` holds the former one."""

    def put(models):
        for m in models:
            mlp = m.model.layers[1].mlp
            if keep is not None:
                keep.append(getattr(mlp, name))
            setattr(mlp, name, OrderedDict(entries))

    return put


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, hook",
    [
        ("_forward_hooks", lambda module, args, out: out * 3),
        ("_forward_pre_hooks", lambda module, args: (args[0] * 3,)),
    ],
)
def test_dictionaries_of_hooks_that_are_replaced(name, hook):
    """Dropped or kept, empty or full, and filled in the ordinary way: the next step is eager's."""
    models, kept = pair(), []
    assert_same_run(*models, lambda m: m(**zoo.batch()).loss)
    begin = zoo.step(models[1], zoo.batch())[0].item()
    acts = [
        (replace(name, {0: hook}), True),
        (replace(name, {}, kept), False),
        (lambda ms: [getattr(m.model.layers[1].mlp, f"register{name[:-1]}")(hook) for m in ms], True),
        (replace(name, {}), False),
    ]
    for act, hooked in acts:
        act(models)
        assert_same_run(*models, lambda m: m(**zoo.batch()).loss)
        assert (zoo.step(models[1], zoo.batch())[0].item() != begin) is hooked
    assert not has(tunecompile.report(models[0]).notes, "hooks-replaced")


@pytest.mark.slow
def test_a_kept_dictionary_of_hooks_is_noticed_soon():
    """In place of an empty one that somebody keeps, and filled by hand: the one case that may be late, which is said."""
    models, kept = pair(), []
    assert_same_run(*models, lambda m: m(**zoo.batch()).loss)
    replace("_forward_hooks", {0: lambda module, args, out: out * 3}, kept)(models)
    for _ in range(TURNS):
        models[0](**zoo.batch()).loss.backward()
    assert_same_run(*models, lambda m: m(**zoo.batch()).loss)
    assert has(tunecompile.report(models[0]).notes, "hooks-replaced")


@pytest.mark.slow
def test_modules_that_are_taken_out_are_freed():
    model, _ = pair(small)
    model.train()(**zoo.batch()).loss.backward()
    layer = model.model.layers[0]
    layer.mlp = Around(layer.mlp)
    model(**zoo.batch()).loss.backward()
    torch._dynamo.reset()  # code that was compiled for it may hold it
    inner = layer.mlp.inner
    gone = [weakref.ref(inner), weakref.ref(inner.up_proj.weight)]
    layer.mlp = inner = nn.Identity()
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
