"""Products of adapters in fp32 with rows in bf16, on tensor cores.

PEFT keeps adapters in fp32 where there is no autocast. A product in fp32 runs outside the tensor cores, and reads a
copy of all rows in fp32. But rows are exact in bf16, and an fp32 matrix is exactly the sum of three in bf16, of 8 bits
of its 24 each. (Splitting into narrow pieces: Henry, Tang and Heinecke, 2019, arXiv:1904.06376.)
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tunecompile import templates
from tunecompile._torch import card
from tunecompile.ir.op import Cost, has_triton, op, refuse_spills
from tunecompile.ir.pretend_gpu import on_gpu

_UPPER = -(1 << 16)  #: the bits of an fp32 number that are those of a bf16 one


def _splits(rows: Tensor, adapter: Tensor, dtype: torch.dtype) -> bool:
    """Whether the template takes rows and a matrix of an adapter."""
    if (rows.dtype, adapter.dtype, dtype) != (torch.bfloat16, torch.float32, torch.float32):
        return False
    if not on_gpu(rows) or not has_triton() or rows.stride(1) != 1 or refuse_spills(rows):
        return False
    return not card.older_than(rows.device, (8, 0))


def project(rows: Tensor, adapter: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows @ adapter: x A^T, or dY B.

    Args:
        rows: [T, K], any floating dtype.
        adapter: [K, R], in `dtype`.
        dtype: of the adapters' arithmetic, and of the result.
    """
    if not _splits(rows, adapter, dtype):
        return rows.to(dtype) @ adapter
    return templates.adapters.project(rows, adapter).sum(0)


def outer(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return left^T @ right, the sum of outer products of rows: dA or dB.

    Args:
        left: [T, M], any floating dtype.
        right: [T, N], any floating dtype. One of them is in `dtype`, [T, R].
        dtype: of the adapters' arithmetic, and of the result.
    """
    if _splits(left, right, dtype) and right.stride(1) == 1:
        return _reduce(left, right, turned=False)
    if _splits(right, left, dtype) and left.stride(1) == 1:
        return _reduce(right, left, turned=True)
    return left.to(dtype).t() @ right.to(dtype)


def _reduce(rows: Tensor, narrow: Tensor, turned: bool) -> Tensor:
    return templates.adapters.reduce(rows, narrow, turned=turned).sum(0)


def pieces(m: Tensor) -> tuple[Tensor, Tensor]:
    """Return two matrices in bf16 whose sum is an fp32 matrix but for a 65,536th.

    The bits are cut off, since generated code drops a cast to bf16 and back.
    """
    upper = (m.view(torch.int32) & _UPPER).view(torch.float32)
    return upper.to(torch.bfloat16), (m - upper).to(torch.bfloat16)


def exact_factors(narrow: Tensor, adapter: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return two matrices whose product is narrow @ adapter, for a result that is rounded to the dtype of rows.

    Two fp32 operands are split where the result is in bf16: what is lost is a hundredth of its rounding.

    Args:
        narrow: [T, R].
        adapter: [R, K], in the dtype of `narrow`.
        dtype: of the result.
    """
    if (narrow.dtype, dtype) != (torch.float32, torch.bfloat16) or not on_gpu(narrow):
        return narrow, adapter
    (upper, lower), (high, low) = pieces(narrow), pieces(adapter)
    return torch.cat([upper, upper, lower], 1), torch.cat([high, low, high])


def _sum_flops(narrow: Tensor, adapter: Tensor, rows: Sequence[Tensor], weights: Sequence[Tensor], _) -> int:
    return sum(2 * left.numel() * right.shape[1] for left, right in zip((narrow, *rows), (adapter, *weights)))


def _sum_shapes(narrow: Tensor, adapter: Tensor, rows: Sequence[Tensor], *_) -> Tensor:
    return rows[0].new_empty(narrow.shape[0], adapter.shape[1])


@op(cost=Cost.MATMUL, opaque=True, flops=_sum_flops, shapes=_sum_shapes)
def adapted_sum(
    narrow: Tensor, adapter: Tensor, rows: Sequence[Tensor], weights: Sequence[Tensor], columns: Sequence[int]
) -> Tensor:
    """Return narrow @ adapter, to which each rows[i] @ weights[i] is added, from columns[i] on.

    Nothing but the sum is written: it is opaque, since in a graph each addition would begin with a copy of the sum. It
    has no backward: providers of other ops call it.

    Args:
        narrow: [T, R], any floating dtype; R may be 0.
        adapter: [R, N], in the dtype of `narrow`.
        rows: [T, K_i] each, any floating dtype.
        weights: [K_i, N_i] each, in the dtype of rows.
        columns: the first column of each product in the sum.

    Returns:
        [T, N] in the dtype of rows; each product is added in its accumulator, and rounded.
    """
    total = (narrow @ adapter).to(rows[0].dtype)
    for left, right, first in zip(rows, weights, columns):
        total[:, first : first + right.shape[1]].addmm_(left, right)
    return total
