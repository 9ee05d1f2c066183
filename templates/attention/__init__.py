"""Attention over documents for what vendors' kernels do not take: soft-caps, wide heads, trees, dropout of weights."""

from tunecompile.templates import lazily
from tunecompile.templates.attention.backward_pass import backward
from tunecompile.templates.attention.forward_pass import forward

__getattr__ = lazily(__name__)
