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
from collections import Counter
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
from tunecompile.runtime.memory.host.blocks import (
    BlockCopies,
    LayerCall,
    OffloadedBlock,
    ResidentTensor,
    SavedHandle,
    alive,
)
from tunecompile.runtime.memory.host.pinned_pool import CopyEngine, CudaCopyEngine, ResidentCopyEngine

SMALLEST = 1 << 20  #: bytes; smaller storages stay on the device


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
        copier = copier or (CudaCopyEngine(device) if device.type == "cuda" else ResidentCopyEngine())
        self.blocks = BlockCopies(copier, host_bytes, folder)
        self.calls: weakref.WeakValueDictionary[int, LayerCall] = weakref.WeakValueDictionary()
        self.outliving: dict[int, StorageWeakRef] = {}
        self.number = 0
        self.spent = HostTime()  #: in forwards
        self.reached: int | None = None  #: the call that the backward pass is in
        self.refusals: Counter[str] = Counter()

    def expect(self, nbytes: int) -> None:
        """Begin to allocate host memory for the bytes that a step will offload."""
        if self.blocks.copier.moves:
            self.blocks.pool.expect(nbytes)

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
            self.blocks.sweep()
            self.blocks.free(all_but=min(1, self.ahead))
            self.number += 1
            call = self.calls[self.number] = LayerCall(self.number, index, module, offloads)
        with torch.autograd.graph.saved_tensors_hooks(partial(self._pack, call), self._unpack):
            yield
        with self.spent.counted():
            self.blocks.send(call)

    def begin_step(self) -> None:
        """At the model's entry: drop copies on the device that no backward used, and begin all counts anew.

        A forward whose backward may still come is left as it is: autograd drops it, with its loss.
        """
        self.settle()
        for block in {block for call in list(self.calls.values()) for block in alive(call.blocks)}:
            self.blocks.drop(block)
        self.reached = None
        known = {**self.outliving, **{ref.cdata: ref for ref in self.blocks.sent}}
        self.outliving = {identity: ref for identity, ref in known.items() if not ref.expired()}
        self.refusals.clear()
        self.blocks.forget_step()

    def settle(self) -> None:
        """Free all blocks on the device that were copied out, before head and loss, whose memory may be the peak."""
        self.blocks.free(all_but=0)
        self.blocks.sweep()

    def report(self) -> dict[str, Any]:
        """Counts of the step since `begin_step`, in bytes and milliseconds. Waits for its copies.

        `exposed_ms` is how long the device waited for copies, `blocked_ms` the host for the disk. `refusals` are bytes
        by reason, or 0 where a layer could not be hooked.
        """
        self.blocks.sweep()
        blocks = self.blocks
        return {
            "bytes_out": blocks.out.total(),
            "bytes_back": blocks.back,
            "bytes_out_by_layer": dict(blocks.out),
            "host_bytes": blocks.pool.used,
            "peak_host_bytes": blocks.pool.peak,
            "pinned_bytes": blocks.pool.reserved,
            "disk_bytes": blocks.store.written,
            "blocked_ms": blocks.store.blocked_ms,
            "refusals": dict(self.refusals),
            **blocks.copier.times(),
        }

    def _pack(self, call: LayerCall, tensor: Tensor) -> Any:
        if type(tensor) is not Tensor or tensor.layout is not torch.strided:
            return tensor
        with self.spent.counted():
            if not self._goes(call, tensor):
                return ResidentTensor(call, tensor)
            if (block := self.blocks.of(call, tensor)) is None:
                self.refusals[self.blocks.store.why_not()] += tensor.untyped_storage().nbytes()
                return ResidentTensor(call, tensor)
            return SavedHandle(call, block, tensor)

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
            self.blocks.fetch([block])
        if block.mark is not None:  # None where the layer's forward failed before it was copied
            self.blocks.copier.wait(block.mark, block.device)
        tensor = handle.of(block.device)
        block.pending.discard(handle.number)
        if not block.pending:  # autograd holds it from here on, and frees it after its last use
            self.blocks.drop(block)
        return tensor

    def _reach(self, call: LayerCall) -> None:
        """The backward pass has come to this call: fetch its blocks and those needed next, if that was not done."""
        self.reached = call.number
        self.blocks.sweep()
        self.blocks.fetch([block for block in alive(call.blocks) if block.device is None])
        earlier = sorted((number for number in self.calls if number < call.number), reverse=True)
        for distance, number in enumerate(earlier[: max(1, 2 * self.ahead)], 1):
            if (other := self.calls.get(number)) is not None:
                absent = [block for block in alive(other.blocks) if block.device is None]
                for block in absent:
                    self.blocks.store.prepare(block.stay)
                if distance <= self.ahead:
                    self._prefetch([block for block in absent if self.blocks.store.ready(block.stay)])

    def _prefetch(self, blocks: Sequence[OffloadedBlock]) -> None:
        try:
            self.blocks.fetch(blocks)
        except torch.OutOfMemoryError:  # it may be there when it is needed
            self.refusals["no memory on the device to fetch ahead"] += sum(block.stay.nbytes for block in blocks)


def _addresses(module: nn.Module) -> set[int]:
    """Addresses of the storages of a module's parameters and buffers."""
    found = set()
    with plain_tensors():
        for tensor in (*module.parameters(), *module.buffers()):
            # a wrapper without memory raises: it is saved as a wrapper, too
            with suppress(RuntimeError, NotImplementedError):
                found.add(tensor.untyped_storage().data_ptr())
    return found
