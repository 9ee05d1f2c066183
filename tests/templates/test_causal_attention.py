"""Causal attention in blocks of queries against fp64: blocks that end within a row, rows and heads one by one."""

import importlib

import pytest
import torch

pytest.importorskip("triton")
from tunecompile.ops import causal_attention as reference  # noqa: E402
from tunecompile.templates.attention import causal_softmax as template  # noqa: E402

family = importlib.import_module("tunecompile.ops.attention.causal")  # a name that is the op's as well


def make(shape, device, dtype, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def compare(device, error, limit, rows, length, heads, shared, width, dtype, scale=0.2):
    """Heads are inside tokens, as projections make them; of the gradient, every second column of a wider tensor."""
    q = make((rows, length, heads, width), device, dtype, 0).transpose(1, 2)
    grad = make((rows, length, heads, 2 * width), device, dtype, 1).transpose(1, 2)[..., ::2]
    k, v = (make((rows, length, shared, width), device, dtype, seed).transpose(1, 2) for seed in (2, 3))
    exact = [x.double() for x in (q, k, v)]
    out, logsumexp = family.causal_attention_in_blocks(q, k, v, scale)
    got = family.causal_attention_in_blocks_backward(grad, q, k, v, scale, out, logsumexp)
    wanted, sums = reference.reference(*exact, scale)
    gradients = reference.backward_op.reference(grad.double(), *exact, scale, wanted, sums)
    assert out.dtype == dtype and logsumexp.dtype == torch.float32 and logsumexp.is_contiguous()
    for mine, right in zip((out, *got, logsumexp), (wanted, *gradients, sums)):
        assert error(mine, right) < limit
    assert all(each.transpose(1, 2).is_contiguous() for each in (out, *got))


@pytest.mark.parametrize(
    "scores, queries, heads, shared",
    [(1 << 25, 1024, 2, 2), (1 << 25, 4, 4, 2), (90, 3, 4, 2), (90, 3, 2, 2), (1, 7, 3, 1)],
)
def test_against_fp64(monkeypatch, device, error, scores, queries, heads, shared):
    """All at once, in blocks, in some of the rows and heads, and in one of each with fewer queries."""
    monkeypatch.setattr(family, "SCORES", scores)
    monkeypatch.setattr(family, "QUERIES", queries)
    monkeypatch.setattr(family, "ROWS", 2)
    compare(device, error, 1e-6, 2, 10, heads, shared, 16, torch.float32)


def test_rows_longer_than_a_program_reads(monkeypatch, device, error):
    monkeypatch.setattr(template, "BLOCK", 16)
    monkeypatch.setattr(family, "QUERIES", 12)
    compare(device, error, 1e-6, 1, 37, 2, 1, 16, torch.float32)


def test_half_precision(device, error):
    compare(device, error, 2e-3, 1, 40, 2, 1, 32, torch.float16)


def test_scores_far_apart(device):
    """A token that sees itself alone, and scores of hundreds."""
    q, k, v = (make((1, 1, 20, 16), device, torch.float32, seed) * 30 for seed in range(3))
    out, logsumexp = family.causal_attention_in_blocks(q, k, v, 1.0)
    made = family.causal_attention_in_blocks_backward(v, q, k, v, 1.0, out, logsumexp)
    assert all(torch.isfinite(x).all() for x in (out, logsumexp, *made)) and torch.equal(out[:, :, 0], v[:, :, 0])


@pytest.mark.gpu
@pytest.mark.parametrize("rows, length, heads, shared", [(2, 1500, 4, 2), (1, 2049, 2, 2), (3, 300, 4, 1)])
def test_real_size(gpu_only, device, error, rows, length, heads, shared):
    compare(device, error, 8e-3, rows, length, heads, shared, 512, torch.bfloat16, scale=512**-0.5)
