"""Attention over sequences without padding: every sequence as dense attention gives it alone, and no other touches it."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tests.support.ops.checks import DTYPES, QUICK, assert_fake_is_real, error, tensor
from tunecompile.ops import varlen_attention


def offsets(lengths) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def inputs(lengths, heads=4, shared=2, dim=8, dtype=torch.float64, layout="contiguous"):
    total = sum(lengths)
    return [tensor((total, h, dim), layout, dtype) for h in (heads, shared, shared)]


def dense(q, k, v, lengths, scale, window) -> torch.Tensor:
    """Sequence by sequence, with torch's own attention."""
    parts = []
    for q1, k1, v1 in zip(*(x.split(list(lengths)) for x in (q, k, v))):
        places = torch.arange(q1.shape[0])
        distance = places[:, None] - places
        mask = (distance >= 0) & (distance < (window or q1.shape[0] + 1))
        k1, v1 = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k1, v1))
        parts.append(
            F.scaled_dot_product_attention(
                *(x.transpose(0, 1) for x in (q1, k1, v1)), attn_mask=mask, scale=scale
            ).transpose(0, 1)
        )
    return torch.cat(parts)


@pytest.mark.parametrize("lengths", [(3,), (1, 4), (2, 0, 1)])
@pytest.mark.parametrize("window", [0, 2])
def test_gradcheck(lengths, window):
    q, k, v = (x.requires_grad_() for x in inputs(lengths, dim=3))
    assert torch.autograd.gradcheck(
        lambda q, k, v: varlen_attention(q, k, v, offsets(lengths), max(lengths), 0.7, window)[0], (q, k, v)
    )


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(sum),
    heads=st.sampled_from([(1, 1), (4, 4), (6, 2)]),
    window=st.sampled_from([0, 1, 3, 20]),
    more=st.integers(0, 5),
    dtype=DTYPES,
    layout=st.sampled_from(["contiguous", "strided", "transposed"]),
)
@QUICK
def test_every_sequence_is_alone(lengths, heads, window, more, dtype, layout):
    torch.manual_seed(0)
    q, k, v = inputs(lengths, *heads, dtype=dtype, layout=layout)
    arguments = (offsets(lengths), max(lengths) + more, 0.4, window)
    assert_fake_is_real(varlen_attention, q, k, v, *arguments)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    got, logsumexp = varlen_attention(*leaves, *arguments)
    exact_leaves = [x.double().requires_grad_() for x in (q, k, v)]
    exact = dense(*exact_leaves, lengths, 0.4, window)
    grad = tensor(tuple(got.shape), dtype=dtype)
    assert got.dtype == dtype and logsumexp.shape == (heads[0], sum(lengths)) and logsumexp.dtype == torch.float32
    assert error(got, exact) < 4 * torch.finfo(dtype).eps
    assert_fake_is_real(varlen_attention.backward_op, grad, q, k, v, *arguments, got.detach(), logsumexp.detach())
    ours, wanted = torch.autograd.grad(got, leaves, grad), torch.autograd.grad(exact, exact_leaves, grad.double())
    for mine, right in zip(ours, wanted):
        assert mine.dtype == dtype and (mine.double() - right).norm() < 8 * torch.finfo(dtype).eps * max(
            w.norm() for w in wanted
        )


def test_opcheck():
    q, k, v = (x.requires_grad_() for x in inputs((3, 2), dtype=torch.float32))
    torch.library.opcheck(varlen_attention.overload, (q, k, v, offsets((3, 2)), 4, 0.5, 0))


def test_scores_far_apart():
    """A place without a token has some other token's logsumexp, from which its own score may be hundreds away."""
    torch.manual_seed(0)
    q, k, v = ((torch.randn(12, 2, 8) * s).requires_grad_() for s in (6, 6, 1))
    varlen_attention(q, k, v, torch.tensor([0, 4, 12, 12], dtype=torch.int32), 8, 1.0, 0)[0].sum().backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v))
