"""Norms over the last dimension, alone and of a residual sum, modulated or not."""

from tunecompile.ops.norms.layer_norm import add_layer_norm, layer_norm
from tunecompile.ops.norms.modulated_norm import add_modulated_norm, modulated_norm
from tunecompile.ops.norms.rms_norm import add_rms_norm, compute_dtype, rms_norm

__all__ = [
    "add_layer_norm",
    "add_modulated_norm",
    "add_rms_norm",
    "compute_dtype",
    "layer_norm",
    "modulated_norm",
    "rms_norm",
]
