"""One way to start a kernel, for eager calls and for calls traced by ``make_fx``.

Traced, a launch must become a ``triton_kernel_wrapper_mutation`` node, which Inductor compiles and
starts itself; ``torch.library.wrap_triton`` does that. Eagerly the wrapper would only cost host
time, so the kernel is started directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tunecompile._torch.fake_tensors import dispatch_mode

__all__ = ["is_aligned", "is_tracing", "launch", "multiprocessors", "next_power_of_2", "row_ranges"]

Grid = Sequence[int] | Callable[[dict[str, Any]], Sequence[int]]


def is_tracing(args: Sequence[Any] = ()) -> bool:
    """Whether a launch must be recorded, not run.

    Any dispatch mode counts (proxy, fake, flop counter, ...). Modes that do not record run the wrapped
    kernel, so a wrong "yes" only costs host time.

    Args:
        args: of the launch.

    Returns:
        True where a dispatch mode is active, or an argument has no storage to read.
    """
    if torch.compiler.is_compiling() or dispatch_mode() is not None:
        return True
    return any(isinstance(a, torch.Tensor) and type(a) not in (torch.Tensor, torch.nn.Parameter) for a in args)


def launch(kernel: Any, grid: Grid, *args: Any, fuse_products: bool = True, **constexprs: Any) -> None:
    """Start a kernel, on the device of the first tensor among its arguments; or record it, where the call is traced.

    Args:
        kernel: made by ``triton.jit``.
        grid: numbers of programs, or a function of the constexprs that returns them.
        args: tensors and integers. A float goes among the constexprs: Inductor would pass it as fp64.
        fuse_products: whether the compiler may fuse products into sums where it likes. Which ones it does depends on
            what else a kernel computes. It is always said, as Triton's default changes (triton#11270). Inductor takes
            no such option: `tunecompile._torch.inductor` says for traced launches that it may.
        constexprs: by name, ``num_warps`` and ``num_stages`` among them.
    """
    if is_tracing(args):
        torch.library.wrap_triton(kernel)[grid](*args, **constexprs)
        return
    constexprs["enable_fp_fusion"] = fuse_products
    first = next(a for a in args if isinstance(a, torch.Tensor))
    if first.is_cuda:  # triton launches on the current device, which need not be the tensors'
        with torch.cuda.device(first.device):
            kernel[grid](*args, **constexprs)
    else:
        kernel[grid](*args, **constexprs)


def is_aligned(tensor: torch.Tensor, *, to: int) -> bool:
    """Whether a tensor's address is a multiple of some bytes.

    Args:
        tensor: may be fake. Only its offset in the storage counts, since storages are aligned to more.
        to: bytes.

    Returns:
        Whether it is.
    """
    return tensor.storage_offset() * tensor.element_size() % to == 0


def row_ranges(rows: int | torch.SymInt, each: int, most: int | None = None) -> int | torch.SymInt:
    """The number of programs that share the rows, for scratch with a part for each: 2 or more where rows are a symbol.

    torch asks of each size whether it is 1 (`check_contiguous_sizes_strides`). A symbol's is not, but ceil(N / each)
    may be: the answer becomes a guard on N, with one graph for up to `each` rows, and another for more. So there is one
    program more, which has no rows and leaves zeros. (Of a maximum or minimum Inductor asks which it is, and caches the
    answer with its code.)

    Args:
        rows: their number.
        each: rows of a program, or what it takes at a time.
        most: programs, if those are limited; there are so many then where rows are a symbol.

    Returns:
        The number of parts, and of programs in the grid.
    """
    count = (rows + each - 1) // each
    if isinstance(count, int):
        return count if most is None else min(count, most)
    return count + 1 if most is None else max(most, 2)


def next_power_of_2(n: int) -> int:
    """The size of a Triton block that holds n elements.

    Args:
        n: elements, known at trace time (a SymInt is specialised).

    Returns:
        The smallest power of two >= n.
    """
    return 1 << max(int(n) - 1, 0).bit_length()


def multiprocessors(device: torch.device) -> int:
    """The number of streaming multiprocessors, for grids of as many programs as run at once.

    Args:
        device: of the tensors.

    Returns:
        Their number; 4 without a GPU (interpreter), so that loops over rows are tested."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count
