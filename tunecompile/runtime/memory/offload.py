"""Saved tensors are offloaded to host memory, and copied back before the backward pass needs them.

Autograd's hooks for saved tensors see the tensors that one layer's forward saves. Each storage is a block: copied out
when the layer has run, freed on the device one layer later, and copied back when the backward pass is `ahead` layers
away. Events between streams order all copies; the host waits for the disk only. The order of the forward calls tells
which layer comes next, last in, first out. So a layer may run several times, under several losses, and have no backward
at all.

As autograd does, a backward through tensors that were changed in place is refused, as long as the change could reach
the copy. Later changes leave the copy, and so the gradients, right.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tunecompile._torch.autograd import plain_tensors, saving_is_taken
from tunecompile._torch.fake_tensors import StorageWeakRef
from tunecompile.errors import ModifiedInPlace
from tunecompile.planner.solver import AHEAD
from tunecompile.runtime.cuda_graphs.launch_bound import HostTime
from tunecompile.runtime.memory.host.disk_store import BlockStore, Disk, StoredBlock
from tunecompile.runtime.memory.host.pinned_pool import (
    CopyEngine,
    CopyMark,
    CudaCopyEngine,
    PinnedPool,
    ResidentCopyEngine,
    available,
)

SMALLEST = 1 << 20  #: bytes; smaller storages stay on the device


class LayerCall:
    """One run of one layer's forward. It lives as long as any tensor that it saved."""

    def __init__(self, number: int, layer: int, module: nn.Module, offloads: Callable[[Tensor], bool] | None):
        self.number, self.layer, self.module, self.offloads = number, layer, module, offloads
        self.weights: set[int] | None = None  #: addresses, known once something is saved
        self.blocks: list[weakref.ref[OffloadedBlock]] = []


class OffloadedBlock:
    """One storage that layers have saved: on the device, away from it, or both."""

    def __init__(self, layer: int, tensor: Tensor, stay: StoredBlock, dead: deque):
        storage = tensor.untyped_storage()
        self.layer, self.stay, self.dead = layer, stay, dead
        self.identity = StorageWeakRef(storage)  # while it is held, no other storage has this identity
        self.version = tensor._version
        self.device: Tensor | None = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
            storage, 0, (storage.nbytes(),), (1,)
        )
        self.mark: CopyMark | None = None  #: of the last copy; before it, nobody may write to `device`, or free it
        self.watched: list[tuple[Tensor, int]] = []  #: with their versions, until no change can reach the copy
        self.modified: str | None = None  #: which tensor was changed in place
        self.handles = 0
        self.pending: set[int] = set()  #: handles that were not unpacked yet

    def add(self, tensor: Tensor) -> int:
        if self.device is not None:
            self.watched.append((tensor, tensor._version))
            self.pending.add(self.handles)
        self.handles += 1
        return self.handles - 1

    def check(self) -> None:
        for tensor, version in self.watched:
            if tensor._version != version:
                self.modified = f"{list(tensor.shape)} is at version {tensor._version}; expected version {version}"

    def __del__(self) -> None:
        self.dead.append((self.stay, self.device, self.mark))


class SavedHandle:
    """Autograd holds it in the place of a tensor of a block."""

    def __init__(self, call: LayerCall, block: OffloadedBlock, tensor: Tensor):
        self.call, self.block, self.number = call, block, block.add(tensor)
        self.dtype, self.view = tensor.dtype, (tensor.storage_offset(), tensor.shape, tensor.stride())

    def of(self, device: Tensor) -> Tensor:
        return torch.empty(0, dtype=self.dtype, device=device.device).set_(device.untyped_storage(), *self.view)


class ResidentTensor:
    """Autograd holds it in the place of a tensor that stays, with the version check that hooks take from autograd."""

    def __init__(self, call: LayerCall, tensor: Tensor):
        self.call, self.tensor, self.version = call, tensor, tensor._version


class Offload:
    """The saved tensors of one model, on one device.

    Not offloaded are: weights, tensors on other devices or of other classes (4-bit parameters), storages below
    `smallest` bytes, tensors that outlived the step before, and those that neither host nor disk has room for. A
    storage that is saved several times is copied once. Tensors that a `torch.autograd.Function` keeps as an attribute
    of its context are invisible here, as they are to autograd.

    Args:
        device: where the layers run. On a CPU copies are only counted.
        host_bytes: bytes of pinned host memory that may be taken; None for half of what is available.
        folder: for files, where host memory is full; None for no files.
        ahead: layers before their backward that tensors are copied back.
        smallest: bytes; smaller storages stay on the device.
        copier: the copy engine; None to choose it by `device`.

    Raises:
        OSError: `folder` cannot be written to.
    """

    def __init__(
        self,
        device: torch.device,
        host_bytes: int | None = None,
        folder: Path | None = None,
        ahead: int = AHEAD,
        *,
        smallest: int = SMALLEST,
        copier: CopyEngine | None = None,
    ):
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device, self.ahead, self.smallest = device, ahead, smallest
        self.copier = copier or (CudaCopyEngine(device) if device.type == "cuda" else ResidentCopyEngine())
        self.pool = PinnedPool(available() // 2 if host_bytes is None else host_bytes, self.copier.allocate)
        self.store = BlockStore(
            self.pool, self.copier, Disk(folder) if folder is not None and self.copier.moves else None
        )
        self.calls: weakref.WeakValueDictionary[int, LayerCall] = weakref.WeakValueDictionary()
        self.blocks: weakref.WeakValueDictionary[int, OffloadedBlock] = (
            weakref.WeakValueDictionary()
        )  #: by identity of the storage
        self.dead: deque[tuple[StoredBlock, Tensor | None, CopyMark | None]] = (
            deque()
        )  #: of blocks; freed here, since they may die at any moment
        self.flying: deque[list[weakref.ref[OffloadedBlock]]] = (
            deque()
        )  #: of each call, copied out and not yet freed on the device
        self.outliving: dict[int, StorageWeakRef] = {}
        self.number = 0
        self.spent = HostTime()  #: in forwards
        self.reached: int | None = None  #: the call that the backward pass is in
        self._forget_step()
        weakref.finalize(
            self, _give_back, self.dead, self.store, self.copier
        ).atexit = False  # copies may still be under way

    def expect(self, nbytes: int) -> None:
        """Begin to allocate host memory for the bytes that a step will offload."""
        if self.copier.moves:
            self.pool.expect(nbytes)

    @contextmanager
    def layer(self, index: int, module: nn.Module, offloads: Callable[[Tensor], bool] | None = None) -> Iterator[None]:
        """A context for one forward call of a layer: tensors that autograd saves inside are offloaded.

        Wrap layers that keep everything too (`offloads` always false): their backward starts the copies of the next
        ones.

        Args:
            index: of the layer, for the report.
            module: the layer; its parameters and buffers stay.
            offloads: which of the saved tensors go; None for all.
        """
        if not torch.is_grad_enabled():
            yield
            return
        if (why_not := saving_is_taken()) is not None:
            self.refusals[why_not] += 0
            yield
            return
        with self.spent.counted():
            self._sweep()
            self._free(all_but=min(1, self.ahead))
            self.number += 1
            call = self.calls[self.number] = LayerCall(self.number, index, module, offloads)
        with torch.autograd.graph.saved_tensors_hooks(partial(self._pack, call), self._unpack):
            yield
        with self.spent.counted():
            self._send(call)

    def begin_step(self) -> None:
        """At the model's entry: drop copies on the device that no backward used, and begin all counts anew.

        A forward whose backward may still come is left as it is: autograd drops it, with its loss.
        """
        self.settle()
        for block in {block for call in list(self.calls.values()) for block in _alive(call.blocks)}:
            self._drop(block)
        self.reached = None
        known = {**self.outliving, **{ref.cdata: ref for ref in self.sent}}
        self.outliving = {identity: ref for identity, ref in known.items() if not ref.expired()}
        self._forget_step()

    def settle(self) -> None:
        """Free all blocks on the device that were copied out, before head and loss, whose memory may be the peak."""
        self._free(all_but=0)
        self._sweep()

    def report(self) -> dict[str, Any]:
        """Counts of the step since `begin_step`, in bytes and milliseconds. Waits for its copies.

        `exposed_ms` is how long the device waited for copies, `blocked_ms` the host for the disk. `refusals` are bytes
        by reason, or 0 where a layer could not be hooked.
        """
        self._sweep()
        return {
            "bytes_out": self.out.total(),
            "bytes_back": self.back,
            "bytes_out_by_layer": dict(self.out),
            "host_bytes": self.pool.used,
            "peak_host_bytes": self.pool.peak,
            "pinned_bytes": self.pool.reserved,
            "disk_bytes": self.store.written,
            "blocked_ms": self.store.blocked_ms,
            "refusals": dict(self.refusals),
            **self.copier.times(),
        }

    def _forget_step(self) -> None:
        self.out, self.back, self.refusals = Counter(), 0, Counter()
        self.sent: list[StorageWeakRef] = []
        self.pool.peak, self.store.blocked_ms, self.store.written = self.pool.used, 0.0, 0
        self.copier.reset()

    def _pack(self, call: LayerCall, tensor: Tensor) -> Any:
        if type(tensor) is not Tensor or tensor.layout is not torch.strided:
            return tensor
        with self.spent.counted():
            block = self._block(call, tensor) if self._goes(call, tensor) else None
            return ResidentTensor(call, tensor) if block is None else SavedHandle(call, block, tensor)

    def _goes(self, call: LayerCall, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        if tensor.device != self.device or storage.nbytes() < self.smallest or tensor.is_conj() or tensor.is_neg():
            return False
        if call.weights is None:
            call.weights = _addresses(call.module)
        outlived = self.outliving.get(StorageWeakRef(storage).cdata)
        if storage.data_ptr() in call.weights or (outlived is not None and not outlived.expired()):
            return False
        return call.offloads is None or call.offloads(tensor)

    def _block(self, call: LayerCall, tensor: Tensor) -> OffloadedBlock | None:
        """The block of this tensor's storage. None where there is no place for it."""
        storage = tensor.untyped_storage()
        identity = StorageWeakRef(storage).cdata
        block = self.blocks.get(identity)
        if (
            block is None or block.version != tensor._version or block.stay.nbytes != storage.nbytes()
        ):  # or it was changed since
            stay = self.store.take(storage.nbytes())
            if stay is None:
                self.refusals[self.store.why_not()] += storage.nbytes()
                return None
            block = self.blocks[identity] = OffloadedBlock(call.layer, tensor, stay, self.dead)
        if all(ref() is not block for ref in call.blocks):
            call.blocks.append(weakref.ref(block))
        return block

    def _send(self, call: LayerCall) -> None:
        """Copy out the blocks that this layer was the first to save."""
        call.module = call.weights = call.offloads = None
        self.flying.append(call.blocks)  # even none: the layer before is freed when the next one comes
        blocks = [block for block in _alive(call.blocks) if block.mark is None]
        if not blocks:
            return
        mark = self.copier.out([(block.device, block.stay.room) for block in blocks])
        for block in blocks:
            block.mark = mark
            self.sent.append(block.identity)
            self.out[call.layer] += block.stay.nbytes
        self.store.filled([block.stay for block in blocks], mark)

    def _free(self, all_but: int) -> None:
        while len(self.flying) > all_but:
            for block in _alive(self.flying.popleft()):
                self._drop(block)

    def _drop(self, block: OffloadedBlock) -> None:
        """Free a block on the device, if it is also on the host."""
        if block.mark is None or block.device is None:
            return
        block.check()
        self.copier.wait(block.mark, block.device)
        block.device = None
        block.watched.clear()

    def _sweep(self) -> None:
        _give_back(self.dead, self.store, self.copier)

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if packed.call.number != self.reached:
            self._reach(packed.call)
        return self._kept(packed) if isinstance(packed, ResidentTensor) else self._restored(packed)

    def _kept(self, kept: ResidentTensor) -> Tensor:
        if kept.tensor._version != kept.version:
            what = f"{list(kept.tensor.shape)} is at version {kept.tensor._version}; expected version {kept.version}"
            raise ModifiedInPlace(what=what, layer=kept.call.layer)
        return kept.tensor

    def _restored(self, handle: SavedHandle) -> Tensor:
        block = handle.block
        block.check()
        if block.modified is not None:
            raise ModifiedInPlace(what=block.modified, layer=handle.call.layer)
        if block.device is None:
            self._fetch([block])
        if block.mark is not None:  # None where the layer's forward failed before it was copied
            self.copier.wait(block.mark, block.device)
        tensor = handle.of(block.device)
        block.pending.discard(handle.number)
        if not block.pending:  # autograd holds it from here on, and frees it after its last use
            self._drop(block)
        return tensor

    def _reach(self, call: LayerCall) -> None:
        """The backward pass has come to this call: fetch its blocks and those needed next, if that was not done."""
        self.reached = call.number
        self._sweep()
        self._fetch([block for block in _alive(call.blocks) if block.device is None])
        earlier = sorted((number for number in self.calls if number < call.number), reverse=True)
        for distance, number in enumerate(earlier[: max(1, 2 * self.ahead)], 1):
            if (other := self.calls.get(number)) is not None:
                absent = [block for block in _alive(other.blocks) if block.device is None]
                for block in absent:
                    self.store.prepare(block.stay)
                if distance <= self.ahead:
                    self._prefetch([block for block in absent if self.store.ready(block.stay)])

    def _prefetch(self, blocks: Sequence[OffloadedBlock]) -> None:
        try:
            self._fetch(blocks)
        except torch.OutOfMemoryError:  # it may be there when it is needed
            self.refusals["no memory on the device to fetch ahead"] += sum(block.stay.nbytes for block in blocks)

    def _fetch(self, blocks: Sequence[OffloadedBlock]) -> None:
        if not blocks:
            return
        devices, mark = self.copier.back([self.store.load(block.stay) for block in blocks])
        for block, device in zip(blocks, devices):
            block.device, block.mark, block.stay.mark = device, mark, mark
            block.pending = set(range(block.handles))
            self.back += block.stay.nbytes


def _give_back(
    dead: deque[tuple[StoredBlock, Tensor | None, CopyMark | None]], store: BlockStore, copier: CopyEngine
) -> None:
    """Free the memory of dead blocks."""
    while dead:
        stay, device, mark = dead.popleft()
        if device is not None and mark is not None:
            copier.wait(mark, device)
        store.give(stay)


def _alive(refs: Sequence[weakref.ref[OffloadedBlock]]) -> list[OffloadedBlock]:
    return [block for ref in refs if (block := ref()) is not None]


def _addresses(module: nn.Module) -> set[int]:
    """Addresses of the storages of a module's parameters and buffers."""
    found = set()
    with plain_tensors():
        for tensor in (*module.parameters(), *module.buffers()):
            # a wrapper without memory raises: it is saved as a wrapper, too
            with suppress(RuntimeError, NotImplementedError):
                found.add(tensor.untyped_storage().data_ptr())
    return found
