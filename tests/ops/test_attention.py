"""Attention over sequences without padding: every sequence as dense attention gives it alone, and no other touches it."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.ops.checks import DTYPES, QUICK, assert_fake_is_real, error, tensor
from tunecompile.ops import varlen_attention
from tunecompile.ops.attention import documents as attention


def offsets(lengths) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def inputs(lengths, heads=4, shared=2, dim=8, dtype=torch.float64, layout="contiguous"):
    total = sum(lengths)
    return [tensor((total, h, dim), layout, dtype) for h in (heads, shared, shared)]


def dense(q, k, v, lengths, scale, window, causal=True, softcap=0.0) -> torch.Tensor:
    """Sequence by sequence, with torch's own attention; written out under a cap."""
    parts = []
    for q1, k1, v1 in zip(*(x.split(list(lengths)) for x in (q, k, v))):
        places = torch.arange(q1.shape[0])
        distance = places[:, None] - places
        mask = ((distance >= 0) | (not causal)) & (distance.abs() < (window or q1.shape[0] + 1))
        k1, v1 = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k1, v1))
        if softcap:
            scores = torch.tanh(torch.einsum("qhd,khd->hqk", q1, k1) * scale / softcap) * softcap
            weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
            parts.append(torch.einsum("hqk,khd->qhd", weights, v1))
            continue
        parts.append(
            F.scaled_dot_product_attention(
                *(x.transpose(0, 1) for x in (q1, k1, v1)), attn_mask=mask, scale=scale
            ).transpose(0, 1)
        )
    return torch.cat(parts)


@pytest.mark.parametrize("lengths", [(3,), (1, 4), (2, 0, 1)])
@pytest.mark.parametrize(
    ("window", "causal", "softcap"), [(0, True, 0.0), (2, True, 0.0), (0, False, 0.0), (2, False, 0.0), (2, True, 0.8)]
)
def test_gradcheck(lengths, window, causal, softcap):
    q, k, v = (x.requires_grad_() for x in inputs(lengths, dim=3))
    rest = (offsets(lengths), max(lengths) + 1, 0.7, window, None, causal, softcap)
    assert torch.autograd.gradcheck(lambda q, k, v: varlen_attention(q, k, v, *rest)[0], (q, k, v))


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(sum),
    heads=st.sampled_from([(1, 1), (4, 4), (6, 2)]),
    window=st.sampled_from([0, 1, 3, 20]),
    causal=st.booleans(),
    more=st.integers(0, 5),
    dtype=DTYPES,
    layout=st.sampled_from(["contiguous", "strided", "transposed"]),
    softcap=st.sampled_from([0.0, 0.5, 30.0]),
)
@QUICK
def test_every_sequence_is_alone(lengths, heads, window, causal, more, dtype, layout, softcap):
    torch.manual_seed(0)
    q, k, v = inputs(lengths, *heads, dtype=dtype, layout=layout)
    arguments = (offsets(lengths), max(lengths) + more, 0.4, window, None, causal, softcap)
    assert_fake_is_real(varlen_attention, q, k, v, *arguments)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    got, logsumexp = varlen_attention(*leaves, *arguments)
    exact_leaves = [x.double().requires_grad_() for x in (q, k, v)]
    exact = dense(*exact_leaves, lengths, 0.4, window, causal, softcap)
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
    torch.library.opcheck(varlen_attention.overload, (q, k, v, offsets((3, 2)), 4, 0.5, 0, None, True, 0.0))


@pytest.mark.parametrize("causal", [True, False])
def test_scores_far_apart(causal):
    """A place without a token has some other token's logsumexp, from which its own score may be hundreds away."""
    torch.manual_seed(0)
    q, k, v = ((torch.randn(12, 2, 8) * s).requires_grad_() for s in (6, 6, 1))
    ends = torch.tensor([0, 4, 12, 12], dtype=torch.int32)
    varlen_attention(q, k, v, ends, 8, 1.0, 0, None, causal, 0.0)[0].sum().backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v))


def written_out(q, k, v, sinks, lengths, scale, window):
    """Sequence by sequence, with the sink as one more column of the softmax, as gpt-oss writes it."""
    parts = []
    for q1, k1, v1 in zip(*(x.split(list(lengths)) for x in (q, k, v))):
        k1, v1 = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k1, v1))
        scores = torch.einsum("qhd,khd->hqk", q1, k1) * scale
        distance = torch.arange(len(q1))[:, None] - torch.arange(len(q1))
        seen = (distance >= 0) & (distance < (window or len(q1) + 1))
        column = sinks[:, None, None].expand(-1, len(q1), 1)
        weights = torch.cat([scores.masked_fill(~seen, float("-inf")), column], -1).softmax(-1)[..., :-1]
        parts.append(torch.einsum("hqk,khd->qhd", weights, v1))
    return torch.cat(parts)


@pytest.mark.parametrize("lengths", [(3, 1), (1, 0, 5)])
@pytest.mark.parametrize("window", [0, 2])
def test_sinks(lengths, window):
    torch.manual_seed(0)
    leaves = [*inputs(lengths, dim=3), torch.tensor([0.0, 30.0, -30.0, 2.0], dtype=torch.float64)]
    ours, theirs = ([x.clone().requires_grad_() for x in leaves] for _ in range(2))
    got = varlen_attention(*ours[:3], offsets(lengths), max(lengths), 0.7, window, ours[3], True, 0.0)[0]
    exact = written_out(*theirs, lengths, 0.7, window)
    torch.testing.assert_close(got, exact, rtol=1e-12, atol=1e-12)
    grad = torch.randn_like(got)
    for mine, right in zip(torch.autograd.grad(got, ours, grad), torch.autograd.grad(exact, theirs, grad)):
        torch.testing.assert_close(mine, right, rtol=1e-11, atol=1e-12)


def test_tracing_runs_none_of_its_code(monkeypatch):
    """Shapes are known without it, and on a CPU it is one call in a layer's graph: its steps are most of a trace."""
    monkeypatch.setattr(attention, "Places", None)
    with FakeTensorMode() as mode:
        q, k, v, *rest = (mode.from_tensor(x) for x in (*inputs((3, 2)), offsets((3, 2)), torch.randn(4)))
        arguments = (rest[0], 3, 0.5, 0, rest[1], True, 0.0)
        out, logsumexp = varlen_attention(q, k, v, *arguments)
        gradients = varlen_attention.backward_op(out, q, k, v, *arguments, out, logsumexp)
    assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape, (4,)]
    assert varlen_attention.opaque and varlen_attention.backward_op.opaque
