"""A tower's patches: another image stands behind them, so that their sizes recur."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tunecompile.notes import Note, note
from tunecompile.runtime.unpad.documents import BOTH_WAYS
from tunecompile.runtime.unpad.flat_batch import FlatBatch
from tunecompile.runtime.unpad.image_bounds import ImageBounds
from tunecompile.runtime.unpad.masks.given import hidden_in
from tunecompile.runtime.unpad.owner_call import OwnerCall
from tunecompile.runtime.unpad.sizes import SizesSeen, rounded_up
from tunecompile.runtime.watch.traced_graph import TracedGraph

Allowed = Callable[[Callable[[], Note | None]], bool]  #: whether there is no such reason, nor one that the owner has


class PatchRounding:
    """Decides for the calls of one tower whether their patches are filled up."""

    def __init__(self, blocks: Callable[[], tuple[nn.Module, ...]], sizes: SizesSeen, allowed: Allowed):
        self.blocks, self.sizes, self.allowed = blocks, sizes, allowed
        self.graphs: weakref.WeakKeyDictionary[nn.Module, TracedGraph] = (
            weakref.WeakKeyDictionary()
        )  #: of the last calls

    def batch_of(self, call: OwnerCall, images: ImageBounds, args: tuple, kwargs: dict) -> FlatBatch | None:
        """A tower's row of patches, with another image behind the last that fills it up; None where it stays."""
        hidden, read = hidden_in(args, kwargs), images.read(args, kwargs)
        if hidden is None or read is None or hidden.shape[:-2] not in ((), (1,)):
            return None
        bounds, offsets, longest = read
        if any(isinstance(x, Tensor) and x.dim() == 1 and x is not bounds for x in (*args, *kwargs.values())):
            return None  # other bounds, perhaps
        patches, lone = hidden.shape[-2], hidden.dim() == 2
        if not call.sized:
            call.sized = True
            pays = self.sizes.recording_pays((patches,), patches, hidden.device)
            if pays and self.allowed(self._why_not_by_images):
                call.rounded = row_of_patches(patches, rounded_up(patches, hidden.device), lone, hidden.device)
            else:
                self.sizes.came((patches,), call.trains)
        flat = call.rounded
        if flat is None or (flat.real, flat.lone) != (patches, lone):
            return None
        return flat.by_images(bounds, offsets, len(longest) - 1)

    def _why_not_by_images(self) -> Note | None:
        graphs = [self.graphs.get(block) for block in self.blocks()]
        return next((why for graph in graphs if (why := why_not_filled_up(graph)) is not None), None)


def row_of_patches(patches: int, total: int, lone: bool, device: torch.device) -> FlatBatch:
    """A tower's row, filled up to `total`. `FlatBatch.by_images` says where its images begin."""
    index, nothing = F.pad(torch.arange(patches, device=device), (0, total - patches)), torch.empty(0, 0, device=device)
    shape = (1, patches)
    return FlatBatch(index, nothing, nothing, BOTH_WAYS, patches, shape, whole=True, lone=lone, rounds=True)


def why_not_filled_up(graph: TracedGraph | None) -> Note | None:
    """Why a tower's row may not be filled up where a block runs this graph."""
    return note("runs-eagerly") if graph is None or not graph.of_images else graph.mixes
