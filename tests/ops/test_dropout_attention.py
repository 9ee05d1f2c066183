"""Attention whose weights have dropout: gradients, what is dropped, and how often."""

import pytest
import torch

from tests.support.ops.checks import assert_fake_is_real, tensor
from tunecompile.ops import dropout_attention, varlen_attention


def inputs(lengths, heads=4, shared=2, dim=3, dtype=torch.float64):
    q, k, v = (tensor((sum(lengths), h, dim), "contiguous", dtype) for h in (heads, shared, shared))
    return q, k, v, torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), max(lengths) + 1, 0.7


@pytest.mark.parametrize("lengths", [(3,), (1, 6), (2, 0, 1)])
@pytest.mark.parametrize("window, causal", [(0, True), (2, True), (2, False)])
def test_gradcheck(lengths, window, causal):
    q, k, v, *rest = inputs(lengths)
    rest = (*rest, window, causal, 0.4, torch.tensor([11]))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(lambda q, k, v: dropout_attention(q, k, v, *rest)[0], leaves)
    assert_fake_is_real(dropout_attention, q, k, v, *rest)
    torch.library.opcheck(dropout_attention.overload, (*leaves, *rest))


def weights_of(seed, lengths=(40, 61), heads=3, dropout=0.25, causal=False):
    """What weights are multiplied by, [heads, N, 61]: with values that are columns of the identity, results are weights."""
    total, width = sum(lengths), max(lengths)
    q, k = torch.zeros(total, heads, width), torch.zeros(total, heads, width)
    v = torch.cat([torch.eye(width)[:length] for length in lengths])[:, None].expand(-1, heads, -1)
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    got = dropout_attention(q, k, v, offsets, width, 1.0, 0, causal, dropout, torch.tensor([seed]))[0]
    plain = varlen_attention(q, k, v, offsets, width, 1.0, 0, None, causal, 0.0)[0]
    seen = plain.transpose(0, 1) > 0
    return (got / plain).transpose(0, 1)[seen], seen


def test_what_is_dropped():
    """A share of the weights, by each seed others, in each head and of each query others; the rest grow by it."""
    one, seen = weights_of(1)
    other, again = weights_of(2)[0], weights_of(1)[0]
    assert torch.equal(one, again) and set(one.mul(3).round().tolist()) == {0.0, 4.0}
    for factors in (one, other):
        assert abs(float((factors == 0).float().mean()) - 0.25) < 0.01  # of 15,963: its deviation is 0.0034
    both = ((one == 0) & (other == 0)).float().mean()
    assert abs(float(both) - 0.0625) < 0.01
    dropped = torch.zeros(seen.shape).masked_scatter(seen, (one == 0).float())[:, 40:]
    for left, right in (
        (dropped[0], dropped[1]),
        (dropped[:, 1:], dropped[:, :-1]),
        (dropped[..., 4:], dropped[..., :-4]),
    ):
        assert abs(float((left * right).mean()) - 0.0625) < 0.012


def test_nothing_is_dropped():
    q, k, v, *rest = inputs((3, 5))
    got = dropout_attention(q, k, v, *rest, 0, False, 0.0, torch.tensor([3]))
    for mine, right in zip(got, varlen_attention(q, k, v, *rest, 0, None, False, 0.0)):
        torch.testing.assert_close(mine, right)
