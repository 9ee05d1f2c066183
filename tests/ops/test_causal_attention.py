"""Causal attention of whole rows: as dense attention gives it, and so in blocks of queries, whatever their size."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.ops.checks import DTYPES, QUICK, assert_fake_is_real, error, tensor
from tunecompile._torch.fake_tensors import trace
from tunecompile.ir.op import OPS
from tunecompile.ir.pretend_gpu import as_on_gpu
from tunecompile.ops import causal_attention
from tunecompile.ops.causal_attention import Blocks


def inputs(rows=2, length=5, heads=4, shared=2, width=8, dtype=torch.float64, layout="contiguous"):
    return [tensor((rows, h, length, width), layout, dtype) for h in (heads, shared, shared)]


def dense(q, k, v, scale):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)


def test_gradcheck():
    q, k, v = (x.requires_grad_() for x in inputs(width=3))
    assert torch.autograd.gradcheck(lambda q, k, v: causal_attention(q, k, v, 0.7)[0], (q, k, v))


@given(
    rows=st.integers(1, 3),
    length=st.integers(1, 9),
    heads=st.sampled_from([(1, 1), (4, 4), (6, 2)]),
    dtype=DTYPES,
    layout=st.sampled_from(["contiguous", "strided", "transposed"]),
)
@QUICK
def test_as_dense_attention(rows, length, heads, dtype, layout):
    torch.manual_seed(0)
    q, k, v = inputs(rows, length, *heads, dtype=dtype, layout=layout)
    assert_fake_is_real(causal_attention, q, k, v, 0.4)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    got, logsumexp = causal_attention(*leaves, 0.4)
    exact_leaves = [x.double().requires_grad_() for x in (q, k, v)]
    exact = dense(*exact_leaves, 0.4)
    grad = tensor(tuple(got.shape), dtype=dtype)
    assert got.dtype == dtype and logsumexp.shape == q.shape[:3] and logsumexp.dtype == torch.float32
    assert got.transpose(1, 2).is_contiguous() and error(got, exact) < 4 * torch.finfo(dtype).eps
    assert_fake_is_real(causal_attention.backward_op, grad, q, k, v, 0.4, got.detach(), logsumexp.detach())
    ours, wanted = torch.autograd.grad(got, leaves, grad), torch.autograd.grad(exact, exact_leaves, grad.double())
    for mine, right in zip(ours, wanted):
        assert mine.dtype == dtype and (mine.double() - right).norm() < 8 * torch.finfo(dtype).eps * max(
            w.norm() for w in wanted
        )


def test_opcheck():
    q, k, v = (x.requires_grad_() for x in inputs(dtype=torch.float32))
    torch.library.opcheck(causal_attention.overload, (q, k, v, 0.5))


def test_on_a_gpu_it_is_one_call():
    """Whatever a row's length: that may be a symbol."""

    def forth_and_back(q, k, v):
        chosen = [each.choose((q, k, v, 0.5) if each is causal_attention else (q, q, k, v, 0.5, q, q)) for each in ops]
        assert [each.name for each in chosen] == ["blocks"] * 2
        out, logsumexp = chosen[0].run(q, k, v, 0.5)
        return chosen[1].run(out, q, k, v, 0.5, out, logsumexp)

    ops = causal_attention, causal_attention.backward_op
    with FakeTensorMode() as mode, as_on_gpu():
        operands = tuple(mode.from_tensor(x) for x in inputs(dtype=torch.bfloat16))
        graph = trace(forth_and_back, operands, mode).graph
    calls = [OPS[node.target].name for node in graph.nodes if node.target in OPS]
    assert calls == ["causal_attention_in_blocks", "causal_attention_in_blocks_backward"]
    assert all(not causal_attention.refusals((x, x, x, 0.5), None) == {} for x in inputs(dtype=torch.bfloat16))


@pytest.mark.parametrize(
    "rows, heads, shared, length, blocks",
    [
        (4, 16, 8, 2048, Blocks(1, 8, 1024)),
        (4, 8, 2, 2048, Blocks(2, 2, 1024)),
        (16, 8, 2, 512, Blocks(16, 2, 512)),
        (1, 16, 8, 32768, Blocks(1, 1, 512)),
        (1, 16, 8, 262144, Blocks(1, 1, 128)),
        (1, 1, 1, 1, Blocks(1 << 25, 1, 1)),
    ],
)
def test_scores_in_memory_are_bounded(rows, heads, shared, length, blocks):
    """But for the longest rows, of which 256 queries are worked on all the same."""
    q, k = (torch.empty(rows, n, length, 512, device="meta", dtype=torch.bfloat16) for n in (heads, shared))
    assert Blocks.of(q, k) == blocks
    parts = [(range(rows)[one], range(shared)[other]) for one, other in blocks.parts(k)]
    seen = [(row, head) for some, others in parts for row in some for head in others]
    assert seen == [(row, head) for row in range(rows) for head in range(shared)]
    largest = max(len(some) * len(others) for some, others in parts) * heads // shared * blocks.queries * length
    assert largest == blocks.scores(q, k) <= max(1 << 25, 256 * length)
    assert causal_attention.room(q, k, k) < causal_attention.backward_op.room(q, q, k, k)
