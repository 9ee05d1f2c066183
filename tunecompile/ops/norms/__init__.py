"""Norms over the last dimension, alone and of a residual sum."""

from tunecompile.ops.norms.layer_norm import add_layer_norm, layer_norm
from tunecompile.ops.norms.rms_norm import add_rms_norm, compute_dtype, rms_norm

__all__ = ["add_layer_norm", "add_rms_norm", "compute_dtype", "layer_norm", "rms_norm"]
