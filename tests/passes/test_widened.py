"""A norm's backward reads the gradient in half precision where autocast has widened it, and nothing else changes."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Graph

from tests.support.autocast import norms_as_on_a_gpu
from tests.support.passes.run import results
from tunecompile.compiler.backend import Backend
from tunecompile.compiler.pass_manager import Context, Pass
from tunecompile.ops import modulated_norm, rms_norm
from tunecompile.passes import PIPELINE, plan

BF16, FP32 = torch.bfloat16, torch.float32


def layer(x, weight, bias, out):
    return F.linear(F.layer_norm(x, x.shape[-1:], weight, bias), out)


def adaptive(x, scale, shift, out):
    normed = F.layer_norm(x, x.shape[-1:])
    return F.linear(normed * (1 + scale[:, None]) + shift[:, None], out)


@pytest.mark.parametrize("fn, leading", [(layer, ()), (adaptive, (2,))])
def test_gradients_that_autocast_widened(fn, leading):
    torch.manual_seed(0)
    x, out = torch.randn(2, 5, 16).to(BF16).requires_grad_(), torch.randn(4, 16).to(BF16)
    args = (x, *(torch.randn(*leading, 16).to(BF16).requires_grad_() for _ in range(2)), out)
    seen: list[torch.dtype] = []

    def look(graph: Graph, context: Context) -> None:
        found = [n for n in graph.nodes if "norm_backward" in str(n.target)]
        seen.extend(node.args[0].meta["val"].dtype for node in found)

    def run(passes=None):
        torch._dynamo.reset()
        with norms_as_on_a_gpu(), torch.autocast("cpu", BF16):
            compiled = fn if passes is None else torch.compile(fn, backend=Backend("test", passes, "eager"))
            return results(compiled, args)

    place = PIPELINE.index(plan.tile.PASS)
    narrowed, wide = (
        run(
            [
                *(p for p in PIPELINE[:place] if p is not plan.widened.PASS or keep),
                Pass("look", "plan", look),
                *PIPELINE[place:],
            ]
        )
        for keep in (True, False)
    )
    assert seen == [BF16, FP32]
    assert all(torch.equal(a, b) for a, b in zip(narrowed[0], wide[0]))
    assert all(b is None or torch.equal(a, b) for a, b in zip(narrowed[1], wide[1]))


def test_other_casts_stay():
    graph = Graph()
    given = [graph.placeholder(name) for name in ("half", "wide")]
    for node, dtype in zip(given, (torch.float16, FP32)):
        node.meta["val"] = torch.empty(2, 8, dtype=dtype)
    cast = torch.ops.prims.convert_element_type.default
    casts = [graph.call_function(cast, (given[0], BF16)), graph.call_function(cast, (given[1], BF16))]
    calls = [
        graph.call_function(rms_norm.backward_op.overload, (node, given[1], given[1], 1e-5, 0.0, False))
        for node in casts
    ]
    for node in casts:
        node.meta["val"] = torch.empty(2, 8, dtype=BF16)
    graph.output(tuple(graph.call_function(operator.getitem, (call, 0)) for call in calls))
    plan.widened.PASS.run(graph, Context("test"))
    assert [call.args[0] for call in calls] == casts
    assert modulated_norm.backward_op.widens == ("grad",)
