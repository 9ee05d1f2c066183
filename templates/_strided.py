"""Rows of a tensor of up to four dimensions whose leading ones may be strided, as kernels of norms read them."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["start_of", "strided_rows"]


@triton.jit
def start_of(row, n1, n2, s0, s1, s2):
    """Offset of row number ``row`` of a tensor [n0, n1, n2, :] with strides s0, s1, s2."""
    row = row.to(tl.int64)
    return row // (n1 * n2) * s0 + row // n2 % n1 * s1 + row % n2 * s2


def strided_rows(t):
    """``t`` with a unit column stride, its leading sizes (n1, n2), and three leading strides."""
    if t.dim() > 4:
        t = t.reshape(-1, t.shape[-1])
    if t.stride(-1) != 1:
        t = t.contiguous()
    sizes, strides = (1, 1, 1, *t.shape[:-1]), (0, 0, 0, *t.stride()[:-1])
    return t, sizes[-2:], strides[-3:]
