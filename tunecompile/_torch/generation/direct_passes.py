"""Work that Inductor does for each graph, and that is done directly here, or left out: a sixth of generating its code.

- A Triton kernel that writes into what nobody else reads is called on it as it is. Inductor traces and matches a
  function for each such call.
- A script that reproduces the graph is written for torch's structured trace, whether there is one or not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.fx import Graph

from tunecompile._torch.lookup import exist, lookup, replaced

_PASSES: Any = lookup("torch._inductor.fx_passes.post_grad")
_KERNELS: Any = lookup("torch._higher_order_ops.triton_kernel_wrap")
_SCRIPTS: Any = lookup("torch._dynamo.repro.after_aot")
_DECOMPOSES = exist("torch._inductor.fx_passes.post_grad.decompose_triton_kernel_wrapper_functional")
_WRITES = exist("torch._dynamo.repro.after_aot.save_graph_repro")


@contextlib.contextmanager
def direct_passes(traced: bool) -> Iterator[None]:
    """Inside, code is generated with these. (See `replaced`.) traced: whether torch's structured trace is read."""
    with contextlib.ExitStack() as stack:
        if _DECOMPOSES and _KERNELS is not None:
            plain = _PASSES.decompose_triton_kernel_wrapper_functional

            def decompose(graph: Graph) -> None:
                call_in_place(graph)
                plain(graph)  # those that copy, and those in subgraphs

            stack.enter_context(replaced(_PASSES, decompose_triton_kernel_wrapper_functional=decompose))
        if _WRITES and not traced:
            stack.enter_context(replaced(_SCRIPTS, save_graph_repro=lambda *_, **__: None))
        yield


def call_in_place(graph: Graph) -> None:
    """Call kernels on their own arguments, where Inductor found that nothing has to be copied before."""
    for node in graph.find_nodes(op="call_function", target=_KERNELS.triton_kernel_wrapper_functional):
        if node.users or node.kwargs["tensors_to_clone"]:
            continue
        kwargs = {name: value for name, value in node.kwargs.items() if name != "tensors_to_clone"}
        with graph.inserting_before(node):
            call = graph.call_function(_KERNELS.triton_kernel_wrapper_mutation, kwargs=kwargs)
        call.meta = {name: value for name, value in node.meta.items() if name != "val"}
        if "eager_input_vals" in call.meta:  # arguments as they were traced: torch 2.13
            before = call.meta["eager_input_vals"][1]
            call.meta["eager_input_vals"] = (), {k: v for k, v in before.items() if k != "tensors_to_clone"}
        graph.erase_node(node)
