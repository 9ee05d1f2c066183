"""What a layer put somewhere when it ran without padding is taken out once it ran with it, and nothing else."""

from collections import deque, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from tests.support.batches import lengths_mask
from tunecompile.runtime.unpad.documents import read_padding
from tunecompile.runtime.unpad.flat_batch import FlatBatch
from tunecompile.runtime.unpad.handed_on import RowCall
from tunecompile.runtime.unpad.stale_rows import StaleRow, take_back

ModelOutput = pytest.importorskip("transformers.utils").ModelOutput
EARLIER = torch.zeros(1, 4)
Pair = namedtuple("Pair", "number value")


class Slotted:
    __slots__ = ("values",)


class OneSlot:
    __slots__ = "values"


class Inherited(Slotted):
    pass


def of_slots(kind):
    made = kind()
    made.values = None
    return made


class OfClass:
    """Python remembers what it found in a class: its dictionary must not be written to directly."""

    def __init__(self):
        self.Kind = type("Kind", (), {"values": None})

    @property
    def values(self):
        return self.Kind.values

    @values.setter
    def values(self, new):
        self.Kind.values = new


class OfClosure:
    def __init__(self):
        kept = None

        def read():
            return kept

        def write(new):
            nonlocal kept
            kept = new

        self.read, self.write = read, write

    values = property(lambda self: self.read(), lambda self, new: self.write(new))


class OfItem(dict):
    values = property(lambda self: self["kept"], lambda self, new: self.__setitem__("kept", new))


class OfListItem(list):
    values = property(lambda self: self[0], lambda self, new: self.__setitem__(slice(None), [new]))


BOXES = {
    "attribute": SimpleNamespace,
    "object": lambda: type("Box", (), {})(),
    "slots": lambda: of_slots(Slotted),
    "one slot": lambda: of_slots(OneSlot),
    "a base's slots": lambda: of_slots(Inherited),
    "class": OfClass,
    "closure": OfClosure,
    "dictionary": OfItem,
    "list": OfListItem,
    "module": lambda: torch.nn.Identity(),
}
GROWING = {
    "tuple": lambda values, value: (*values, value),
    "new list": lambda values, value: [*values, value],
    "list": lambda values, value: values.append(value) or values,
    "deque": lambda values, value: values.append(value) or values,
    "pairs in a tuple": lambda values, value: (*values, (3, value)),
    "pairs in a list": lambda values, value: values.append((3, value)) or values,
    "dictionaries in a list": lambda values, value: values.append({"value": value}) or values,
    "pairs in a new list": lambda values, value: [*values, Pair(3, value)],
}


def stale(row):
    return [StaleRow.of(row, row)]


def tensors(values):
    for value in values:
        while not isinstance(value, torch.Tensor):
            value = value["value"] if isinstance(value, dict) else value[-1]
        yield value


@pytest.mark.parametrize("grow", GROWING)
@pytest.mark.parametrize("box", BOXES)
def test_of_what_grows_the_row_alone_is_taken(box, grow):
    """A loss of it would have a term too many, of other tokens."""
    kept, add, row, batch, later = BOXES[box](), GROWING[grow], *torch.randn(3, 1, 4)
    kept.values = {"list": list, "deque": deque}.get(grow.split()[-1], tuple)()
    kept.values = add(kept.values, EARLIER)
    kept.values = add(kept.values, row)
    found = stale(row)
    for value in (batch, later):
        kept.values = add(kept.values, value)
    take_back(found)
    assert not found and [id(value) for value in tensors(kept.values)] == [id(EARLIER), id(batch), id(later)]


def test_what_others_stand_in_the_place_of_stays():
    row, batch = torch.randn(2, 1, 4)
    places, pair, named = [None, row, EARLIER], SimpleNamespace(value=(1, row)), {"kept": row}
    found = stale(row)
    places[1], pair.value, named["kept"] = batch, (1, batch), batch
    take_back(found)
    assert places[1] is batch and places[2] is EARLIER and len(places) == 3
    assert pair.value[1] is batch and named == {"kept": batch}


def test_an_attribute_that_is_bound_once_keeps_its_tuple():
    """There is no other to put in its place, and half a pair would be none."""
    row = torch.randn(1, 4)
    once = SimpleNamespace(value=(1, row))
    take_back(stale(row))
    assert once.value[1] is row


def test_attributes_are_no_entry_of_a_list():
    """A list may hold the dictionaries of objects' attributes, as ours of modules do."""
    row, module, entry = torch.randn(1, 4), torch.nn.Identity(), {"value": None}
    module.kept, entry["value"] = row, row
    listed = [vars(module), entry]
    take_back(stale(row))
    assert listed == [vars(module)] and module.kept is row


def test_all_places_of_a_row_are_left_and_equal_tensors_stay():
    row = torch.randn(1, 4)
    values, other = [row, row.clone(), row], (EARLIER,)
    found = stale(row)
    other = (*other, row, row)
    box = SimpleNamespace(value=other)
    del other
    take_back(found)
    assert len(values) == 1 and values[0] is not row and box.value == (EARLIER,)


def called():
    """A call on a row of documents, and its output. (A fixture's value would be held by pytest.)"""
    flat = FlatBatch.of(read_padding(lengths_mask(4, 6, 5), None).documents)
    call = RowCall.of(flat, None, (torch.randn(3, 6, 2),), {}, True)
    return call, torch.randn_like(call.args[0])


@dataclass
class Output(ModelOutput):
    """Has each entry as an attribute, too."""

    value: torch.Tensor | None = None


#: what a layer may return around its hidden states
WHOLE = {
    "tuple": lambda value: (None, value),
    "list": lambda value: [None, value],
    "dictionary": lambda value: {"value": value},
    "output": lambda value: Output(value=value),
}


class TestIsKept:
    """Which rows of a call are looked for."""

    def test_a_result_that_nobody_holds(self):
        call, output = called()
        found = []
        assert not call.is_kept([EARLIER, None], (output, None), found) and not found

    @pytest.mark.parametrize("around", [tuple, list])
    def test_a_result_that_the_user_holds(self, around):
        call, output = called()
        values, found = [output], []
        assert call.is_kept([], around([EARLIER, output]), found)
        assert [each.row is output for each in found] == [True]
        values.append(EARLIER)
        take_back(found)
        assert len(values) == 1 and values[0] is EARLIER

    @pytest.mark.parametrize("kind", WHOLE)
    @pytest.mark.parametrize("held", [False, True])
    def test_a_whole_result_that_the_user_holds(self, kind, held):
        """Its tensors are held by nothing but the result."""
        call, output = called()
        whole, found, values = WHOLE[kind](output), [], []
        values += [whole] * held
        assert call.is_kept([], whole, found) is held and len(found) == held
        values.append(EARLIER)
        take_back(found)
        assert len(values) == 1 and values[0] is EARLIER and next(tensors([whole])) is output

    def test_a_result_in_a_list_of_the_layers(self):
        """It is known by the layer's attributes, and has to be taken back as from any other list."""
        call, output = called()
        values, found = [output], []
        assert call.is_kept(iter([values, *values]), output, found)
        take_back(found)
        assert not values

    def test_an_argument_in_a_list_of_the_layers(self):
        call, output = called()
        values, found = [call.args[0]], []
        assert call.is_kept(iter([values, *values]), output, found)
        take_back(found)
        assert not values and len(call.args) == 1

    def test_an_argument_that_is_returned_is_no_result(self):
        call, _ = called()
        found = []
        held = [call.args[0]]
        assert not call.is_kept([], call.args[0], found) and not found and held

    def test_a_row_that_was_there_before_is_not_taken(self):
        """A table as long as the row by chance."""
        call, output = called()
        table, found = torch.randn_like(output), []
        values = [table]
        assert call.is_kept(values, output, found) and not found
        take_back(found)
        assert values[0] is table


def test_tuples_around_a_rows_tuple_are_known_when_it_is_made():
    """They were there before the user made any longer. Lists around it are not: what is in them is taken out."""
    row = torch.ones(1, 3)
    kept = (1, row)
    around, many = (kept, 2), [kept]
    made = StaleRow.of(row, None)
    assert id(kept) in made.inner and id(around) in made.outer and id(many) not in made.outer
