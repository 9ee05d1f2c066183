"""Attention in a tree of documents: every row as it is alone, with its prefix."""

import pytest
import torch

from tests.support.ops.checks import assert_fake_is_real, error, tensor
from tests.support.trees import TREE, dense, tree_of
from tunecompile.ops import branch_attention, document_mask

SMALL = ((-1, 3), (0, 2), (0, 4), (2, 1), (-1, 2))


def call(nodes, window=0, sinks=None, softcap=0.0, dtype=torch.float64, heads=(4, 2), width=8):
    total = sum(length for _, length in nodes)
    torch.manual_seed(0)
    q, k, v = (tensor((total, n, width), dtype=dtype) for n in (heads[0], heads[1], heads[1]))
    offsets, tree, places = tree_of(nodes)
    return [q, k, v], (offsets, max(length for _, length in nodes), tree, places, 0.4, window, sinks, softcap)


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (2, 0.8)])
def test_gradcheck(window, softcap):
    leaves, rest = call(SMALL, window, tensor((2,), dtype=torch.float64), softcap, heads=(2, 1), width=3)
    leaves = [x.requires_grad_() for x in (*leaves, rest[6])]

    def run(q, k, v, sinks):
        return branch_attention(q, k, v, *rest[:6], sinks, softcap)[0]

    assert torch.autograd.gradcheck(run, tuple(leaves))


@pytest.mark.parametrize(("window", "softcap", "with_sinks"), [(0, 0.0, False), (7, 0.0, True), (0, 2.0, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_alone(window, softcap, with_sinks, dtype):
    sinks = tensor((4,), dtype=dtype) if with_sinks else None
    leaves, rest = call(TREE, window, sinks, softcap, dtype)
    leaves = [x.requires_grad_() for x in leaves]
    exact_leaves = [x.detach().double().requires_grad_() for x in leaves]
    exact, _ = dense(*exact_leaves, TREE, 0.4, window, softcap, None if sinks is None else sinks.double())
    assert_fake_is_real(branch_attention, *leaves, *rest)
    got, logsumexp = branch_attention(*leaves, *rest)
    grad = tensor(tuple(got.shape), dtype=dtype)
    assert_fake_is_real(branch_attention.backward_op, grad, *leaves, *rest, got.detach(), logsumexp.detach())
    assert error(got, exact) < 4 * torch.finfo(dtype).eps
    wanted = torch.autograd.grad(exact, exact_leaves, grad.double())
    for mine, right in zip(torch.autograd.grad(got, leaves, grad), wanted):
        limit = 8 * torch.finfo(dtype).eps * max(w.norm() for w in wanted)
        assert mine.dtype == dtype and (mine.double() - right).norm() < limit


def test_opcheck():
    leaves, rest = call(SMALL, 2, None, 0.0, torch.float32)
    torch.library.opcheck(branch_attention.overload, (*(x.requires_grad_() for x in leaves), *rest))


def test_the_mask_of_documents_that_no_other_goes_on_from():
    offsets, tree, places = tree_of(((-1, 3), (-1, 2), (-1, 4)))
    for window in (0, 2):
        masks = [document_mask(offsets, 4, 9, window, True, *given) for given in ((), (tree, places))]
        assert torch.equal(*masks)
