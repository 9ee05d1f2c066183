"""How a layer is told of padding, so that rows without any can be told alike: its graph for them is there."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from tunecompile.runtime.unpad.documents import BOTH_WAYS
from tunecompile.runtime.unpad.flat_batch import FlatBatch
from tunecompile.runtime.unpad.masks.given import MASK, mask_in, place_of_mask


@dataclass(frozen=True)
class Told:
    """What a layer was given of a padded batch's mask."""

    window: int  #: of its attention: a constant of its graph
    pairs: str | int  #: the argument that was a mask of all pairs of tokens, by name or position; "" for none
    rows: tuple[tuple[str, torch.dtype], ...]  #: arguments [B, T] that say which tokens are real, as recurrences read

    @staticmethod
    def of(layer: nn.Module, flat: FlatBatch, args: tuple, kwargs: dict) -> Told:
        """Of a layer's call on the batch `flat`, as its model made it."""
        pairs = flat.fills or (place_of_mask(layer, args, kwargs) if mask_in(args, kwargs) is not None else "")
        rows = {name: value for name, value in kwargs.items() if name.endswith(MASK) and isinstance(value, Tensor)}
        told = tuple((name, value.dtype) for name, value in rows.items() if value.shape == flat.shape)
        return Told(flat.window, pairs or "", told)

    def tell(self, whole: FlatBatch) -> FlatBatch:
        """Rows without padding, for the same layer, which is given no mask of them.

        A row that is no longer than a window is seen as without it.
        """
        plain = BOTH_WAYS if self.window < 0 else 0
        window = self.window if abs(self.window) >= whole.shape[1] else plain
        return replace(whole, window=window, fills=self.pairs, real_rows=self.rows)
