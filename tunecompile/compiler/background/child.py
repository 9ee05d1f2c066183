"""A process that generates code: `python -m tunecompile.compiler.background.child FOLDER`.

It reads the number of each order from its input, and ends with it, or when it has had nothing to do for a while. What
it makes is in Inductor's caches on disk; its answers say no more than that it is done. It computes nothing on a GPU,
but Inductor loads the kernels there that it has made, which takes a context, some 0.5 GiB, until this process ends.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tunecompile._torch.background.graphs import generate, unpack
from tunecompile._torch.compile_workers import start_compile_workers
from tunecompile._torch.generation import code_of_layers
from tunecompile._torch.triton_analysis import analyses_answered_by
from tunecompile.compiler.background.orders import (
    Answer,
    KnownLowering,
    KnownPartitioner,
    answer_of,
    order_of,
    to_json,
    write,
)
from tunecompile.compiler.background.providers import agree
from tunecompile.compiler.kernel_access_cache import ACCESSES
from tunecompile.compiler.pass_manager import Context

IDLE = 60.0  #: seconds without a further order, after which it ends: it holds memory of the host and the GPU


def fill(packed: bytes) -> None:
    """Generate code for the graphs of one order.

    Raises:
        Exception: of many kinds: torch's compiler failed, or this process does not know something of the graphs.
    """
    graphs, order, (passes, lowered, cut, about, providers), mode = unpack(packed)
    agree(providers)
    context = Context(*about)
    settings = {
        "post_grad_custom_pre_pass": KnownLowering(passes, lowered, context),
        "custom_partitioner_fn": KnownPartitioner(cut),
    }
    generate(graphs, order, mode, settings, _around)


@contextlib.contextmanager
def _around() -> Iterator[None]:
    """As the training generates code itself."""
    with code_of_layers(), analyses_answered_by(ACCESSES.answer):
        yield


def serve(folder: Path, numbers: int) -> None:
    """Fill orders until there are no more.

    Args:
        folder: of orders and answers.
        numbers: the descriptor of the file that their numbers come from, a line each.
    """
    rest, patience = b"", None  # data may be prepared for long before the first step
    while select.select([numbers], [], [], patience)[0]:
        read = os.read(numbers, 4096)
        if not read:
            return
        *lines, rest = (rest + read).split(b"\n")
        patience = IDLE
        for line in lines:
            begin, error = time.perf_counter(), ""
            try:
                fill(order_of(folder, int(line)).read_bytes())
            except Exception as failure:
                error = f"{type(failure).__name__}: {str(failure)[:500]}"
            write(answer_of(folder, int(line)), to_json(Answer(time.perf_counter() - begin, error)))


if __name__ == "__main__":
    start_compile_workers(None)
    serve(Path(sys.argv[1]), sys.stdin.fileno())
