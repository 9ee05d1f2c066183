"""Gated activations, independent of the projections before them: SwiGLU, GeGLU and a clamped gate."""

import operator

import torch
import torch.nn.functional as F
from torch.fx import Node

from tunecompile.compiler.pass_manager import recognize
from tunecompile.ir.canonicalize import name_of, value
from tunecompile.ir.match import Match
from tunecompile.ir.rewrite import rewrite
from tunecompile.ops import clamped_gate
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


def _constants(match: Match) -> str | None:
    """Require that gate and up are clamped by constants limit and -limit, in one dtype."""
    numbers = [match.bound[name] for name in ("alpha", "limit", "least")]
    if not all(type(number) in (int, float) for number in numbers):
        return "alpha or the limit is not a constant"
    both = value(match.bound["both"])
    if numbers[2] != -numbers[1] or numbers[1] <= 0 or both.shape[-1] % 2:
        return "up is not clamped as gate is"
    return None if value(match.outputs[0]).dtype == both.dtype else "the result has another dtype"


@rewrite("clamped", to=lambda both, alpha, limit: clamped_gate(both, float(alpha), float(limit)), where=_constants)
def clamped(both, alpha, limit, least):
    gate = both[..., ::2].clamp(min=None, max=limit)
    up = both[..., 1::2].clamp(min=least, max=limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


#: activations without a rewrite; the report names them where one is a gate
_OTHERS = (F.relu, torch.relu, F.leaky_relu, F.elu, F.mish, F.hardswish)


def _is_gate(node):
    """Whether it multiplies another tensor of the same shape."""
    sides = [side for user in node.users if user.target is operator.mul for side in user.args if side is not node]
    return any(getattr(value(side), "shape", None) == value(node).shape for side in sides)


def _is_clamped(node):
    """Whether it is the sigmoid of a multiple of a clamped value."""
    (scaled,) = node.args
    sides = scaled.args if isinstance(scaled, Node) and scaled.target is operator.mul else ()
    return any(isinstance(side, Node) and side.target in (torch.clamp, "clamp") for side in sides)


def _is_silu(node):
    """Whether a gate's SiLU is written out with it, as `x * sigmoid(x)`."""
    products = [user for user in node.users if user.target is operator.mul]
    return any(node.args[0] in user.args and _multiplies(user) for user in products)


_STEPS = {"to", "view", "reshape", "contiguous", "dropout"}


def _multiplies(node):
    """Whether a tensor is multiplied by it or divided, also after a cast, a view, dropout or arithmetic with numbers.

    What does neither is the activation of an MLP without a gate.
    """
    for user in node.users:
        name, alone = name_of(user.target), all(side is node for side in user.all_input_nodes)
        if not alone and name in ("mul", "mul_", "div"):
            return True
        if (name in _STEPS or (alone and name in ("add", "sub", "mul", "div"))) and _multiplies(user):
            return True
    return False


def anchors(graph):
    calls = [node for node in graph.nodes if node.op == "call_function"]
    return [
        node
        for node in calls
        if (node.target in (F.silu, F.gelu) and _multiplies(node))
        or (node.target in _OTHERS and _is_gate(node))
        or (node.target is torch.sigmoid and (_is_clamped(node) or _is_silu(node)))
    ]


PASS = recognize("swiglu", [silu, sigmoid, gelu_tanh, gelu, clamped], anchors)
