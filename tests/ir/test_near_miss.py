"""How a near miss is told: small graphs, without Dynamo."""

import torch
import torch.nn.functional as F

from tunecompile.ir.canonicalize import canonicalize_graph
from tunecompile.ir.match import Pattern
from tunecompile.ir.near_miss import near_misses


def graph(fn):
    made = torch.fx.symbolic_trace(fn).graph
    canonicalize_graph(made)
    return made


def test_what_is_found_in_the_place_of_a_call_is_shown_with_its_reader():
    """An input or a constant alone says little; a call in the place of an input would be one of any kind."""
    pattern = Pattern.trace(lambda x, y: F.silu(x) * torch.cos(y))
    for fn, found in ((lambda a, b: F.silu(a) * b, "b"), (lambda a, b: F.silu(a) * 3.0, "3.0")):
        made = graph(fn)
        (anchor,) = made.find_nodes(op="call_function", target=F.silu)
        (reason,) = near_misses([pattern], [anchor]).values()
        assert f"expected mul(silu(...), cos(...)), found mul(silu(...), {found})" in reason
    pattern = Pattern.trace(lambda x: F.silu(x) * 2.0)
    made = graph(lambda a, b: F.silu(a) * torch.cos(b))
    (reason,) = near_misses([pattern], made.find_nodes(op="call_function", target=F.silu)).values()
    assert "expected mul(silu(...), 2.0), found mul(silu(...), cos(...))" in reason
