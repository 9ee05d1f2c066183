"""Causal attention over documents for what vendors' kernels do not take: soft-capped scores, heads wider than 256."""

from tunecompile.templates.attention.backward_pass import backward
from tunecompile.templates.attention.forward_pass import forward
