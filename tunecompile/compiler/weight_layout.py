"""Products of adapted linears that read one matrix in place of their 4-bit weights: which may, and the graphs that do.

The content of such matrices, and the code that writes them: tunecompile/runtime/memory/weight_cache.py.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from tunecompile._torch.fake_tensors import fake_mode_of, size_hint
from tunecompile.ir.op import returns_view
from tunecompile.ops.adapters.layout import padded
from tunecompile.ops.frozen_products import FrozenProduct, frozen, on_matrices
from tunecompile.ops.nf4 import dequantize_4bit


def replaceable(graph: Graph) -> dict[str, FrozenProduct]:
    """The products of 4-bit weights that have no other user, by the name of their input.

    Packed weights are read directly from now on, and not through views, which would be saved in their place.
    """
    _read_directly(graph)
    found: dict[str, FrozenProduct] = {}
    refused: set[str] = set()
    for node in graph.nodes:
        for product in frozen(node) or ():
            inputs = [
                member
                for group in (*product.weights, product.a, product.b)
                for member in group
                if isinstance(member, Node)
            ]
            name = product.place.name
            if (
                not product.quantized
                or any(member.op != "placeholder" for member in inputs)
                or found.setdefault(name, product) != product
            ):
                refused.add(name)
    for name, product in found.items():
        if any(not _reads(reader, product) and reader.op != "output" for reader in _readers(product.place)):
            refused.add(name)
    return {name: product for name, product in found.items() if name not in refused}


def _reads(reader: Node, product: FrozenProduct) -> bool:
    """Whether a node reads the product's weights as this product."""
    return any(read.place is product.place for read in frozen(reader) or ())


def _read_directly(graph: Graph) -> None:
    """Replace views of packed weights by the inputs they are of."""
    for node in list(graph.nodes):
        for product in frozen(node) or ():
            for weight in product.weights:
                if len(weight) > 1 and weight[0].users and (given := _same_bytes(weight[0])) is not weight[0]:
                    for reader in [
                        user for user in weight[0].users if user.target is dequantize_4bit.overload or frozen(user)
                    ]:
                        reader.replace_input_with(weight[0], given)
                    _erase(graph, weight[0])


def _erase(graph: Graph, view: Node) -> None:
    """Erase a view without users, and the views it is of."""
    while view.op == "call_function" and not view.users:
        (source,) = view.all_input_nodes
        graph.erase_node(view)
        view = source


def _same_bytes(view: Node) -> Node:
    """The input of which a view has all bytes in their order; the view itself where there is none."""
    node, count = view, view.meta["val"].numel()
    while (
        node.op == "call_function"
        and returns_view(node.target)
        and len(node.all_input_nodes) == 1
        and node.meta["val"].is_contiguous()
    ):
        node = node.all_input_nodes[0]
    value = node.meta["val"]
    return (
        node
        if node.op == "placeholder"
        and value.numel() == count
        and value.dtype == view.meta["val"].dtype
        and value.is_contiguous()
        else view
    )


def _readers(place: Node) -> list[Node]:
    """The users of a weight, and those of its dequantised values."""
    return [
        reader for user in place.users for reader in (user.users if user.target is dequantize_4bit.overload else [user])
    ]


def matrix_shape(product: FrozenProduct) -> tuple[int, int]:
    """Rows and columns of the matrix, [[W, scale B], [A, 0]]."""
    rank = sum(size_hint(m.meta["val"].shape[0]) for m in product.a)
    rows = padded(sum(size_hint(m.meta["val"].shape[0]) for m in product.b) + rank)
    return rows, padded(product.columns + rank)


def _dtype(product: FrozenProduct) -> torch.dtype:
    """The dtype of the matrix."""
    return product.weights[0][-1]


def matrix_bytes(graph: Graph) -> int:
    """Bytes of all matrices of a layer."""
    return sum(math.prod(matrix_shape(product)) * _dtype(product).itemsize for product in replaceable(graph).values())


@dataclass(frozen=True)
class FusedWeightSlots:
    """The parts of a product as positions among a compiled graph's inputs; constants as they are."""

    place: int
    weights: tuple[tuple, ...]
    a: tuple[int, ...]
    b: tuple[int, ...]
    scales: tuple[float, ...]
    shape: tuple[int, int]
    columns: int
    dtype: torch.dtype


def give_matrices(gm: GraphModule, names: Sequence[str], inputs: list | None = None) -> list[FusedWeightSlots]:
    """Let the calls on some products read matrices in place of weights.

    Args:
        gm: changed in place.
        names: of the inputs that the matrices replace.
        inputs: the fake values that the graph is compiled for, changed in place.

    Returns:
        A matrix each, with the positions of its parts.
    """
    if not names:
        return []
    places = {node: i for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    done: dict[str, FusedWeightSlots] = {}
    for node in list(gm.graph.nodes):
        products = frozen(node) or []
        if not products or any(product.place.name not in names for product in products):
            continue
        for product in products:
            if product.place.name not in done:
                done[product.place.name] = _position(product, places)
        node.args = on_matrices(node, [product.place for product in products])
    for position in done.values():
        _give(position, list(places), inputs)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return list(done.values())


def _give(position: FusedWeightSlots, nodes: list[Node], inputs: list | None) -> None:
    """Give the input in a weight's place the matrix's fake value."""
    fake = nodes[position.place].meta["val"]
    with fake_mode_of(fake) or contextlib.nullcontext():
        values = torch.empty(position.shape, dtype=position.dtype, device=fake.device)
    nodes[position.place].meta["val"] = values
    if inputs is not None:
        inputs[position.place] = values


def _position(product: FrozenProduct, places: dict[Node, int]) -> FusedWeightSlots:
    """Replace nodes by positions."""

    def place(member: Any) -> Any:
        # constants in tuples, to tell them from positions
        return places[member] if isinstance(member, Node) else (member,)

    a, b = (tuple(places[m] for m in group) for group in (product.a, product.b))
    weights = tuple(tuple(place(member) for member in weight) for weight in product.weights)
    return FusedWeightSlots(
        places[product.place],
        weights,
        a,
        b,
        product.scales,
        matrix_shape(product),
        product.columns,
        _dtype(product),
    )
