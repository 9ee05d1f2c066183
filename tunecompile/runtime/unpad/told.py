"""How a layer is told of padding, so that rows without any can be told alike: its graph for them is there."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tunecompile.runtime.unpad.flat_batch import FlatBatch
from tunecompile.runtime.unpad.masks.given import MASK, mask_in


@dataclass(frozen=True)
class Told:
    """What a layer was given of a padded batch's mask."""

    window: int  #: of its attention: a constant of its graph
    pairs: bool  #: whether a mask of all pairs of tokens
    rows: tuple[tuple[str, torch.dtype], ...]  #: arguments [B, T] that say which tokens are real, as recurrences read

    @staticmethod
    def of(flat: FlatBatch, args: tuple, kwargs: dict) -> Told:
        """Of a layer's call on the batch `flat`, as its model made it."""
        rows = {name: value for name, value in kwargs.items() if name.endswith(MASK) and isinstance(value, Tensor)}
        told = tuple((name, value.dtype) for name, value in rows.items() if value.shape == flat.shape)
        return Told(flat.window, bool(flat.fills) or mask_in(args, kwargs) is not None, told)

    def tell(self, whole: FlatBatch) -> FlatBatch:
        """Rows without padding, for the same layer, which is given no mask of them.

        A row that is no longer than a window is seen as without it.
        """
        window = self.window if self.window >= whole.shape[1] else 0
        return replace(whole, window=window, fills=MASK if self.pairs else "", real_rows=self.rows)
