"""Triton kernels of tunecompile: readable, specialised by constexpr, usable without torch.compile.

One file holds one kernel (or one forward and backward pair) and its launch functions. A file is
imported when it is first read (``templates.nf4``): this package itself imports no triton, because
a CPU build of torch brings none.

# Writing one

- A launch function takes and returns tensors, checks what the kernel takes for granted (a ``ValueError``), takes its
  tile from ``tunecompile.templates._tiles`` and calls ``tunecompile.templates._launch.launch``: eagerly that starts
  the kernel, under tracing it makes a node that Inductor launches. It reads no value from the GPU, and times
  nothing while a model runs: measurements become rows of the table.
- Options (activation, soft-cap, which outputs are computed) and floats are ``tl.constexpr``: Inductor would pass a
  float as fp64. Numbers of rows are arguments, so that other batches need no compilation. Offsets of rows are int64.
- Arithmetic is in fp32, results are rounded once. Sums over programs are written as partial sums and added in a fixed
  order, never by atomics.
- Results that stand beside existing data (LoRA's columns beside X) are written to a buffer of the caller.

An op takes it by a provider that reads it when it runs: ``@my_op.provider("triton", refuses=...)``, see
``tunecompile.op``. A backward op has providers of its own.

# Testing and measuring one

An op's `example=` is what all templates of it are tested, compiled offline and timed with; axes beyond it have cases in
`tests/templates/`. See docs/pages/develop/write-a-template.md. A template that is slower than Inductor's code for its
reference does not belong here."""

import importlib
from collections.abc import Callable
from types import ModuleType

__all__: list[str] = []


def lazily(package: str) -> Callable[[str], ModuleType]:
    """The `__getattr__` of a package whose files are imported when they are first read."""

    def read(name: str) -> ModuleType:
        try:
            return importlib.import_module(f"{package}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{package}.{name}":  # what it imports
                raise
            raise AttributeError(name) from None

    return read


__getattr__ = lazily(__name__)
