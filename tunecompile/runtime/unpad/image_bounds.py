"""Where images begin in the row of patches of a tower: read on the host once a step, for layers that are told of it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from tunecompile._torch.dynamo import mark_dynamic
from tunecompile.compiler.token_wise.graph import IMAGE_OFFSETS
from tunecompile.integrations.kernel_functions import Fork, forks_in, takes_bounds
from tunecompile.ir.op import HALF
from tunecompile.runtime.unpad.flat_batch import BOUNDS_BESIDE, IMAGE_BOUNDS, LONGEST_IMAGE, ROUNDED
from tunecompile.runtime.unpad.masks.given import hidden_in
from tunecompile.runtime.unpad.sizes import rounded_to

_OURS = (IMAGE_BOUNDS, IMAGE_OFFSETS, LONGEST_IMAGE, BOUNDS_BESIDE)


@dataclass(frozen=True)
class ImageBounds:
    """How a layer is given bounds."""

    forks: list[tuple[nn.Module, Fork]]
    name: str
    place: int | None  #: among the arguments by position; None where it is given by name alone

    @staticmethod
    def of(layer: nn.Module) -> ImageBounds | None:
        """None where no module inside takes any, or where they take several."""
        forks = forks_in(layer)
        names = {fork.bounds for _, fork in forks}
        if len(names) != 1:
            return None
        (name,) = names
        parameters = list(inspect.signature(layer.forward).parameters)
        return ImageBounds(forks, name, parameters.index(name) if name in parameters else None)

    def tell(self, args: tuple, kwargs: dict) -> dict:
        """The layer's arguments by name, with what our layers are told of images, where attention can be by bounds."""
        found = None if IMAGE_OFFSETS in kwargs else self.read(args, kwargs)
        return (
            kwargs
            if found is None
            else {**kwargs, IMAGE_BOUNDS: found[0], IMAGE_OFFSETS: found[1], LONGEST_IMAGE: found[2]}
        )

    def read(self, args: tuple, kwargs: dict) -> tuple[Tensor, Tensor, Tensor] | None:
        """(bounds that the layer is given, what is read of them), see `read_bounds`; None where it needs them image by
        image.
        """
        bounds = kwargs.get(self.name)
        if bounds is None and self.place is not None and self.place < len(args):
            bounds = args[self.place]
        hidden = hidden_in(args, kwargs)
        if not isinstance(bounds, Tensor) or hidden is None or hidden.dim() < 2 or not _has_kernel(hidden):
            return None
        if not all(takes_bounds(module, fork) for module, fork in self.forks):
            return None
        read = read_bounds(bounds, hidden.shape[-2])
        return None if read is None else (bounds, *read)


def without_bounds(kwargs: dict) -> dict:
    """A layer's arguments by name, as its own code takes them."""
    return {name: value for name, value in kwargs.items() if name not in _OURS}


def read_bounds(bounds: Tensor, patches: int) -> tuple[Tensor, Tensor] | None:
    """What our layers are told beside the bounds. It waits for the device, once for each tensor.

    Returns:
        (int32 [images + 2], as the bounds and with an empty image behind them; [L, 0], L at least the patches of the
        longest image). None where these are no bounds of images in a row of `patches`: they rise from 0 to that.
    """
    if bounds.dim() != 1 or bounds.dtype not in (torch.int32, torch.int64) or len(bounds) < 2:
        return None
    key, known = (bounds._version, patches), _read.get(bounds)
    if known is None or known[0] != key:
        known = _read[bounds] = key, _reading(bounds, patches)
    return known[1]


_read: WeakIdKeyDictionary = WeakIdKeyDictionary()  #: what was read of a tensor: all layers of a tower are given one


def _reading(bounds: Tensor, patches: int) -> tuple[Tensor, Tensor] | None:
    lengths = bounds.diff()
    first, last, shortest, longest = torch.stack([bounds[0], bounds[-1], lengths.min(), lengths.max()]).tolist()
    if (first, last) != (0, patches) or shortest < 0:
        return None
    # One image alone would have a graph of its own, as would sizes that were equal when Dynamo traced: L is odd.
    offsets = torch.cat([bounds, bounds[-1:]]).to(torch.int32)
    longest = torch.empty(rounded_to(longest, ROUNDED) + 1, 0, device=bounds.device)
    for each in (offsets, longest):
        mark_dynamic(each, 0)
    return offsets, longest


def _has_kernel(hidden: Tensor) -> bool:
    """Whether attention by bounds has a kernel there: without one, a mask of all pairs of patches would be made."""
    return not hidden.is_cuda or hidden.dtype in HALF or torch.is_autocast_enabled("cuda")
