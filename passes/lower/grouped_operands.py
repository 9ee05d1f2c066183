"""Grouped products read rows in the strides that the graph gives them, in generated code, too.

torch's grouped product of two matrices, a gradient of experts' weights, takes groups of any size only where neither
matrix is stored transposed. Otherwise a device-side assertion ends the process, unless the rows of each group are a
multiple of 16 bytes. Inductor chooses the strides of what it computes for the product; what tokens are gathered for, it
stores transposed where the product reads the transpose. (pytorch#159097 is the same for scaled products.) Inputs of
`as_strided` keep their strides.
"""

from operator import getitem

import torch
from torch.fx import Graph, Node

from tunecompile.compiler.pass_manager import Context, Pass
from tunecompile.ir.op import returns_view

__all__ = ["PASS"]

aten = torch.ops.aten
_TURNS = (aten.t.default, aten.transpose.int, aten.permute.default)


def run(graph: Graph, context: Context) -> None:
    for product in graph.find_nodes(op="call_function", target=aten._grouped_mm.default):
        for operand in product.args[:2]:
            reader = product
            while operand.target in _TURNS:
                reader, operand = operand, operand.args[0]
            if _is_free(operand):
                reader.replace_input_with(operand, _with_strides(graph, operand))


def _is_free(rows: Node) -> bool:
    """Whether Inductor may store rows otherwise than the graph says: row by row, without gaps."""
    fake, root = rows.meta["val"], rows
    while returns_view(root.target) or (root.target is getitem and returns_view(root.all_input_nodes[0].target)):
        if root.target is aten.as_strided.default:
            return False
        root = root.all_input_nodes[0]
    if root.op == "placeholder" or root.target is getitem:  # an input, or the result of a kernel that is called
        return False
    return fake.dim() == 2 and isinstance(fake.shape[1], int) and fake.stride() == (fake.shape[1], 1)


def _with_strides(graph: Graph, rows: Node) -> Node:
    """A view of the rows that has the strides of the rows."""
    fake = rows.meta["val"]

    def call(source: Node, target, *args, value) -> Node:
        with graph.inserting_after(source):
            made = graph.call_function(target, args)
        made.meta.update({key: rows.meta[key] for key in ("stack_trace", "nn_module_stack") if key in rows.meta})
        made.meta["val"] = value
        return made

    if fake.storage_offset() != 0:  # a piece of a tensor: Inductor would read that one's beginning
        fake = fake.clone(memory_format=torch.contiguous_format)
        rows = call(rows, aten.clone.default, rows, value=fake)
    count, last = fake.shape[0], rows
    if not isinstance(count, int):
        count = last = call(rows, aten.sym_size.int, rows, 0, value=count)
    return call(last, aten.as_strided.default, rows, [count, fake.shape[1]], list(fake.stride()), value=fake)


PASS = Pass("grouped_operands", "lower", run, requires=frozenset({"choose_provider"}))
