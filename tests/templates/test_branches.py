"""Attention in a tree of documents against fp64, row by row."""

import pytest
import torch

pytest.importorskip("triton")
from tests.support.trees import TREE, dense, tree_of  # noqa: E402
from tunecompile.templates import attention  # noqa: E402


def compare(device, error, limit, nodes, heads, shared, width, window, softcap, dtype, scale=0.2):
    total = sum(length for _, length in nodes)
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(total, n, width, generator=generator).to(device, dtype) for n in (heads, shared, shared, heads)
    )
    offsets, tree, places = tree_of(nodes, device)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    exact, sums = dense(*leaves, nodes, scale, window, softcap)
    wanted = torch.autograd.grad(exact, leaves, grad.double())
    rest = (offsets, max(length for _, length in nodes) + 3, scale, window, softcap)
    out, logsumexp = attention.forward(q, k, v, *rest, tree=tree, places=places)
    delta = (grad.float() * out.float()).sum(-1).t().contiguous()

    def gradients():
        return attention.backward(grad, q, k, v, logsumexp, delta, *rest, tree=tree, places=places)

    got = gradients()
    for mine, right in zip((out, logsumexp, *got), (exact, sums, *wanted)):
        assert error(mine, right) < limit
    assert all(map(torch.equal, got, gradients())), "sums in another order"


@pytest.mark.parametrize("window, softcap, shared", [(0, 0.0, 2), (7, 0.0, 1), (0, 2.0, 1)])
def test_against_fp64(device, error, window, softcap, shared):
    compare(device, error, 3e-6, TREE, 2, shared, 16, window, softcap, torch.float32)


def test_of_another_shape(device):
    q = torch.zeros(5, 1, 16, device=device)
    offsets, tree, places = tree_of(((-1, 2), (0, 3)), device)
    with pytest.raises(ValueError, match="tree"):
        attention.forward(q, q, q, offsets, 3, 1.0, tree=tree[:, :1].contiguous(), places=places)
    with pytest.raises(ValueError, match="contiguous"):
        attention.forward(q, q, q, offsets, 3, 1.0, tree=tree.t().contiguous().t(), places=places)


@pytest.mark.gpu
@pytest.mark.parametrize("width, shared, window, softcap", [(128, 1, 0, 0.0), (128, 4, 300, 5.0), (512, 1, 0, 0.0)])
def test_real_size(gpu_only, device, error, width, shared, window, softcap):
    nodes = ((-1, 1000), (0, 300), (0, 700), (2, 129), (2, 1), (-1, 128))
    compare(device, error, 8e-3, nodes, 4, shared, width, window, softcap, torch.bfloat16, scale=width**-0.5)
