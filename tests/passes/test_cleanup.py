"""Concatenations of a tensor's own pieces go after lowering, where the tensor lies in memory as they would."""

import pytest
import torch

from tunecompile._torch.fake_tensors import make_fx
from tunecompile.compiler.pass_manager import Context
from tunecompile.passes import lower

aten = torch.ops.aten


def joined(x):
    """Cut, joined again, and read as rows."""
    return torch.cat([x[..., :3], x[..., 3:8]], -1).reshape(-1, 8) * 2


def split(x):
    return torch.cat(x.split([3, 5], -1), -1).reshape(-1, 8) * 2


def split_ahead(x):
    """Along the first dimension, as it is where none is given."""
    return torch.cat(x.split([1, 1])).reshape(-1, 8) * 2


def split_alike(x):
    return torch.cat(x.split(4, -1), -1).reshape(-1, 8) * 2


def joined_along_another(x):
    return torch.cat(x.split([4, 4], -1), 0).reshape(-1, 4) * 2


def in_another_order(x):
    return torch.cat([x[..., 4:], x[..., :4]], -1).reshape(-1, 8) * 2


def in_part(x):
    return torch.cat([x[..., :3], x[..., 3:7]], -1).reshape(-1, 7) * 2


DENSE, TURNED = torch.randn(2, 5, 8), torch.randn(2, 8, 5).transpose(1, 2)


def cleaned(run, x):
    """The graph of a function, behind the pass."""
    gm = make_fx(run, tracing_mode="fake")(x)
    lower.cleanup.PASS.run(gm.graph, Context("layer"))
    gm.recompile()
    return gm


@pytest.mark.parametrize(
    "run, x, left",
    [
        (joined, DENSE, 0),
        (split, DENSE, 0),
        (split_ahead, DENSE, 0),
        (split_alike, DENSE, 0),
        (joined_along_another, DENSE, 1),
        (in_another_order, DENSE, 1),
        (in_part, DENSE, 1),
        (joined, TURNED, 1),
    ],
)
def test_a_concatenation_of_own_pieces(run, x, left):
    """Views of the concatenation may be none of the tensor's: convolutions over tokens hand on transposed ones."""
    gm = cleaned(run, x)
    assert torch.equal(gm(x), run(x))
    assert sum(node.target is aten.cat.default for node in gm.graph.nodes) == left


def turned_and_back(x):
    return x.reshape(-1, 8).reshape(-1, 4).reshape(2, 5, 8) * 2


def turned_on(x):
    return x.reshape(-1, 8).reshape(-1, 4) * 2


def returned(x):
    """A caller that changes one result must not change two."""
    x = x * 2
    return x, x.reshape(-1).reshape(2, 5, 8)


@pytest.mark.parametrize(
    "run, x, left",
    [
        (turned_and_back, DENSE, 0),
        (turned_and_back, TURNED.contiguous(), 0),
        (turned_on, DENSE, 2),
        (returned, DENSE, 2),
    ],
)
def test_reshapes_that_cancel_out(run, x, left):
    gm = cleaned(run, x)
    torch.testing.assert_close(gm(x), run(x), rtol=0, atol=0)
    assert sum(node.target in (aten.view.default, aten._unsafe_view.default) for node in gm.graph.nodes) == left
