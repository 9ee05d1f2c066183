"""When a layer runs by its own code, and what is said then. No layer is compiled."""

from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.support.notes import has
from tunecompile.notes import note
from tunecompile.runtime.layers import compiled_layer, layer_slot
from tunecompile.runtime.layers.layer_slot import LayerSlot
from tunecompile.runtime.parts.layers import Layers
from tunecompile.runtime.step.rows_refused import RowsRefused
from tunecompile.runtime.unpad.owner_call import OwnerCall

WHY = note("loop-over-list", detail="a loop")


def looping(why=WHY, padding=None):
    """A slot whose region says this of loops, and what it was asked."""
    asked = []
    loops = SimpleNamespace(refuse=lambda *given, new: asked.append((*given, new)) or why)
    region = SimpleNamespace(loops=loops, refused=Counter())
    slot = SimpleNamespace(layer=nn.Tanh(), region=region, padding=padding)
    slot._run_eagerly = partial(layer_slot.LayerSlot._run_eagerly, slot)
    return slot, asked


def owner(drops):
    return SimpleNamespace(running=None if drops is None else OwnerCall({}, drops=drops))


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
    with pytest.raises(RowsRefused) as caught:
        LayerSlot._loops(slot, (), {})
    assert has([caught.value.reason], "runs-eagerly") and not slot.region.refused
    monkeypatch.setattr(layer_slot, "in_backward", lambda: True)
    assert LayerSlot._loops(slot, (), {}) is True and [new for *_, new in asked] == [True, False]


@pytest.mark.parametrize("late", [[False, False], [True, False]])
def test_each_step_looks_at_modules_and_their_classes(late):
    """Hooks that were found late are told once."""
    looked, effort = [], SimpleNamespace(seconds=0.0)
    classes = [SimpleNamespace(look=lambda i=i: looked.append(i)) for i in range(2)]
    regions = [SimpleNamespace(classes=each, effort=effort) for each in classes]
    state = SimpleNamespace(regions=regions, notes=[])
    slots = [SimpleNamespace(follow_modules=lambda found=found: looked.append("modules") or found) for found in late]
    for _ in range(2):
        Layers().follow(state, slots)
    assert looked == ["modules", "modules", 0, 1] * 2
    assert [each.code for each in state.notes] == ["hooks-replaced"] * any(late)


class Kind:
    """A slot that is asked for the kind of a call; `marked` says how sizes were marked."""

    def __init__(self, monkeypatch, in_tower=False, images=False, unread=False, collects=False, **more):
        self.marked, self.asked = [], []
        for name in ("mark_flat", "mark_patches"):
            monkeypatch.setattr(compiled_layer, name, lambda *given, name=name: self.marked.append((name, *given)))
        sizes = SimpleNamespace(
            **{
                name: lambda *given, name=name: self.marked.append((name, *given)) or True
                for name in ("mark", "mark_all")
            }
        )
        monkeypatch.setattr(compiled_layer.context_parallel, "is_shared", lambda: "shared")
        monkeypatch.setattr(
            compiled_layer.output_capturing, "collects_attention", lambda owner: owner == "owner" and collects
        )
        monkeypatch.setattr(compiled_layer, "hooks_were_seen", lambda: "seen")
        monkeypatch.setattr(compiled_layer, "are_unread", lambda *given: self.asked.append(given) or unread)
        region = SimpleNamespace(
            in_tower=in_tower,
            sizes=sizes,
            classes=SimpleNamespace(version=7),
            weights_read=more.get("read", False),
            masked=SimpleNamespace(known=more.get("known", False)),
        )
        self.slot = SimpleNamespace(
            **dict(
                region=region,
                step=SimpleNamespace(images=images, evaluates=False),
                place=5,
                owner="owner",
                takes_ids=more.get("takes_ids", True),
            ),
            **dict(placement=more.get("placement"), hooked=lambda: more.get("hooks", ())),
            inside=SimpleNamespace(collected=more.get("collected", False), hooks=()),
            switched_off=SimpleNamespace(active=("default",)),
            gives=more.get("gives", True),
        )

    def __call__(self, *args, scores=False, **kwargs):
        return LayerSlot._kind(self.slot, args, kwargs, scores)


HIDDEN = torch.zeros(2, 6, 4)


@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize("images", [False, True])
def test_forwards_that_score_and_text_behind_images_have_symbols_at_once(monkeypatch, scores, images):
    """Constants would be compiled for each of their lengths."""
    kind = Kind(monkeypatch, images=images)
    assert kind(HIDDEN, scores=scores)[1] == (2, 6)
    ((name, tensors, sizes, place),) = kind.marked
    assert name == ("mark_all" if scores or images else "mark") and (sizes, place) == ((2, 6), 5)
    assert tensors[0][0] == 0 and tensors[0][1] is HIDDEN and kind.slot.step.images is images


@pytest.mark.parametrize("in_tower", [False, True])
@pytest.mark.parametrize("hidden", [torch.zeros(6, 4), HIDDEN])
@pytest.mark.parametrize("told", [False, True])
def test_rows_of_patches_are_marked_as_such(monkeypatch, in_tower, hidden, told):
    kind = Kind(monkeypatch, in_tower=in_tower)
    kind(hidden, **({compiled_layer.LONGEST_IMAGE: torch.zeros(3, 0)} if told else {}))
    patches = told or (in_tower and hidden.dim() == 2)
    assert [name for name, *_ in kind.marked] == ["mark_patches" if patches else "mark"]
    assert kind.slot.step.images is patches and kind.marked[0][1][0][1] is hidden


def test_a_row_of_documents_is_marked_by_its_tokens(monkeypatch):
    """Also in a tower, where images are its documents."""
    for in_tower in (False, True):
        kind, offsets = Kind(monkeypatch, in_tower=in_tower), torch.zeros(3, dtype=torch.int32)
        found, sizes = kind(HIDDEN[:1], **{compiled_layer.OFFSETS: offsets, compiled_layer.WINDOW: 9})
        assert found.flat and sizes == (1, 6) and found.setting[2] == 9
        assert [(name, total) for name, _, total in kind.marked] == [("mark_flat", 6)]


def test_calls_differ_by_gradients_hooks_dtypes_and_sizes_of_one(monkeypatch):
    kind = Kind(monkeypatch, hooks=("a hook",))
    found, _ = kind(HIDDEN[:1], mask=torch.ones(3, requires_grad=True))
    assert found.setting == (True, "shared", None, ("a hook",), "seen", 7, ("default",)) and not found.flat
    assert found.tensors == (True, False, (0, torch.float32, False), ("mask", torch.float32, True))
    with torch.no_grad():
        assert kind(HIDDEN)[0].setting[0] is False and kind(HIDDEN)[0].tensors[:2] == (False, False)


@pytest.mark.parametrize("changed", ["", "placement", "read", "said"])
def test_attention_weights_are_left_out_where_nobody_reads_them(monkeypatch, changed):
    more = {changed: True} if changed in ("placement", "read") else {}
    assert Kind(monkeypatch, unread=changed != "said", **more)(HIDDEN)[0].unread is (changed == "")


@pytest.mark.parametrize("changed", ["", "hooks", "collected", "collects"])
def test_hooks_of_transformers_collect_attention_where_no_others_are(monkeypatch, changed):
    more = {changed: ("a hook",)} if changed in ("hooks", "collected") else {}
    kind = Kind(monkeypatch, collects=changed != "collects", **more)
    kind(HIDDEN, a=1)
    assert kind.asked == [({"a": 1}, changed == "")]


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("images", [False, True])
def test_the_first_layers_view_and_a_towers_images_are_told(monkeypatch, first, images):
    monkeypatch.setattr(compiled_layer, "without_view", lambda args, kwargs: ((*args, "no view"), kwargs, "shared"))
    told = SimpleNamespace(tell=lambda args, kwargs: {**kwargs, "told": args})
    slot = SimpleNamespace(first=first, images=told if images else None, padding=None)
    args = (1, "no view") if first else (1,)
    expected = {"a": 2, "told": args} if images else {"a": 2}
    assert LayerSlot._told(slot, (1,), {"a": 2}) == (args, expected, "shared" if first else None)
