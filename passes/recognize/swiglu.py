"""Gated activations: SwiGLU and GeGLU, whatever projections feed them."""

import operator

import torch
import torch.nn.functional as F

from tunecompile.compiler.pass_manager import recognize
from tunecompile.ir.canonicalize import value
from tunecompile.ir.match import Match
from tunecompile.ir.rewrite import rewrite
from tunecompile.ops import gated_activation as op

__all__ = ["PASS"]


def _same_shape(match: Match) -> str | None:
    gate, up = value(match.bound["gate"]), value(match.bound["up"])
    if not isinstance(up, torch.Tensor) or tuple(gate.shape) != tuple(up.shape):
        return "gate and up differ in shape"
    return None if gate.dtype == up.dtype else "gate and up differ in dtype"


@rewrite("silu", to=lambda gate, up: op(gate, up, "silu"), where=_same_shape)
def silu(gate, up):
    return F.silu(gate) * up


@rewrite("sigmoid", to=lambda gate, up: op(gate, up, "silu"), where=_same_shape)
def sigmoid(gate, up):
    return gate * torch.sigmoid(gate) * up


@rewrite("gelu_tanh", to=lambda gate, up: op(gate, up, "gelu_tanh"), where=_same_shape)
def gelu_tanh(gate, up):
    return F.gelu(gate, approximate="tanh") * up


@rewrite("gelu", to=lambda gate, up: op(gate, up, "gelu"), where=_same_shape)
def gelu(gate, up):
    return F.gelu(gate) * up


#: that no rewrite knows; where one is a gate, the report says so
_OTHERS = (F.relu, torch.relu, F.leaky_relu, F.elu, F.mish, F.hardswish)


def _is_gate(node):
    """Whether another tensor of the same shape is multiplied by it."""
    sides = [side for user in node.users if user.target is operator.mul for side in user.args if side is not node]
    return any(getattr(value(side), "shape", None) == value(node).shape for side in sides)


def anchors(graph):
    calls = [node for node in graph.nodes if node.op == "call_function"]
    return [node for node in calls if node.target in (F.silu, F.gelu) or (node.target in _OTHERS and _is_gate(node))]


PASS = recognize("swiglu", [silu, sigmoid, gelu_tanh, gelu], anchors)
