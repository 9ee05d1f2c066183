"""Rewriting of graphs: what a node is said to come from."""

import torch

from tunecompile.ir.rewrite import user_frame


def test_the_line_of_a_node_is_the_users():
    """Not that of a function of torch's into which Dynamo looked, as it does into `grouped_mm`."""
    node = torch.fx.Graph().placeholder("x")
    node.meta["stack_trace"] = (
        '  File "/lib/transformers/integrations/moe.py", line 12, in forward\n    out = grouped_mm(x)\n'
        '  File "/lib/torch/nn/functional.py", line 6741, in grouped_mm\n    return torch._grouped_mm(\n'
    )
    assert user_frame(node) == ("/lib/transformers/integrations/moe.py", "12", "out = grouped_mm(x)")
