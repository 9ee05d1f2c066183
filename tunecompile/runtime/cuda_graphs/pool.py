"""Memory that recordings share: those of one compiled graph, for all its layers and shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import count
from typing import Protocol

from tunecompile.runtime.cuda_graphs.capture import Recorder
from tunecompile.runtime.cuda_graphs.recording import Recording, ShapeSlot

MAX_TRIES = 4  #: recordings of one layer and shape, until the layers' order has settled
_numbers = count()


def next_pool() -> int:
    """The number of a pool that is no other's."""
    return next(_numbers)


class Holder(Protocol):
    """What recordings of several pools have in common."""

    recorder: Recorder
    owners: dict[int, Recording]  #: address of a saved value -> the forward that wrote it last
    bytes: int  #: that recordings made the process take from the device


class RecordingPool:
    """The pool of a compiled layer's recordings: of forwards, which save values, and of backwards, which need them.

    Saved values may lie where an *earlier* recording has scratch, since that was free by then. So a recording is
    replayed only while no later one's saved values are still needed: layers recorded in the order in which they run,
    and backwards recorded after all of them, always satisfy that. When another shape is recorded, the saved values of
    the one before are given back to the pool: from then on shapes lie over each other, and a recording is replayed only
    while none of another shape is needed.
    """

    def __init__(self, holder: Holder, places: Mapping[tuple, ShapeSlot]):
        self.number = next_pool()
        self.holder = holder
        self.places = places  #: by shape and layer
        self.shapes: set[tuple] = set()  #: that were recorded
        self.bytes = 0  #: that its recordings made the process take from the device
        self.saved = 0  #: bytes in tensors that recordings hold from step to step
        self.flying: list[Recording] = []  #: whose backward is still to come, all of one shape, by rising number
        self.holds: tuple | None = None  #: the shape whose saved values no other recording may lie over
        self.largest = 0  #: bytes of the inputs that change, of the largest shape so far
        self.begun_anew: Counter[tuple] = Counter()  #: by shape: how often all layers of it were

    def in_order(self, recording: Recording) -> bool:
        """Whether no saved value that may lie in this recording's memory is still needed."""
        return self._settled(recording.shape) and (not self.flying or self.flying[-1].number < recording.number)

    def _settled(self, shape: tuple) -> bool:
        """Whether no backward of another shape is still to come."""
        while self.flying and self.flying[-1].free():
            self.flying.pop()
        return not self.flying or self.flying[-1].shape == shape

    def hold(self, shape: tuple, size: int) -> bool:
        """Whether a layer can be recorded now; the saved values of other shapes are given back.

        Args:
            shape: of the call.
            size: bytes of the inputs that change.
        """
        if not self._settled(shape):
            return False
        if shape == self.holds:
            return True
        if stale := self._recorded(shape):  # others may lie over what these save, so that none can be added
            self.begun_anew[shape] += 1
            if self.begun_anew[shape] <= MAX_TRIES:
                for place in stale:
                    self.drop(place)
            return False  # the next step records all of its layers, from the first one on
        if self.flying:
            return False
        if size > self.largest:
            self._empty()
        for place in self._recorded(self.holds):
            if (held := place.recording) is not None:
                held.give_back(held.saved, self.holder.recorder)
        self.holds, self.largest, self.saved = shape, max(size, self.largest), 0
        return True

    def _recorded(self, shape: tuple | None) -> list[ShapeSlot]:
        return [place for (at, *_), place in self.places.items() if at == shape and place.recording is not None]

    def _empty(self) -> None:
        """Drop all recordings for those of a larger shape: the allocator cannot join the blocks that smaller ones left.

        The other shapes are recorded again when they come, in memory that is large enough.
        """
        recorded = [place for place in self.places.values() if place.recording is not None]
        for place in recorded:
            self.drop(place)
            place.tries = 0
        if recorded:
            self.holder.recorder.release()

    def drop(self, place: ShapeSlot) -> None:
        """Free the memory of a layer's recording, if it has one; a backward that needs it runs unrecorded."""
        old, place.recording = place.recording, None
        if old is None:
            return
        self.saved -= old.saved_bytes() if old.shape == self.holds else 0
        if all(each.recording is None for each in self.places.values()):  # the others go on using the pool's memory
            self.holder.bytes -= self.bytes
            self.bytes = 0
        for address in old.owned:
            if self.holder.owners.get(address) is old:
                del self.holder.owners[address]
        old.owned.clear()  # it holds itself there, and so its graph and all memory of the pool

    def forget(self) -> None:
        """Let go of all recordings, so that their memory is free at once, without Python's collector of cycles.

        None is replayed any more, so that no order of those whose backward is still to come need be kept.
        """
        for recording in [place.recording for place in self.places.values()] + self.flying:
            if recording is not None:
                recording.owned.clear()
        self.flying.clear()
