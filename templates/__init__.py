"""Triton kernels of tunecompile: readable, specialised by constexpr, usable without torch.compile.

One file holds one kernel (or one forward and backward pair) and its launch functions. Import the
files by name (``from tunecompile.templates import nf4``): this package itself imports no triton,
because a CPU build of torch brings none.

# Writing one

- A launch function takes and returns tensors, checks what the kernel takes for granted (a ``ValueError``), takes its
  tile from ``tunecompile.templates._tiles`` and calls ``tunecompile.templates._launch.launch``: eagerly that starts
  the kernel, under tracing it makes a node that Inductor launches. It reads no value from the GPU, and nothing is
  timed while a model runs: a measurement becomes a row of the table.
- Axes (activation, soft-cap, what is computed at all) and floats are ``tl.constexpr``: Inductor would pass a float as
  fp64. Numbers of rows are arguments, or every batch would be compiled anew. Offsets of rows are int64.
- Arithmetic is in fp32, results are rounded once; what is summed over programs is written as parts and added up in a
  fixed order, never by atomics.
- What is written beside what stays (LoRA's columns beside X) goes into a buffer that the caller gives.

An op takes it by a provider that imports it when it runs: ``@my_op.provider("triton", refuses=...)``, see
``tunecompile.op``. A backward op has providers of its own.

# Testing and measuring one

- Without a GPU: ``TRITON_INTERPRET=1 pytest tests/templates``, on memory that is poisoned beforehand, against fp64;
  and ``test_crosscompile.py`` compiles every kernel for sm_80 to sm_120 and holds its shared memory against the
  card's. Add a case to ``offline.py`` for it.
- With one: ``pytest tests/templates`` runs the same tests on it, and ``python benchmarks/kernels/STEM.py`` gives
  medians on a cold cache, beside the reference under Inductor and other projects' kernels, as a share of what the
  memory's bandwidth allows; ``--sweep`` tries other tiles, ``--dry`` runs without a GPU. A template that loses to
  what Inductor makes of its reference has no place here."""

__all__: list[str] = []
