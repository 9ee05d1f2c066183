"""When a layer runs by its own code, and what is said then. No layer is compiled."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.support.notes import has
from tunecompile.compiler.token_wise import NotTokenWise
from tunecompile.notes import note
from tunecompile.runtime import layer_slot
from tunecompile.runtime.layer_slot import LayerSlot
from tunecompile.runtime.parts.layers import Layers

WHY = note("loop-over-list", detail="a loop")


def looping(why=WHY, padding=None):
    """A slot whose region says this of loops, and what it was asked."""
    asked = []
    loops = SimpleNamespace(refuse=lambda *given, new: asked.append((*given, new)) or why)
    region = SimpleNamespace(loops=loops, refused=Counter())
    return SimpleNamespace(layer=nn.Tanh(), region=region, padding=padding), asked


def owner(drops):
    return SimpleNamespace(running=None if drops is None else SimpleNamespace(drops=drops))


@pytest.mark.parametrize("padding", [None, owner(None), owner(False), owner(True)])
def test_a_layer_without_a_loop_is_compiled(padding):
    slot, asked = looping(None, padding)
    assert LayerSlot._loops(slot, (1,), {"a": 2}) is False and not slot.region.refused
    ((layer, run, args, kwargs, new),) = asked
    assert (layer, args, kwargs, new) == (slot.layer, (1,), {"a": 2}, True)
    assert torch.equal(run(torch.ones(1)), torch.ones(1).tanh())


@pytest.mark.parametrize("padding", [None, owner(None), owner(False)])
def test_a_layer_with_a_loop_runs_by_its_own_code(padding):
    slot, _ = looping(padding=padding)
    for count in (1, 2):
        assert LayerSlot._loops(slot, (), {}) is True and slot.region.refused == {WHY: count}


def test_a_loop_does_not_read_zeros_at_padding(monkeypatch):
    """Layers before it left out what stands there: the batch begins anew, with its padding. A checkpoint repeats what
    ran, where nothing was left out."""
    slot, asked = looping(padding=owner(True))
    with pytest.raises(NotTokenWise) as caught:
        LayerSlot._loops(slot, (), {})
    assert has([caught.value.reason], "runs-eagerly") and not slot.region.refused
    monkeypatch.setattr(layer_slot, "in_backward", lambda: True)
    assert LayerSlot._loops(slot, (), {}) is True and [new for *_, new in asked] == [True, False]


@pytest.mark.parametrize("late", [[False, False], [True, False]])
def test_each_step_looks_at_modules_and_their_classes(late):
    """Hooks that were found late are told once."""
    looked, regions = (
        [],
        [SimpleNamespace(classes=SimpleNamespace(look=lambda i=i: looked.append(i))) for i in range(2)],
    )
    state = SimpleNamespace(regions=regions, notes=[])
    slots = [SimpleNamespace(follow_modules=lambda found=found: looked.append("modules") or found) for found in late]
    for _ in range(2):
        Layers().follow(state, slots)
    assert looked == ["modules", "modules", 0, 1] * 2
    assert [each.code for each in state.notes] == ["hooks-replaced"] * any(late)
