"""Frozen 4-bit weights that stay dequantised, where a budget leaves room for that.

Each matrix product of adapted linears gets one matrix, [[W, scale B], [A, 0]]: its upper part is what the forward pass multiplies by, its
left part what the backward pass does. W is written once. A and B change at every optimizer step, so they are written before a step's
first layer, all of them in one launch. The compiled graphs take the matrix in the place of the first weight it holds.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, Callable, Sequence

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from tunecompile._torch import fake_mode_of, size_hint
from tunecompile.ops.frozen import Frozen, frozen, on_matrices
from tunecompile.ops.lora import padded
from tunecompile.ops.nf4 import dequantize_4bit
from tunecompile.op import has_triton, returns_view

Run = Callable[[list], Sequence[Any]]


def replaceable(graph: Graph) -> dict[str, Frozen]:
    """The products whose weights nobody else reads, by the name of the input that stands for them. (Packed weights are read as they are
    given from now on, not through views, which would be saved in their place.)"""
    _read_directly(graph)
    found: dict[str, Frozen] = {}
    refused: set[str] = set()
    for node in graph.nodes:
        for product in frozen(node) or ():
            inputs = [member for group in (*product.weights, product.a, product.b) for member in group if isinstance(member, Node)]
            name = product.place.name
            if not product.quantized or any(member.op != "placeholder" for member in inputs) or found.setdefault(name, product) != product:
                refused.add(name)
    for name, product in found.items():
        if any(not _reads_first(reader, product.place) and reader.op != "output" for reader in _readers(product.place)):
            refused.add(name)
    return {name: product for name, product in found.items() if name not in refused}


def _reads_first(reader: Node, place: Node) -> bool:
    """Whether it is for a product that this input stands for."""
    return any(product.place is place for product in frozen(reader) or ())


def _read_directly(graph: Graph) -> None:
    for node in list(graph.nodes):
        for product in frozen(node) or ():
            for weight in product.weights:
                if len(weight) > 1 and weight[0].users and (given := _same_bytes(weight[0])) is not weight[0]:
                    for reader in [user for user in weight[0].users if user.target is dequantize_4bit.overload or frozen(user)]:
                        reader.replace_input_with(weight[0], given)
                    _erase(graph, weight[0])


def _erase(graph: Graph, view: Node) -> None:
    while view.op == "call_function" and not view.users:
        (source,) = view.all_input_nodes
        graph.erase_node(view)
        view = source


def _same_bytes(view: Node) -> Node:
    """The input of which this is another shape."""
    node, count = view, view.meta["val"].numel()
    while node.op == "call_function" and returns_view(node.target) and len(node.all_input_nodes) == 1 and node.meta["val"].is_contiguous():
        node = node.all_input_nodes[0]
    value = node.meta["val"]
    return node if node.op == "placeholder" and value.numel() == count and value.dtype == view.meta["val"].dtype and value.is_contiguous() else view


def _readers(place: Node) -> list[Node]:
    """Its users, and those of what it is dequantised to."""
    return [reader for user in place.users for reader in (user.users if user.target is dequantize_4bit.overload else [user])]


def matrix_shape(product: Frozen) -> tuple[int, int]:
    rank = sum(size_hint(m.meta["val"].shape[0]) for m in product.a)
    return padded(sum(size_hint(m.meta["val"].shape[0]) for m in product.b) + rank), padded(product.columns + rank)


def _dtype(product: Frozen) -> torch.dtype:
    return product.weights[0][-1]


def matrix_bytes(graph: Graph) -> int:
    """Of all matrices of a layer."""
    return sum(rows * columns * _dtype(product).itemsize for product in replaceable(graph).values() for rows, columns in [matrix_shape(product)])


@dataclass(frozen=True)
class Position:
    """A product's parts as positions among a compiled graph's inputs, constants as they are."""

    place: int
    weights: tuple[tuple, ...]
    a: tuple[int, ...]
    b: tuple[int, ...]
    scales: tuple[float, ...]
    shape: tuple[int, int]
    columns: int
    dtype: torch.dtype


class Matrix:
    """Whose values are in one product's matrix. It lives as long as the tensor does, also where only a pending backward holds that."""

    def __init__(self, values: Tensor, weights: Sequence[Tensor], columns: int):
        self.tensor, self.columns = weakref.ref(values), columns
        self.weights, self.versions = [weakref.ref(weight) for weight in weights], [weight._version for weight in weights]
        self.a: list[Tensor] = []
        self.b: list[Tensor] = []
        self.scales: tuple[float, ...] = ()
        values._matrix = self

    def holds(self, weights: Sequence[Tensor]) -> bool:
        return all(ref() is weight and version == weight._version for ref, weight, version in zip(self.weights, weights, self.versions))

    def adapted(self, a: Sequence[Tensor], b: Sequence[Tensor], scales: tuple[float, ...]) -> bool:
        mine, given = (*self.a, *self.b), (*a, *b)
        return self.scales == scales and len(mine) == len(given) and all(x.data_ptr() == y.data_ptr() for x, y in zip(mine, given))

    def adapt(self, a: list[Tensor], b: list[Tensor], scales: tuple[float, ...]) -> None:
        self.a, self.b, self.scales = a, b, scales
        values = self.tensor().data  # behind autograd's back: what a pending backward reads is what is written again
        values[:, self.columns:] = 0
        values[sum(m.shape[0] for m in b):] = 0
        writer(self.pieces())()

    def pieces(self) -> list[tuple[Tensor, Tensor, float]]:
        """(adapter, where it stands, factor)."""
        found, row, column = [], 0, self.columns
        height, target = sum(m.shape[0] for m in self.b), self.tensor().data
        for a, b, scale in zip(self.a, self.b, self.scales):
            rank = a.shape[0]
            below = height + column - self.columns
            found.append((b.detach(), target[row:row + b.shape[0], column:column + rank], scale))
            found.append((a.detach(), target[below:below + rank, :self.columns], 1.0))
            row, column = row + b.shape[0], column + rank
        return found


class Kept:
    """All matrices of one model."""

    def __init__(self) -> None:
        self.matrices: dict[tuple, Tensor] = {}  #: by their weights' addresses, shape and dtype (adapters differ in targets and rank)
        self.write_all: Callable[[], None] | None = None
        self.addresses: list[int] = []  #: of what it writes

    @property
    def bytes(self) -> int:
        return sum(values.nbytes for values in self.matrices.values())

    def release(self) -> None:
        """A backward that is still to come keeps what it needs."""
        self.matrices.clear()
        self.write_all = None

    def begin(self) -> None:
        """Before a step's first layer: the optimizer may have stepped. (Some do so without autograd's version counters.)"""
        if not self.matrices:
            return
        with torch._C.DisableTorchFunctionSubclass():  # 4-bit parameters would answer each question in Python
            self._prune()
            matrices = [values._matrix for values in self.matrices.values()]
            addresses = [adapter.data_ptr() for matrix in matrices for adapter in (*matrix.a, *matrix.b)]
            if self.write_all is None or addresses != self.addresses:
                self.write_all, self.addresses = writer([piece for matrix in matrices for piece in matrix.pieces()]), addresses
            self.write_all()

    def _prune(self) -> None:
        """Weights may have been replaced, or moved; memory of adapters may have been taken away."""
        for key, values in list(self.matrices.items()):
            matrix, weights = values._matrix, [ref() for ref in values._matrix.weights]
            gone = any(weight is None or weight.data_ptr() != address for weight, address in zip(weights, key[0]))
            if gone or not all(adapter.untyped_storage().nbytes() for adapter in (*matrix.a, *matrix.b)):
                del self.matrices[key]
                self.write_all = None

    def rewrite(self, gm: GraphModule, inputs: list, names: Sequence[str]) -> list[Position]:
        """Let the calls on these products read matrices, `inputs` being the fake values the graph is compiled for."""
        places = {node: i for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
        done: dict[str, Position] = {}
        for node in list(gm.graph.nodes):
            products = frozen(node) or []
            if not products or any(product.place.name not in names for product in products):
                continue
            for product in products:
                if product.place.name not in done:
                    done[product.place.name] = _position(product, places)
            node.target, node.args = on_matrices(node, [product.place for product in products])
        for position, node in [(done[node.name], node) for node in places if node.name in done]:
            with fake_mode_of(node.meta["val"]):
                node.meta["val"] = inputs[position.place] = torch.empty(position.shape, dtype=position.dtype, device=inputs[position.place].device)
        gm.graph.eliminate_dead_code()
        gm.recompile()
        return list(done.values())

    def forward(self, run: Run, positions: Sequence[Position]) -> Run:
        kept = weakref.ref(self)  # Dynamo's cache holds what it runs, where Python's collector does not look

        def call(inputs: list) -> Sequence[Any]:
            with torch._C.DisableTorchFunctionSubclass():
                for position, values in [(position, kept()._values(position, inputs)) for position in positions]:
                    inputs[position.place] = values
            return run(inputs)

        return call

    def backward(self, run: Run, positions: Sequence[Position]) -> Run:
        """Matrices come as what the forward saved; another adapter may have run in between."""
        kept = weakref.ref(self)

        def call(inputs: list) -> Sequence[Any]:
            with torch._C.DisableTorchFunctionSubclass():
                for position in positions:
                    if _adapt(inputs[position.place], position, inputs) and kept() is not None:
                        kept().write_all = None
            return run(inputs)

        return call

    def _values(self, position: Position, inputs: list) -> Tensor:
        weights = [inputs[weight[0]] for weight in position.weights]
        key = tuple(weight.data_ptr() for weight in weights), position.shape, position.columns, position.dtype
        values = self.matrices.get(key)
        if values is None or not values._matrix.holds(weights):
            values = self.matrices[key] = self._made(position, inputs, weights)
        if _adapt(values, position, inputs):
            self.write_all = None
        return values

    def _made(self, position: Position, inputs: list, weights: list[Tensor]) -> Tensor:
        values = torch.zeros(position.shape, dtype=position.dtype, device=weights[0].device)
        row = 0
        for weight in position.weights:
            row += _write_weight(values, row, position.columns, [inputs[m] if isinstance(m, int) else m[0] for m in weight])
        Matrix(values, weights, position.columns)
        return values


def _adapt(values: Tensor, position: Position, inputs: list) -> bool:
    """Let the matrix hold these adapters. Whether it held others."""
    a, b = ([inputs[i] for i in places] for places in (position.a, position.b))
    matrix = getattr(values, "_matrix", None)
    if matrix is None or matrix.adapted(a, b, position.scales):
        return False
    matrix.adapt(a, b, position.scales)
    return True


def _position(product: Frozen, places: dict[Node, int]) -> Position:
    def place(member: Any) -> Any:
        return places[member] if isinstance(member, Node) else (member,)  # constants apart from positions

    a, b = (tuple(places[m] for m in group) for group in (product.a, product.b))
    weights = tuple(tuple(place(member) for member in weight) for weight in product.weights)
    return Position(places[product.place], weights, a, b, product.scales, matrix_shape(product), product.columns, _dtype(product))


def _write_weight(out: Tensor, row: int, columns: int, weight: list) -> int:
    """Into rows `row`.. and the first columns. Returns how many rows."""
    packed, absmax, code, scale, offset, rows, _, blocksize, quant_type, dtype = weight
    if out.is_cuda and has_triton():
        from tunecompile.templates import nf4

        nf4.dequantize_siblings([nf4.Weight(packed.detach(), absmax, code, scale, offset, rows)], columns, out, blocksize=blocksize,
                                quant_type=quant_type, row=row)
    else:
        out[row:row + rows, :columns] = dequantize_4bit.choose(weight).run(*weight)
    return rows


def writer(pieces: Sequence[tuple[Tensor, Tensor, float]]) -> Callable[[], None]:
    """A function that writes adapters where they stand, times their factors, whenever it is called."""
    if pieces and pieces[0][0].is_cuda and has_triton():
        from tunecompile.templates import lora

        if all(source.stride(1) == 1 and {source.dtype, target.dtype} <= set(lora.DTYPES) for source, target, _ in pieces):
            return lora.write_pieces(pieces)

    def write() -> None:
        for source, target, factor in pieces:
            target.copy_(source.to(torch.promote_types(source.dtype, torch.float32)) * factor)

    return write
