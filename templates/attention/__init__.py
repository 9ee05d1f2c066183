"""Attention over documents for what vendors' kernels do not take: soft-caps, wide heads, trees, weights with dropout."""

from tunecompile.templates.attention.backward_pass import backward
from tunecompile.templates.attention.forward_pass import forward
