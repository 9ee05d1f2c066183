"""Find the frozen weights that a call in a graph reads, and make the same call on fused matrices.

A fused matrix holds weights and adapters (`tunecompile.ops.frozen_weights`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from tunecompile.ir.op import OPS
from tunecompile.ops.frozen_weights import DENSE, FrozenWeights, PackedWeights, frozen_weights
from tunecompile.ops.lora import lora_linear, lora_linear_backward
from tunecompile.ops.lora_mlp import DOWN, WIDE, both_weights, lora_mlp, lora_mlp_backward
from tunecompile.ops.nf4 import dequantize_4bit

__all__ = ["FrozenProduct", "frozen", "on_matrices"]

#: the ops that read frozen weights
_READERS = (lora_linear, lora_linear_backward, lora_mlp, lora_mlp_backward)


@dataclass(frozen=True)
class FrozenProduct:
    """The weights of one matrix product and their adapters, as nodes of a graph."""

    weights: tuple[
        tuple, ...
    ]  #: for each weight the arguments of `dequantize_4bit`, or a tuple with the dense weight [N_i, K]
    a: tuple[Node, ...]  #: A_i, [r_i, K]
    b: tuple[Node, ...]  #: B_i, [N_i, r_i]
    scales: tuple[float, ...]  #: factors, one an adapter
    columns: int  #: K

    @property
    def quantized(self) -> bool:
        """Whether all weights are 4-bit.

        Dense weights may change without a new `_version` (`weight.data += delta`, when adapters are merged).
        """
        return all(len(weight) > 1 for weight in self.weights)

    @property
    def place(self) -> Node:
        """The input node of the first weight, which identifies the product."""
        return self.weights[0][0]


def frozen(node: Node) -> list[FrozenProduct] | None:
    """Return the frozen weights that a node of a joint graph reads.

    Args:
        node: any node.

    Returns:
        One for each matrix product of an adapted linear or MLP, or of its backward (an MLP has two: gate|up, and
        down); None for other nodes."""
    args = _arguments(node)
    if args is None:
        return None
    rows, dtype = [m.meta["val"].shape[0] for m in args["b"]], args["x"].meta["val"].dtype
    described = (args["weights"], args["stored"], rows, _columns(args["a"][0]), dtype)
    if "activation" in args:  # an MLP has two
        return [_product(args, *part) for part in zip((WIDE, DOWN), both_weights(*described))]
    return [_product(args, slice(None), frozen_weights(*described))]


def _product(args: dict[str, Any], part: slice, weights: FrozenWeights) -> FrozenProduct:
    packed = isinstance(weights, PackedWeights)
    members = weights.arguments() if packed else [_source(weight) for weight in weights.matrices]
    a, b, scales = (tuple(args[name][part]) for name in ("a", "b", "scales"))
    return FrozenProduct(tuple(members), a, b, scales, _columns(a[0]))


def _columns(adapter: Node) -> int:
    """K, read from A [r, K]: sizes of parameters are numbers, while those of inputs are symbols under dynamic shapes.

    (A view of [n, heads, width] as [n, K] has a symbolic K, though n cancels out.)
    """
    return adapter.meta["val"].shape[-1]


def on_matrices(node: Node, matrices: Sequence[Node]) -> tuple:
    """Return the arguments of the same call on fused matrices.

    Args:
        node: one for which `frozen` is not None.
        matrices: one for each product, with its weights and adapters.
    """
    given = {**(_arguments(node) or {}), "weights": list(matrices), "stored": DENSE}
    return tuple(given[name] for name in OPS[node.target].parameters)


def _arguments(node: Node) -> dict[str, Any] | None:
    """The arguments of a call of an op that reads frozen weights, by the names of its parameters; else None."""
    op = OPS.get(node.target) if node.op == "call_function" else None
    return dict(zip(op.parameters, node.args)) if op in _READERS else None


def _source(weight: Node) -> tuple:
    return tuple(weight.args) if weight.target is dequantize_4bit.overload else (weight,)
