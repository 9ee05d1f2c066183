"""The norms of adapted weights, for weight-decomposed adapters (DoRA: Liu et al., 2024, arXiv:2402.09353)."""

import torch
from torch import Tensor

from tunecompile.ir.op import Cost, op

__all__ = ["adapted_norm"]


def _flops(weight: Tensor, a: Tensor, *_) -> int:
    return 2 * weight.numel() * a.shape[0]


@op(cost=Cost.MATMUL, flops=_flops)
def adapted_norm(weight: Tensor, a: Tensor, b: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return the norm of each row of W + scale B A, by which DoRA divides its magnitudes (arXiv:2402.09353).

    It has no backward: section 4.3 of the paper treats the norm as a constant. Its cost is that of a matrix product, so
    its N results are saved and the adapted weight is not computed a second time.

    Args:
        weight: W, [N, K], any floating dtype.
        a: A, [r, K], any floating dtype.
        b: B, [N, r], any floating dtype.
        scale: the adapter's factor, as in `tunecompile.ops.lora.lora_linear`.
        dtype: of the result.

    Returns:
        [N] in `dtype`, rounded once from fp32 but for B A, which is computed in the adapters' dtype.
    """
    wide, adapters = torch.promote_types(dtype, torch.float32), torch.promote_types(a.dtype, b.dtype)
    delta = b.to(adapters) @ a.to(adapters)
    return torch.linalg.vector_norm(weight.to(wide) + scale * delta.to(wide), dim=1).to(dtype)
