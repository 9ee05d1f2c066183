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
from tunecompile.ir.views import call_behind, is_view, with_strides

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
                reader.replace_input_with(operand, _stored(graph, operand))


def _is_free(rows: Node) -> bool:
    """Whether Inductor may store rows otherwise than the graph says: row by row, without gaps."""
    fake, root = rows.meta["val"], rows
    while is_view(root):
        if root.target is aten.as_strided.default:
            return False
        root = root.all_input_nodes[0]
    if root.op == "placeholder" or root.target is getitem:  # an input, or the result of a kernel that is called
        return False
    return fake.dim() == 2 and isinstance(fake.shape[1], int) and fake.stride() == (fake.shape[1], 1)


def _stored(graph: Graph, rows: Node) -> Node:
    """A view of the rows that has the strides of the rows."""
    fake = rows.meta["val"]
    if fake.storage_offset() != 0:  # a piece of a tensor: Inductor would read that one's beginning
        dense = fake.clone(memory_format=torch.contiguous_format)
        rows = call_behind(graph, rows, aten.clone.default, rows, made=dense)
    return with_strides(graph, rows)


PASS = Pass("grouped_operands", "lower", run, requires=frozenset({"choose_provider"}))
