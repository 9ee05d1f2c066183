"""GELU written out, by tanh or erf, is torch's function: rounded once, and what other passes look for.

(Hendrycks & Gimpel, 2016, arXiv:1606.08415.)"""

import math
import operator

import torch
import torch.nn.functional as F

from tunecompile.compiler.pass_manager import recognize
from tunecompile.ir.match import Match
from tunecompile.ir.rewrite import rewrite
from tunecompile.ops.swiglu import GELU_TANH

__all__ = ["PASS"]


def _constants(**expected: float):
    """Return a guard: constants are those of GELU to seven digits, as some write them."""

    def where(match: Match) -> str | None:
        pairs = ((match.bound[name], number) for name, number in expected.items())
        near = all(isinstance(given, float) and math.isclose(given, number, rel_tol=1e-7) for given, number in pairs)
        return None if near else "its constants are not those of GELU"

    return where


_BY_TANH = _constants(root=GELU_TANH[0], cubic=GELU_TANH[1])


@rewrite("gelu_by_tanh", to=lambda x: F.gelu(x, approximate="tanh"), where=_BY_TANH)
def by_tanh(x, root, cubic):
    return 0.5 * x * (1 + torch.tanh(root * (x + cubic * torch.pow(x, 3))))


@rewrite("gelu_by_tanh_factored", to=lambda x: F.gelu(x, approximate="tanh"), where=_BY_TANH)
def by_tanh_factored(x, root, cubic):
    return 0.5 * x * (1 + torch.tanh(x * root * (1 + cubic * x * x)))


@rewrite("gelu_by_erf", to=lambda x: F.gelu(x), where=_constants(root=math.sqrt(2)))  # noqa: PLW0108
def by_erf(x, root):
    return 0.5 * x * (1 + torch.erf(x / root))


def anchors(graph):
    """Each tanh or erf to which 1 is added."""
    found = [node for node in graph.nodes if node.target in (torch.tanh, torch.erf)]
    return [node for node in found if any(u.target is operator.add and 1 in u.args for u in node.users)]


PASS = recognize("gelu", [by_tanh, by_tanh_factored, by_erf], anchors)
