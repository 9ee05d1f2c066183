"""Causal attention of whole rows: as dense attention gives it, and so in blocks of queries, whatever their size."""

from contextlib import nullcontext
from importlib import import_module

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
from tunecompile.ops.attention.causal import Blocks

op_module = import_module("tunecompile.ir.op")  # the package shows the function of that name


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
    forth, back = (node for node in graph.nodes if node.target in OPS)
    assert [OPS[node.target].name for node in (forth, back)] == [
        f"causal_attention_in_blocks{x}" for x in ("", "_backward")
    ]
    given = [*graph.find_nodes(op="placeholder")]
    assert [*forth.args] == [*given, 0.5] and [*back.args[1:5]] == [*given, 0.5] and back.args[0] is back.args[5]


@pytest.mark.parametrize(
    "card, dtypes, code",
    [
        ("h100", [torch.bfloat16] * 3, None),
        ("h100", [torch.float32] * 3, "not-half-precision"),
        ("h100", [torch.float16, torch.float16, torch.bfloat16], "dtypes-differ"),
        ("t4", [torch.float16] * 3, "gpu-before-ampere"),
        (None, [torch.bfloat16] * 3, "not-on-gpu"),
    ],
)
def test_where_blocks_are_refused(card, dtypes, code, monkeypatch):
    q, k, v = (x.to(dtype) for x, dtype in zip(inputs(dtype=torch.float32), dtypes))
    calls = (causal_attention, (q, k, v, 0.5)), (causal_attention.backward_op, (q, q, k, v, 0.5, q, q))
    with as_on_gpu(card) if card else nullcontext():
        for op, operands in calls:
            reason = op.refusals(operands, None).get("blocks")
            assert (reason and reason.code) == code
        monkeypatch.setattr(op_module, "has_triton", lambda: False)
        assert code or {op.refusals(operands, None)["blocks"].code for op, operands in calls} == {"no-triton"}


def test_what_is_in_memory_beside_results():
    """Of 16 heads and 8 of keys, a row: scores and their softmax, queries, keys and values of one block; in the
    backward twice the first two, and the sums of two gradients, in fp32 and as they are returned."""
    q, k = (torch.empty(4, n, 2048, 512, device="meta", dtype=torch.bfloat16) for n in (16, 8))
    scores, row = 16 * 1024 * 2048, 8 * 2048 * 512
    assert causal_attention.room(q, k, k, 0.5) == scores * 6 + 3 * row * 2
    assert causal_attention.backward_op.room(q, q, k, k, 0.5, q, q) == 2 * scores * 6 + 2 * row * 6
    q, k = q[:1, :, :512], k[:1, :, :512]  # fewer rows than there is room for
    assert Blocks.of(q, k).rows > 1
    assert causal_attention.room(q, k, k, 0.5) == 16 * 512**2 * 6 + 3 * 8 * 512**2 * 2
    assert causal_attention.backward_op.room(q, q, k, k, 0.5, q, q) == 2 * (16 + 8) * 512**2 * 6


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
