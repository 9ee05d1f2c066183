"""What plans may recompute: the operations of a joint graph that they name."""

import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from tunecompile.planner.candidates import expensive_nodes, is_random


def test_what_draws_random_numbers_is_no_product_to_recompute():
    """Attention's kernels do, whose generator a second run would not find where it was."""
    traced = make_fx(lambda x, w: F.scaled_dot_product_attention(*[(x @ w)[None, None]] * 3), tracing_mode="fake")
    graph = traced(torch.ones(4, 8), torch.ones(8, 8)).graph
    assert [node.target for node in expensive_nodes(graph)] == [torch.ops.aten.mm.default]
    attention = [node for node in graph.nodes if "attention" in str(node.target)]
    assert len(attention) == 1 and is_random(attention[0])
    assert not any(is_random(node) for node in graph.nodes if node is not attention[0])
