"""The documents of a row, for operations that read earlier tokens."""

import torch
from torch import Tensor


def document_of(offsets: Tensor, tokens: int) -> Tensor:
    """Return the number of each token's document: int64 [tokens], in increasing order.

    Args:
        offsets: int [S + 1]: where documents begin, and where the last one ends; tokens after it are one more.
        tokens: how many there are.
    """
    places = torch.arange(tokens, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets, places, right=True)
