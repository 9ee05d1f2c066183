"""Matrices that hold adapters beside or below the weights that they adapt (K extension).

[x | x A^T] @ [W | scale B]^T is the adapted product of all siblings, and [dY | dY B] @ [W; A] is its gradient.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tunecompile import templates


def padded(width: int) -> int:
    """Return `width` rounded up to 64: whole cache lines of half precision, as matrix products read them.

    (Inductor pads rows of other widths itself, and would copy them for a template.)
    """
    return -(-width // 64) * 64


def on_diagonal(b: Sequence[Tensor], scales: Sequence[float], dtype: torch.dtype) -> Tensor:
    """Return [N, R] in `dtype`: scale_i B_i of each sibling in rows and columns of its own."""
    return torch.block_diag(*[m.to(dtype) * s for m, s in zip(b, scales)])


def below(a: Sequence[Tensor], rows: int, dtype: torch.dtype) -> Tensor:
    """Return [A; 0] in `dtype`. Below `rows` rows of weights it gives a matrix as high as [dY | dY B | 0] is wide."""
    adapters = torch.cat([m.to(dtype) for m in a])
    room = padded(rows + adapters.shape[0]) - rows - adapters.shape[0]
    return torch.cat([adapters, adapters.new_zeros(room, adapters.shape[1])])


def extended_weight(
    weights: Sequence[Tensor], b: Sequence[Tensor], scales: Sequence[float], dtype: torch.dtype
) -> Tensor:
    """Return [W | scale B | 0]: the siblings' weights below each other, each B in columns of its own.

    Args:
        weights: W_i, [N_i, K] each.
        b: B_i, [N_i, r_i] each.
        scales: factors, one an adapter.
        dtype: of the adapters' arithmetic.
    """
    adapters = on_diagonal(b, scales, dtype).to(weights[0].dtype)
    rows, width = adapters.shape[0], weights[0].shape[1] + adapters.shape[1]
    return torch.cat([torch.cat(weights), adapters, adapters.new_zeros(rows, padded(width) - width)], 1)


def written_weight(
    weights: Sequence[Tensor],
    b: Sequence[Tensor],
    scales: Sequence[float],
    dtype: torch.dtype,
    below: Tensor | None = None,
) -> Tensor:
    """Return `extended_weight`, written by kernels into one buffer, with `below` [*, K] under W if given.

    Needs a GPU and Triton. Makes no intermediate copy.
    """
    adapters, columns = on_diagonal(b, scales, dtype), weights[0].shape[1]
    rows = adapters.shape[0]
    out = torch.empty(
        (rows + (0 if below is None else below.shape[0]), padded(columns + adapters.shape[1])),
        dtype=dtype,
        device=adapters.device,
    )
    for i, weight in enumerate(weights):
        templates.lora.append_rows(weight, out, sum(w.shape[0] for w in weights[:i]))
    templates.lora.append_columns(adapters, out, columns)
    if below is not None:
        templates.lora.append_rows(below, out, rows)
    return out
