"""Fake tensors and make_fx: graphs of functions without data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from sympy import Eq, Expr  # noqa: F401 (others read `Expr` here)
from torch.fx import Graph, GraphModule, Node

from tunecompile._torch.autograd import no_autocast
from tunecompile._torch.lookup import lookup

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode
else:

    class _Absent:
        """In the place of a class that this version of torch does not have: nothing is an instance of it."""

    FakeTensor = lookup("torch._subclasses.fake_tensor.FakeTensor", _Absent)
    FakeTensorMode = lookup("torch._subclasses.fake_tensor.FakeTensorMode", _Absent)
    StorageWeakRef = lookup("torch.multiprocessing.reductions.StorageWeakRef", _Absent)
    TorchDispatchMode = lookup("torch.utils._python_dispatch.TorchDispatchMode", _Absent)


#: inside, operations on symbolic sizes reach the rules for fake tensors
enable_python_dispatcher = lookup("torch._dispatch.python.enable_python_dispatcher", contextlib.nullcontext)
make_fx = lookup("torch.fx.experimental.proxy_tensor.make_fx")  #: traces a function to a graph of ATen operations
select_decomp_table = lookup("torch._inductor.decomposition.select_decomp_table")  #: Inductor's decompositions
#: symbols of a tensor's sizes that have no hint. Where torch does not tell, there may be some
free_unbacked_symbols = lookup("torch.fx.experimental.symbolic_shapes.free_unbacked_symbols", lambda value: {"unknown"})
#: the innermost mode that sees every operation, None where there is none. Where torch does not tell, there may be one
dispatch_mode = lookup("torch.utils._python_dispatch._get_current_dispatch_mode", lambda: True)

#: whether a value is a tensor that holds others, of a subclass with operations of its own
wraps_tensors = lookup("torch.utils._python_dispatch.is_traceable_wrapper_subclass", lambda value: False)

#: returns the innermost mode that sees every function of torch, None where there is none. None: torch does not tell
function_mode = lookup("torch.overrides._get_current_function_mode")


def fake_mode_of(values: Any) -> FakeTensorMode | None:
    """The mode of the first fake tensor.

    (`detect_fake_mode` prefers the tracing context's, and Dynamo gives backends a fresh one.)
    """
    leaves = torch.utils._pytree.tree_leaves(values)
    return next((value.fake_mode for value in leaves if isinstance(value, FakeTensor)), None)


@contextlib.contextmanager
def tracing(fake_mode: FakeTensorMode | None) -> Iterator[None]:
    """Inside, operations on fake tensors give what they give while `trace` runs."""
    mode = fake_mode if fake_mode is not None else contextlib.nullcontext()
    with mode, enable_python_dispatcher(), torch.no_grad(), no_autocast():
        yield


def trace(fn: Callable, args: tuple, fake_mode: FakeTensorMode | None) -> torch.fx.GraphModule:
    """Trace `fn` on fake tensors to core ATen, with the decompositions Inductor would use.

    `triton` launches inside `fn` become functional `triton_kernel_wrapper` nodes, so that no mutation enters the graph.
    """
    with tracing(fake_mode), torch.fx.traceback.preserve_node_meta():
        return make_fx(torch.func.functionalize(fn), select_decomp_table(), tracing_mode="real")(*args)


_OF = "tunecompile_value_of"  #: of a node's metadata: the arguments that its fake value was computed from


def note_computed(node: Node) -> None:
    """Tell that a node's fake value is that of its arguments, in memory of its own."""
    node.meta[_OF] = node.args, node.kwargs


def is_computed(node: Node) -> bool:
    """Whether that was told of the arguments that the node has now."""
    args, kwargs = node.meta.get(_OF, (None, None))
    return args is node.args and kwargs is node.kwargs


def size_hint(size: int | torch.SymInt) -> int:
    """A size; of a symbol the size that it was compiled for; 0 without one."""
    return size if isinstance(size, int) else int(size.node.hint) if size.node.has_hint() else 0


def is_fake(value: Any) -> bool:
    """Whether a tensor has no data."""
    return isinstance(value, FakeTensor)


def size_with(size: torch.SymInt, symbol: torch.SymInt, value: int) -> int:
    """A size of which one symbol has another value.

    Raises:
        ValueError: the size depends on other symbols besides.
    """
    expression = size.node.expr
    if not expression.free_symbols & symbol.node.expr.free_symbols:
        return size_hint(size)
    found = expression.subs({symbol.node.expr: value})
    if not found.is_integer or found.free_symbols:
        raise ValueError(f"the size {expression} has other symbols besides {symbol}")
    return int(found)


def guards_at(size: Any, values: Sequence[int]) -> list[list[bool]]:
    """Whether the guards that a trace set on a symbol would hold for other values of it: a list for each guard.

    Symbols that have to be equal to it have its value.
    """
    guards = [guard.expr for guard in size.node.shape_env.guards]
    equal, count = {size.node.expr}, 0
    while count < len(equal):
        count = len(equal)
        pairs = [guard.args for guard in guards if isinstance(guard, Eq) and all(side.is_symbol for side in guard.args)]
        equal |= {side for pair in pairs if equal & set(pair) for side in pair}
    own = [guard for guard in guards if guard.free_symbols and guard.free_symbols <= equal]
    return [[bool(guard.subs(dict.fromkeys(equal, value))) for value in values] for guard in own]


def copied(gm: GraphModule) -> GraphModule:
    """A copy with new nodes and metadata. Fake values are shared: `deepcopy` would give each copy its own fake mode."""
    graph = Graph()
    returned = graph.graph_copy(gm.graph, {})
    graph.output(returned)
    work = GraphModule(gm, graph)
    work.meta = dict(gm.meta)
    return work
