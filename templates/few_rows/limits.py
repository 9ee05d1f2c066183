"""Sizes that the kernels take: an op reads them without importing triton."""

__all__ = ["LEAST_STEP", "MAX_RANKS", "MAX_ROWS", "SIBLINGS", "STEP", "TILE"]

MAX_ROWS = 64  #: of x: beyond, a product with dequantised weights is faster
MAX_RANKS = 64  #: of all adapters together
SIBLINGS = 3  #: weights that share x, at most
TILE = 64  #: rows of a weight that a program multiplies; 128 need too many registers to hide their loads
STEP = 128  #: columns that it takes at once
LEAST_STEP = 64  #: where 128 do not divide a weight's columns
