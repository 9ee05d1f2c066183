"""Blocks: storages that layers have saved, on the device, copied to the host, and fetched back."""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from tunecompile._torch.fake_tensors import StorageWeakRef
from tunecompile.runtime.memory.host.disk_store import BlockStore, Disk, StoredBlock
from tunecompile.runtime.memory.host.pinned_pool import CopyEngine, CopyMark, PinnedPool, available


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


class BlockCopies:
    """The blocks of one device, and their copies.

    Args:
        copier: the copy engine.
        host_bytes: bytes of pinned host memory that may be taken; None for half of what is available.
        folder: for files, where host memory is full; None for no files.

    Raises:
        OSError: `folder` cannot be written to.
    """

    def __init__(self, copier: CopyEngine, host_bytes: int | None, folder: Path | None):
        self.copier = copier
        self.pool = PinnedPool(available() // 2 if host_bytes is None else host_bytes, copier.allocate)
        self.store = BlockStore(self.pool, copier, Disk(folder) if folder is not None and copier.moves else None)
        #: by identity of the storage
        self.known: weakref.WeakValueDictionary[int, OffloadedBlock] = weakref.WeakValueDictionary()
        #: of blocks; freed here, since they may die at any moment
        self.dead: deque[tuple[StoredBlock, Tensor | None, CopyMark | None]] = deque()
        #: of each call, copied out and not yet freed on the device
        self.flying: deque[list[weakref.ref[OffloadedBlock]]] = deque()
        self.forget_step()
        # copies may still be under way
        weakref.finalize(self, give_back, self.dead, self.store, self.copier).atexit = False

    def forget_step(self) -> None:
        """Begin all counts anew."""
        self.out: Counter[int] = Counter()  #: bytes by layer
        self.back = 0
        self.sent: list[StorageWeakRef] = []
        self.pool.peak, self.store.blocked_ms, self.store.written = self.pool.used, 0.0, 0
        self.copier.reset()

    def of(self, call: LayerCall, tensor: Tensor) -> OffloadedBlock | None:
        """The block of this tensor's storage. None where there is no place for it."""
        storage = tensor.untyped_storage()
        identity = StorageWeakRef(storage).cdata
        block = self.known.get(identity)
        if (
            block is None or block.version != tensor._version or block.stay.nbytes != storage.nbytes()
        ):  # or it was changed since
            stay = self.store.take(storage.nbytes())
            if stay is None:
                return None
            block = self.known[identity] = OffloadedBlock(call.layer, tensor, stay, self.dead)
        if all(ref() is not block for ref in call.blocks):
            call.blocks.append(weakref.ref(block))
        return block

    def send(self, call: LayerCall) -> None:
        """Copy out the blocks that this layer was the first to save."""
        call.module = call.weights = call.offloads = None
        self.flying.append(call.blocks)  # even none: the layer before is freed when the next one comes
        blocks = [block for block in alive(call.blocks) if block.mark is None]
        if not blocks:
            return
        mark = self.copier.out([(block.device, block.stay.room) for block in blocks])
        for block in blocks:
            block.mark = mark
            self.sent.append(block.identity)
            self.out[call.layer] += block.stay.nbytes
        self.store.filled([block.stay for block in blocks], mark)

    def free(self, all_but: int) -> None:
        """Free the blocks of all calls on the device but those of the last ones."""
        while len(self.flying) > all_but:
            for block in alive(self.flying.popleft()):
                self.drop(block)

    def drop(self, block: OffloadedBlock) -> None:
        """Free a block on the device, if it is also on the host."""
        if block.mark is None or block.device is None:
            return
        block.check()
        self.copier.wait(block.mark, block.device)
        block.device = None
        block.watched.clear()

    def sweep(self) -> None:
        """Free the memory of dead blocks."""
        give_back(self.dead, self.store, self.copier)

    def fetch(self, blocks: Sequence[OffloadedBlock]) -> None:
        """Copy blocks back."""
        if not blocks:
            return
        devices, mark = self.copier.back([self.store.load(block.stay) for block in blocks])
        for block, device in zip(blocks, devices):
            block.device, block.mark, block.stay.mark = device, mark, mark
            block.pending = set(range(block.handles))
            self.back += block.stay.nbytes


def give_back(
    dead: deque[tuple[StoredBlock, Tensor | None, CopyMark | None]], store: BlockStore, copier: CopyEngine
) -> None:
    """Free the memory of dead blocks."""
    while dead:
        stay, device, mark = dead.popleft()
        if device is not None and mark is not None:
            copier.wait(mark, device)
        store.give(stay)


def alive(refs: Sequence[weakref.ref[OffloadedBlock]]) -> list[OffloadedBlock]:
    """Those that are still needed."""
    return [block for ref in refs if (block := ref()) is not None]
