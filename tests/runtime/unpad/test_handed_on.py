"""Keys and values that later layers read: for each layer as it runs, and in the caller's mapping as for a batch."""

from collections import UserDict
from types import SimpleNamespace

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.batches import lengths_mask, packed, padded
from tests.support.compare import assert_same_flattened
from tests.support.matrix.families import EMBEDDED
from tests.support.models.pairs import pair, without_mlps
from tests.support.reports import flattened, told_apart
from tunecompile.runtime.step.rows_refused import RowsRefused
from tunecompile.runtime.unpad.documents import read_padding
from tunecompile.runtime.unpad.flat_batch import FlatBatch
from tunecompile.runtime.unpad.handed_on import RowCall, entries_before, note_written

tf = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
ROWS, LENGTH = 3, 6
LENGTHS = (4, 6, 5)  #: 15 tokens, and one that fills up to 16
HEADS = ROWS  # [3, 3, 6, 2] may be read in two ways


def flat_of(*lengths):
    return FlatBatch.of(read_padding(lengths_mask(*lengths), None).documents)


def call_of(flat, mapping, keep=True):
    return RowCall.of(flat, None, (torch.randn(ROWS, LENGTH, 2),), {"shared": mapping, "n": 3}, keep)


def rows_of(keys):
    """[1, H, 16, D] -> [B, H, T, D], written out."""
    made, begin = torch.zeros(ROWS, keys.shape[1], LENGTH, keys.shape[3]), 0
    for row, length in enumerate(LENGTHS):
        made[row, :, :length] = keys[0, :, begin : begin + length]
        begin += length
    return made


def hands_on(count):
    return SimpleNamespace(hands_on=count)


@pytest.mark.parametrize("kind", [dict, UserDict])
@pytest.mark.parametrize("keep", [False, True])
def test_entries_are_for_the_row_inside_and_for_the_batch_outside(kind, keep):
    """A mapping that layers wrote rows to would give others, and its owner, tokens in the wrong places."""
    flat, mapping = flat_of(*LENGTHS), kind(old=5, gone=6)
    first = call_of(flat, mapping, keep)
    assert first.kwargs["n"] == 3 and type(first.kwargs["shared"]) is kind and first.kwargs["shared"] is not mapping
    keys, values = torch.randn(2, 1, HEADS, 16, 2)
    first.kwargs["shared"]["sliding"] = keys, values
    del first.kwargs["shared"]["gone"]
    assert "sliding" not in mapping
    receiver = SimpleNamespace(mappings={})
    first.hand_on(hands_on(2), receiver)
    assert [*receiver.mappings.values()] == [mapping] and receiver.mappings[id(mapping)] is mapping
    assert set(mapping) == {"old", "sliding"} and mapping["old"] == 5
    assert torch.equal(mapping["sliding"][0], rows_of(keys)) and torch.equal(mapping["sliding"][1], rows_of(values))

    row = call_of(flat, mapping, keep)
    row.hand_on(hands_on(0), unread := SimpleNamespace(mappings={}))
    assert not unread.mappings, "it was read only"
    second = row.kwargs["shared"]
    assert (second["sliding"][0] is keys) is keep, "as it was before it was padded"
    other = call_of(flat_of(*LENGTHS), mapping, keep).kwargs["shared"]["sliding"][0]
    for found in (second["sliding"][0], other):
        assert torch.equal(found[:, :, :15], keys[:, :, :15]) and found.shape == keys.shape
    mapping["sliding"][0].add_(1)
    found = call_of(flat, mapping, keep).kwargs["shared"]["sliding"][0]
    assert torch.equal(found[:, :, :15], keys[:, :, :15] + 1), "it was written to"
    flat.rows.forget()
    assert call_of(flat, mapping, keep).kwargs["shared"]["sliding"][1] is not values and flat_of(4).rows.handed == {}


def test_gradients_of_entries_meet():
    """Of layers that read the row itself, and of who reads the batch: one that bypassed the other would be lost."""
    flat, mapping = flat_of(*LENGTHS), {}
    keys = torch.randn(1, HEADS, 16, 2, requires_grad=True)
    first = call_of(flat, mapping)
    first.kwargs["shared"]["all"] = keys
    first.hand_on(hands_on(1), None)
    inside = call_of(flat, mapping).kwargs["shared"]["all"]
    elsewhere = call_of(flat_of(*LENGTHS), mapping).kwargs["shared"]["all"]
    (inside[:, :, :15].sum() + 10 * elsewhere[:, :, :15].sum() + 100 * mapping["all"].sum()).backward()
    assert (keys.grad[:, :, :15] == 111).all() and not keys.grad[:, :, 15:].any()


def test_entries_that_may_be_anything():
    """Of four sizes, which one counts tokens is known where a layer wrote it; with as many heads, not even there."""
    flat = flat_of(*LENGTHS)
    for unknown in (torch.randn(ROWS, HEADS, LENGTH, 2), torch.randn(ROWS, 1, LENGTH, LENGTH), torch.randn(7, 2)):
        assert call_of(flat, {"a": unknown}) is None
    given = call_of(flat, {"tables": torch.randn(ROWS, LENGTH, 2), "one": torch.tensor(1.0), "name": "a"})
    assert given.kwargs["shared"]["tables"].shape == (1, 16, 2) and given.kwargs["shared"]["one"].dim() == 0
    mapping = {}
    for shape in ((1, 16), (1, 16, 2), (1, 16, HEADS, 2), (2, 2)):  # tokens come first, and one has none
        row = call_of(flat, mapping)
        row.kwargs["shared"]["a"] = torch.randn(shape)
        row.hand_on(hands_on(0), None)
        assert mapping["a"].shape == ((2, 2) if shape == (2, 2) else (ROWS, LENGTH, *shape[2:]))
    given.kwargs["shared"]["a"] = torch.randn(1, 16, 16, 2)
    with pytest.raises(RowsRefused) as raised:
        given.hand_on(hands_on(1), None)
    assert raised.value.reason.code == "output-holds-more"


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_entries_of_any_form_come_back_as_they_were(dim):
    """Whichever dimension counts tokens: with others in its place, a later layer would read values of other heads."""
    flat, mapping, sizes = flat_of(*LENGTHS), {}, [1, 5, 7, 4, 2]
    sizes[dim] = 16
    written, row = torch.randn(sizes), call_of(flat, mapping, keep=False)
    row.kwargs["shared"]["a"] = written
    row.hand_on(hands_on(int(dim == 2)), None)
    found = call_of(flat_of(*LENGTHS), mapping).kwargs["shared"]["a"]
    assert torch.equal(found.narrow(dim, 0, 15), written.narrow(dim, 0, 15))


def test_entries_of_layers_that_ran_on_the_batch():
    """Layers without a mask do. What was there before, or has sizes that tell nothing, is not taken for keys."""
    keys = {name: torch.randn(ROWS, HEADS, LENGTH, 2) for name in ("old", "written", "other")}
    mapping = UserDict(old=keys["old"])
    before = entries_before((), {"shared": mapping, "n": {}})
    mapping["written"] = keys["written"], torch.tensor(1.0)
    mapping["many"], mapping["few"] = torch.randn(ROWS, LENGTH, LENGTH, 2), torch.randn(2, HEADS, LENGTH, 2)
    note_written(before, (ROWS, LENGTH))
    flat = flat_of(*LENGTHS)
    row = call_of(flat, {"all": keys["written"]}).kwargs["shared"]["all"]
    assert torch.equal(rows_of(row), keys["written"] * lengths_mask(*LENGTHS)[:, None, :, None])
    for unknown in (keys["old"], keys["other"], mapping["many"], mapping["few"]):
        assert call_of(flat, {"all": unknown}) is None


@pytest.mark.parametrize("found", [0, 1])
def test_what_a_graph_returns_has_to_be_found(found):
    """A layer that kept keys in an attribute would leave a row there."""
    row = call_of(flat_of(*LENGTHS), {})
    row.kwargs["shared"] |= {"a": torch.randn(1, HEADS, 16, 2)} if found else {}
    assert row.hand_on(hands_on(found + 1), None).code == "output-holds-more"
    assert row.hand_on(hands_on(found), None) is row.hand_on(None, None) is None


def sharing(**changes):
    """The last two of four layers read keys and values of the first two."""
    if not hasattr(tf, "Gemma4TextConfig"):
        pytest.skip("a later transformers has it")
    return without_mlps(zoo.make("gemma4", **{**EMBEDDED, "use_cache": False, **changes})).double()


@pytest.mark.parametrize("pairs", [2, 3])
def test_layers_that_share_keys_lose_their_padding(pairs):
    """Without the batch's keys, or with those of other tokens, gradients of what makes them differ.

    pairs: of layers, of which the last reads keys of the one before; those of a first one of three nobody reads.
    """
    layers = dict(num_hidden_layers=2 * pairs, layer_types=EMBEDDED["layer_types"][:2] * pairs)
    model, reference = pair(lambda: sharing(**layers))
    compiled = []
    for number, (length, side) in enumerate([(20, "right"), (27, "left")]):
        assert_same_flattened(model, reference, padded(rows=number + 2, length=length, side=side, seed=number))
        compiled.append(tunecompile.report(model).compiles)
    assert {*compiled} == {4}, tunecompile.report(model)
    assert flattened(model) == 2
    assert_same_flattened(model, reference, packed((9, 4), (6, 7)))
    assert told_apart(model) == 1
