"""Small results of a call that is recomputed stay saved: what adapters project to, beside the linear's output."""

import pytest
import torch

from tunecompile._torch.fake_tensors import make_fx
from tunecompile.compiler.pass_manager import Context
from tunecompile.ops.lora import lora_linear
from tunecompile.passes import plan
from tunecompile.planner.solver import KEEP, Plan


def pinned(rank: int, followed: Plan) -> list[int]:
    """Which results of an adapted linear are."""

    def run(x, w, a, b):
        return lora_linear(x, [], [w], [], [a], [b], [1.0], torch.float32, "dense")

    given = torch.randn(16, 64), torch.randn(64, 64), torch.randn(rank, 64), torch.randn(64, rank)
    graph = make_fx(run, tracing_mode="fake")(*given).graph
    plan.remat.PASS.run(graph, Context("layer", followed))
    return [node.args[1] for node in graph.nodes if node.meta.get("pinned")]


@pytest.mark.parametrize(
    "rank, followed, found",
    [
        (4, Plan(frozenset({0})), [1]),
        (8, Plan(frozenset({0})), []),  # too large a share
        (4, Plan(frozenset()), []),  # the call is not recomputed
        (4, KEEP, []),
        (4, Plan(None), []),  # all is, as in a checkpoint
    ],
)
def test_small_results_of_a_recomputed_call(rank, followed, found):
    assert pinned(rank, followed) == found
