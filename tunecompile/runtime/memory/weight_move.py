"""Frozen dense weights that move into one matrix, at the first training step.

The products of adapted linears read siblings' weights below each other, and the backward reads A below them: [W; A]
(tunecompile/ops/lora.py). Parameters that are views of one such matrix need not be copied into one at every call. They
stay contiguous, so no other code sees a difference. (With B beside them, forward products would not copy them either;
but transformers cannot save strided parameters, and `view(-1)` cannot flatten them.) Writes to a parameter reach the
matrix, and a parameter that got other memory moves in again when it is next used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def stand(weights: Sequence[Tensor], shape: tuple[int, int]) -> bool:
    """Whether the weights are rows of one matrix of this shape, below each other from its first row on."""
    first = weights[0]
    storage, pitch = first.untyped_storage(), shape[1] * first.element_size()
    if storage.nbytes() != shape[0] * pitch:
        return False
    address = storage.data_ptr()
    for weight in weights:
        if weight.data_ptr() != address or not weight.is_contiguous():
            return False
        address += weight.shape[0] * pitch
    return True


def matrix_of(shape: tuple[int, int], first: Tensor) -> Tensor:
    """The matrix whose first rows are `first`.

    It is no view: AOTAutograd would save another tensor for the backward.
    """
    return torch.empty(0, dtype=first.dtype, device=first.device).set_(first.untyped_storage(), 0, shape)


def move_in(weights: Sequence[Tensor], shape: tuple[int, int]) -> None:
    """Move weights into a new matrix, with zeros below them, and free the memory they had."""
    values, row = weights[0].data.new_zeros(shape), 0
    for weight in weights:
        place = values[row : row + weight.shape[0]]
        place.copy_(weight.data)
        weight.data = place
        row += weight.shape[0]
    if values.is_cuda:
        torch.cuda.empty_cache()  # no later allocation has the sizes of the old blocks


def move_out(weight: Tensor) -> None:
    """Give a weight memory of its own."""
    weight.data = weight.data.clone()
