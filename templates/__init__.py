"""Triton kernels of tunecompile: readable, specialised by constexpr, usable without torch.compile.

One file holds one kernel (or one forward and backward pair) and its launch functions. Import the
files by name (``from tunecompile.templates import nf4``): this package itself imports no triton,
because a CPU build of torch brings none.
"""
