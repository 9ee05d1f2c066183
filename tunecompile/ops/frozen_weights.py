"""What an op's call reads of frozen weights, and the same call on matrices in which the weights stand beside their adapters."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from tunecompile.ir.op import OPS
from tunecompile.ops.lora import lora_linear
from tunecompile.ops.lora_mlp import DOWN, WIDE, lora_mlp
from tunecompile.ops.lora_nf4 import lora_linear_nf4
from tunecompile.ops.nf4 import dequantize_4bit

__all__ = ["FrozenWeights", "frozen", "on_matrices"]


@dataclass(frozen=True)
class FrozenWeights:
    """The weights of one matrix product, with their adapters."""

    weights: tuple[tuple, ...]  #: each is what `dequantize_4bit` takes, or a tuple of the dense weight [N_i, K] alone
    a: tuple[Node, ...]  #: A_i, [r_i, K]
    b: tuple[Node, ...]  #: B_i, [N_i, r_i]
    scales: tuple[float, ...]  #: of the adapters
    columns: int  #: K

    @property
    def quantized(self) -> bool:
        """Dense weights may be changed in ways that nothing counts (`weight.data += delta`, as adapters are merged)."""
        return all(len(weight) > 1 for weight in self.weights)

    @property
    def place(self) -> Node:
        """The input that stands for all of them."""
        return self.weights[0][0]


def frozen(node: Node) -> list[FrozenWeights] | None:
    """The frozen weights that a call reads.

    Args:
        node: of a joint graph, any.

    Returns:
        One for each matrix product of an adapted linear or MLP, or of its backward (an MLP has two: gate|up, and down); None for other nodes.
    """
    args = _arguments(node)
    if args is None:
        return None
    columns, dtype = args["x"].meta["val"].shape[-1], args["x"].meta["val"].dtype
    weights = [_source(weight) for weight in args["weights"]] if args.get("weights") else _packed(args, columns, dtype)

    def product(part: slice, width: int) -> FrozenWeights:
        return FrozenWeights(tuple(weights[part]), *(tuple(args[name][part]) for name in ("a", "b", "scales")), width)

    return (
        [product(WIDE, columns), product(DOWN, args["rows"][0])] if _is_mlp(node) else [product(slice(None), columns)]
    )


def on_matrices(node: Node, matrices: Sequence[Node]) -> tuple[Any, tuple]:
    """The same call, on matrices in which the weights stand beside their adapters.

    Args:
        node: one for which `frozen` is not None.
        matrices: with room, as `lora_linear` describes them: one for each of its products.

    Returns:
        (target, arguments) of the new call.
    """
    args, op = _arguments(node), OPS[node.target]
    if op in (lora_linear_nf4, lora_linear_nf4.backward_op):
        op = lora_linear.backward_op if op is lora_linear_nf4.backward_op else lora_linear
    given = {**args, "weights": list(matrices)}
    if _is_mlp(node):
        given |= {name: [] for name in ("packed", "absmax", "code", "scale", "offset")}
    return op.overload, tuple(given[name] for name in op.parameters)


def _arguments(node: Node) -> dict[str, Any] | None:
    """By the names of the op's parameters."""
    op = OPS.get(node.target) if node.op == "call_function" else None
    known = (lora_linear, lora_linear_nf4, lora_mlp)
    return dict(zip(op.parameters, node.args)) if any(op in (one, one.backward_op) for one in known) else None


def _is_mlp(node: Node) -> bool:
    return OPS[node.target] in (lora_mlp, lora_mlp.backward_op)


def _source(weight: Node) -> tuple:
    return tuple(weight.args) if weight.target is dequantize_4bit.overload else (weight,)


def _packed(args: dict[str, Any], columns: int, dtype: Any) -> list[tuple]:
    blank = [None] * len(args["rows"])
    members = zip(
        args["packed"],
        args["absmax"],
        args["code"] or blank,
        args["scale"] or blank,
        args["offset"] or blank,
        args["rows"],
    )
    widths = [columns, columns, args["rows"][0]] if "activation" in args else [columns] * len(args["rows"])
    return [(*member, width, args["blocksize"], args["quant_type"], dtype) for member, width in zip(members, widths)]


def is_dense(product: FrozenWeights) -> bool:
    """Whether its weights are matrices of one dtype that a graph takes as they are."""
    weights = [weight[0] for weight in product.weights]
    if any(len(weight) > 1 for weight in product.weights) or any(weight.op != "placeholder" for weight in weights):
        return False
    values = [weight.meta["val"] for weight in weights]
    return all(
        value.dim() == 2 and value.is_floating_point() and value.is_contiguous() and value.dtype == values[0].dtype
        for value in values
    )
