"""Squared ReLU, the activation of Primer (https://arxiv.org/abs/2109.08668) and Nemotron: what its backward needs is its input alone."""

import operator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

from tunecompile import Cost, Example, Pass, op, recognize, refuse_gpu, rewrite, tensor_bytes


@op(cost=Cost.POINTWISE)
def squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


@squared_relu.backward(saves=("x",), gives=("x",))
def squared_relu_backward(grad: Tensor, x: Tensor) -> list[Tensor]:
    return [torch.where(x <= 0, 0, grad * (2 * x))]


def _refuse(x: Tensor) -> str | None:
    return refuse_gpu(x) or (None if x.is_contiguous() else "elements do not lie side by side")


@squared_relu.provider("triton", refuses=_refuse, because="both steps in one kernel")
def _(x):
    from squared_relu import kernel

    return kernel.forward(x)


@rewrite("power", to=lambda x: squared_relu(x))
def power(x):
    return F.relu(x).square()  # or torch.pow(F.relu(x), 2), or F.relu(x) ** 2: one spelling to the matcher


@rewrite("product", to=lambda x: squared_relu(x))
def product(x):
    return F.relu(x) * F.relu(x)


def squares(graph):
    return [
        node
        for node in graph.nodes
        if node.target in (operator.pow, operator.mul) and getattr(node.args[0], "target", None) is F.relu
    ]


def count(graph, context):
    """What the plan saves by them, for the report."""
    again = [
        node
        for node in graph.nodes
        if node.target is squared_relu.overload and node.meta.get("recompute") is CheckpointPolicy.MUST_RECOMPUTE
    ]
    if again:
        mib = sum(tensor_bytes(node.meta["val"]) for node in again) / 2**20
        context.notes.append(
            f"{len(again)} squared ReLUs of {context.region} are computed again in the backward: {mib:.2f} MiB a layer are not saved"
        )


PASSES = [
    recognize("squared_relu", [power, product], squares),
    Pass("squared_relu_bytes", "plan", count, requires=frozenset({"squared_relu", "remat"})),
]

EXAMPLES = [
    Example(lambda x: F.relu(x).square(), lambda dtype: [torch.randn(3, 5, dtype=dtype, requires_grad=True)], "power"),
    Example(
        lambda x: F.relu(x) * F.relu(x),
        lambda dtype: [torch.randn(5, 3, dtype=dtype).t().requires_grad_()],
        "product, transposed",
    ),
]
