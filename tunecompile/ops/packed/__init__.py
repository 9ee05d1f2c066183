"""Weights as checkpoints hold them in 4 or 8 bits, other than those of bitsandbytes (`tunecompile.ops.nf4`)."""

from tunecompile.ops.packed.fp8_blocks import dequantize_fp8_blocks
from tunecompile.ops.packed.mxfp4 import dequantize_mxfp4

__all__ = ["dequantize_fp8_blocks", "dequantize_mxfp4"]
