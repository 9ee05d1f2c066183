"""A tensor that a kernel writes is not copied to itself.

Inductor gives a kernel's arguments the strides of the trace, and copies what was written back where it had to make
another tensor for that. Of a dimension of one it may have another stride than the trace, `32 * rows` for
`32 * max(1, rows)`; the argument is then a view of the same memory, which is copied back all the same. Its scheduler
takes no kernel that waits for itself (`KeyError: 'op45'`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tunecompile._torch.lookup import exist, lookup, replaced

_GRAPH = "torch._inductor.graph.GraphLowering"
_NAME = "torch._inductor.ir.IRNode.maybe_get_name"


@contextlib.contextmanager
def nothing_copied_to_itself() -> Iterator[None]:
    """Inside, code is generated without these copies. (See `replaced`.)"""
    graph: Any = lookup(_GRAPH)
    if not exist(_GRAPH, f"{_GRAPH}.propagate_mutation", _NAME):
        yield
        return
    plain = graph.propagate_mutation

    def propagate(self: Any, node: Any, args: Any, kwargs: Any, new_args: Any, new_kwargs: Any) -> Any:
        return plain(self, node, args, kwargs, _without_views(args, new_args), _without_views(kwargs, new_kwargs))

    with replaced(graph, propagate_mutation=propagate):
        yield


def _without_views(old: Any, new: Any) -> Any:
    """An argument as the kernel has it, or as it was before where that is the same memory."""
    if isinstance(new, dict):
        return {name: _without_views(old[name], value) for name, value in new.items()}
    if isinstance(new, (list, tuple)):
        return type(new)(_without_views(*pair) for pair in zip(old, new, strict=True))
    name = getattr(new, "maybe_get_name", lambda: None)()
    return old if name is not None and name == old.maybe_get_name() else new
