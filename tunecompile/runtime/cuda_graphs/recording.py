"""Recordings of a compiled graph in fixed memory, each for one layer and one shape."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor

from tunecompile.runtime.cuda_graphs.capture import Recorder

#: Python's references to a tensor that a list alone holds, seen from a loop over it
UNHELD = next(getrefcount(value) for value in [torch.empty(0, device="cpu")])
LARGE = 2 << 20  #: bytes; tensors of that size are copied by a launch of their own


@dataclass
class Recording:
    """One compiled graph for one layer and one shape, in fixed memory."""

    number: int  #: in the order of recording
    play: Callable[[], None]
    fixed: list[tuple[int, int]]  #: (position, address) of inputs that must not move
    copied: list[tuple[int, Tensor]]  #: (position, buffer) of inputs that change
    outputs: list[Any]
    handed: int  #: so many outputs belong to the caller; the others are saved for the backward
    passed: dict[int, int]  #: outputs that are copied inputs, or views of them: position of the input
    saved: list[int]  #: outputs for the backward that lie in the recording's own memory
    lent: list[Tensor] = field(default_factory=list)  #: tensors given out of the recording's own memory
    backward: Recording | None = None
    shape: tuple = ()  #: of the call: the sizes that are symbols
    pool: Any = None  #: the forwards' `RecordingPool` that it is of
    owned: dict[int, Recording] = field(default_factory=dict)  #: by the address of a saved value: itself

    def give_back(self, positions: Sequence[int], recorder: Recorder) -> None:
        """Let other recordings of the pool write where these outputs lie, until the next replay."""
        self.lent = []
        for i in positions:
            self.outputs[i] = recorder.give_back(self.outputs[i], self.play)

    def free(self) -> bool:
        """Whether no backward that needs the saved values is still to come.

        They have no other holder then: neither autograd, whose references torch counts, nor Python, whose it does not.
        (Under a checkpoint, or with hooks for saved tensors, Python alone may hold them.)
        """
        return are_unheld(self.lent)

    def fits(self, inputs: Sequence[Any]) -> bool:
        """Whether no input moved that must not."""
        return all(inputs[position].data_ptr() == address for position, address in self.fixed)

    def replay(self, inputs: Sequence[Any]) -> list[Any]:
        copy_all([buffer for _, buffer in self.copied], [inputs[position] for position, _ in self.copied])
        self.play()
        return self.collect(inputs)

    def collect(self, inputs: Sequence[Any]) -> list[Any]:
        """The outputs: copies for the caller, the memory itself for the backward."""
        given = list(self.outputs)
        fresh = [i for i in range(self.handed) if isinstance(given[i], Tensor) and i not in self.passed]
        copies = [torch.empty_like(given[i]) for i in fresh]
        copy_all(copies, [given[i] for i in fresh])
        for i, copy in zip(fresh, copies):
            given[i] = copy
        for i, position in self.passed.items():
            source, view = inputs[position], given[i]
            offset = source.storage_offset() + view.storage_offset()  # buffers begin at their storage's beginning
            given[i] = (
                source if view is self._buffer(position) else source.as_strided(view.shape, view.stride(), offset)
            )
        self.lent = [given[i].detach() for i in self.saved]
        for i, value in zip(self.saved, self.lent):
            given[i] = value
        return given

    def _buffer(self, position: int) -> Tensor:
        return next(buffer for at, buffer in self.copied if at == position)

    def saved_at(self) -> set[int]:
        return {self.outputs[i].data_ptr() for i in self.saved}

    def saved_bytes(self) -> int:
        return sum(storages([self.outputs[i] for i in self.saved]).values())

    def addresses(self) -> set[int]:
        """Addresses that are the same at every replay."""
        return self.saved_at() | {address for _, address in self.fixed}


class LayerInputs:
    """The inputs of one layer that are the same objects at every call, whatever its shape."""

    def __init__(self, inputs: Sequence[Any]):
        self.calls = 1
        self.inputs = [weakref.ref(identity(value)) if isinstance(value, Tensor) else None for value in inputs]

    def observe(self, inputs: Sequence[Any]) -> None:
        self.calls += 1
        self.inputs = [
            ref if ref is not None and ref() is identity(value) else None for ref, value in zip(self.inputs, inputs)
        ]

    def fixed(self) -> set[int]:
        return {i for i, ref in enumerate(self.inputs) if ref is not None}


@dataclass
class ShapeSlot:
    """One layer under one shape."""

    layer: LayerInputs
    seen: int = 1
    tries: int = 0
    kept: list[Any] = field(default_factory=list)
    recording: Recording | None = None


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy with few launches.

    `_foreach_copy_` joins small tensors of one dtype. It gives a block 64 K elements, which makes too few blocks for a
    large tensor alone.
    """
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources):
        if target.nbytes >= LARGE:
            target.copy_(source)
            continue
        of_dtype = by_dtype.setdefault(target.dtype, ([], []))
        of_dtype[0].append(target)
        of_dtype[1].append(source)
    for some_targets, some_sources in by_dtype.values():
        torch._foreach_copy_(some_targets, some_sources)


def are_unheld(values: list[Tensor]) -> bool:
    """Whether nothing but this list holds the tensors: neither autograd nor Python."""
    return all(value._use_count() == 1 and getrefcount(value) == UNHELD for value in values)


def identity(value: Tensor) -> Any:
    """The object that is the same at every call. Of a matrix of weights that is its description
    (tunecompile/runtime/memory/weight_cache.py), since the weights hold its memory."""
    return getattr(value, "_matrix", value)


def device_of(inputs: Sequence[Any]) -> torch.device:
    """Where a graph's tensors lie."""
    return next((value.device for value in inputs if isinstance(value, Tensor)), torch.device("cpu"))


def storages(values: Sequence[Any]) -> dict[int, int]:
    """Bytes by address of the memory that tensors are in."""
    held = [value.untyped_storage() for value in values if isinstance(value, Tensor)]
    return {storage.data_ptr(): storage.nbytes() for storage in held}


class InputBuffers:
    """What inputs are copied to, shared by all layers: their values are used up before the next layer runs."""

    def __init__(self) -> None:
        self.made: dict[tuple, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all shapes."""
        return sum(buffer.nbytes for buffer in self.made.values())

    def of(self, graph: Any, position: int, like: Tensor) -> Tensor:
        """The buffer for an input of a graph."""
        key = (id(graph), position, tuple(like.shape), like.stride(), like.dtype, like.device)
        if key not in self.made:
            self.made[key] = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
        return self.made[key]

    def forget(self, graph: Any) -> None:
        """Drop those of a graph that is not called any more."""
        self.made = {key: buffer for key, buffer in self.made.items() if key[0] != id(graph)}
