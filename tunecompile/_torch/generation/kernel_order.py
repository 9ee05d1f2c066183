"""Kernels run in the order of the graph that they are generated from, which is the order that memory is planned with.

Inductor moves kernels in three ways. It joins kernels that do not read of each other, and kernels that read the same,
wherever they stand, and runs them where the first one stood. What the others read is then computed before, too: the
backward of an MLP before the sums behind it, the recomputed keys of a delta rule before the MLP. Their results lie in
memory in between, up to two thirds of what a layer's backward takes. And it searches for an order of fewer bytes, in
whose account what shares memory with a concatenation takes none.

So kernels with small results are joined where the operands of all are there when the first one runs; large results that
are computed of the same are computed together only where they are near each other; and nothing else moves.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from tunecompile._torch.lookup import exist, lookup, replaced

SMALL = 8 << 20  #: bytes that a kernel writes, to be joined with others: more take longer than a launch
LARGE = 128 << 20  #: bytes that two kernels write each, to stay apart where they are far from each other
FAR = 32  #: operations between them
LAUNCHES = 64 << 20  #: bytes of the largest result of a graph that may wait for launches: there memory counts less

_KERNEL = "torch._inductor.scheduler.ForeachKernelSchedulerNode"
_SCHEDULER = "torch._inductor.scheduler.Scheduler"
_REORDER = "torch._inductor.memory.reorder_for_peak_memory"
_kernel: Any = lookup(_KERNEL)
_scheduler: Any = lookup(_SCHEDULER)
_memory: Any = lookup("torch._inductor.memory")
_BYTES = exist("get_write_buffer_sizes", "min_order", "max_order", under="torch._inductor.scheduler.BaseSchedulerNode")
_CAN_DIVIDE = (
    _BYTES
    and exist(_KERNEL, f"{_KERNEL}.group_nodes_for_combo_kernels", f"{_KERNEL}.combinable_nodes")
    and exist(_SCHEDULER, f"{_SCHEDULER}._get_unmet_dep_nodes", f"{_SCHEDULER}.nodes")
)
_CAN_PART = _BYTES and exist(_SCHEDULER, f"{_SCHEDULER}.are_long_distant_nodes")
_CAN_KEEP = exist("torch._inductor.memory", _REORDER, f"{_REORDER}.methods")


@contextlib.contextmanager
def in_order() -> Iterator[None]:
    """Inside, code is generated whose kernels run in the order of their graph. (See `replaced`.)"""
    with contextlib.ExitStack() as stack:
        if _CAN_DIVIDE:
            group = _kernel.group_nodes_for_combo_kernels
            divided = staticmethod(functools.partial(_groups, group))
            stack.enter_context(replaced(_kernel, group_nodes_for_combo_kernels=divided))
        if _CAN_PART:
            far = _scheduler.are_long_distant_nodes

            def parted(self: Any, one: Any, other: Any) -> bool:
                return far(self, one, other) or _are_far(one, other)

            stack.enter_context(replaced(_scheduler, are_long_distant_nodes=parted))
        if _CAN_KEEP:
            # it is called all the same: later parts read what it notes of each kernel
            in_place = functools.partial(_memory.reorder_for_peak_memory, methods=[])
            stack.enter_context(replaced(_memory, reorder_for_peak_memory=in_place))
        yield


def _groups(plain: Callable[[Any], list[list[Any]]], scheduler: Any) -> list[list[Any]]:
    """Kernels to be joined. plain: torch's own function, whose groups are divided."""
    if max((node.get_write_buffer_sizes() for node in scheduler.nodes), default=0) <= LAUNCHES:
        return plain(scheduler)
    place = {node: i for i, node in enumerate(scheduler.nodes)}
    found: list[list[Any]] = []
    for group in plain(scheduler):
        members = [node for node in _kernel.combinable_nodes(group) if node.get_write_buffer_sizes() <= SMALL]
        first = None
        for node in sorted(members, key=place.__getitem__):
            last = max((place[each] for each in scheduler._get_unmet_dep_nodes(node)), default=-1)
            if first is None or last > first:
                found.append([])
                first = place[node]
            found[-1].append(node)
    return found


def _are_far(one: Any, other: Any) -> bool:
    """Whether two kernels write so much that one should not run long before its place."""
    apart = max(abs(one.min_order - other.max_order), abs(other.min_order - one.max_order))
    return apart > FAR and min(node.get_write_buffer_sizes() for node in (one, other)) > LARGE
