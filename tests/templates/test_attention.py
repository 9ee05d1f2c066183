"""Attention over documents against fp64: soft-caps, windows, heads of odd and great width, shared keys."""

import pytest
import torch

pytest.importorskip("triton")
from tests.support.trees import dense  # noqa: E402
from tunecompile.ops import dropout_attention, varlen_attention  # noqa: E402
from tunecompile.templates import attention  # noqa: E402
from tunecompile.templates._tiles import Tile  # noqa: E402


def make(shape, device, dtype, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def compare(device, error, limit, lengths, heads, shared, width, window, softcap, dtype, tile=None, scale=0.2):
    """Columns of q and the gradient are every second of a wider tensor's first half, in memory."""
    total = sum(lengths)
    q, grad = (make((total, heads, 2 * width), device, dtype, seed)[..., :width] for seed in (0, 1))
    k, v = (make((total, shared, width), device, dtype, seed) for seed in (2, 3))
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    exact, sums = dense(*leaves, [(-1, length) for length in lengths], scale, window, softcap)
    wanted = torch.autograd.grad(exact, leaves, grad.double())
    rest = (offsets, max(lengths) + 3, scale, window, softcap)
    out, logsumexp = attention.forward(q, k, v, *rest, tile=tile)
    delta = (grad.float() * out.float()).sum(-1).t().contiguous()
    got = attention.backward(grad, q, k, v, logsumexp, delta, *rest, tile=tile)
    assert out.dtype == dtype and logsumexp.dtype == torch.float32
    for mine, right in zip((out, logsumexp, *got), (exact, sums, *wanted)):
        assert mine.is_contiguous() and error(mine, right) < limit


@pytest.mark.parametrize(
    "lengths, heads, shared, width, window, softcap",
    [((5, 0, 1, 70), 4, 2, 16, 0, 2.0), ((5, 0, 1, 70), 2, 2, 80, 7, 0.0)],
)
def test_against_fp64(device, error, lengths, heads, shared, width, window, softcap):
    limit = 1e-8 * max(width, 200)  # eager in fp32: 8e-7 at heads of 512
    compare(device, error, limit, lengths, heads, shared, width, window, softcap, torch.float32)


def compare_dropout(device, error, limit, lengths, heads, shared, width, window, causal, dropout, dtype):
    """Weights that are dropped are those of the op in plain PyTorch, in both passes."""
    total = sum(lengths)
    q, grad = (make((total, heads, width), device, dtype, seed) for seed in (0, 1))
    k, v = (make((total, shared, width), device, dtype, seed) for seed in (2, 3))
    where = torch.tensor([0, *lengths], device=device).cumsum(0).int(), max(lengths) + 3, 0.2, window
    dropped = dropout, torch.tensor([2**40 + 7], device=device)
    wide = [x.double() for x in (q, k, v)]
    exact = dropout_attention.reference(*wide, *where, causal, *dropped)
    wanted = dropout_attention.backward_op.reference(grad.double(), *wide, *where, causal, *dropped, *exact)
    out, logsumexp = attention.forward(q, k, v, *where, causal=causal, dropped=dropped)
    delta = (grad.float() * out.float()).sum(-1).t().contiguous()
    got = attention.backward(grad, q, k, v, logsumexp, delta, *where, causal=causal, dropped=dropped)
    for mine, right in zip((out, logsumexp, *got), (*exact, *wanted)):
        assert mine.is_contiguous() and error(mine, right) < limit


@pytest.mark.parametrize("window, causal, dropout", [(0, False, 0.3), (7, True, 0.3), (20, False, 0.3)])
def test_dropped_weights(device, error, window, causal, dropout):
    compare_dropout(device, error, 2e-6, (5, 0, 1, 70), 4, 2, 16, window, causal, dropout, torch.float32)


def compare_both_ways(device, error, limit, lengths, shared, width, window, softcap, dtype):
    """The provider of documents that are not causal, as of images' patches, against the op in plain PyTorch."""
    q, k, v = (make((sum(lengths), heads, width), device, dtype, i) for i, heads in enumerate((4, shared, shared)))
    sinks, offsets = make((4,), device, dtype, 3), torch.tensor([0, *lengths], device=device).cumsum(0).int()
    rest = (offsets, max(lengths) + 3, 0.2, window, sinks, False, softcap)
    wide = (*(x.double() for x in (q, k, v)), *rest)
    exact = varlen_attention.reference(*wide)
    wanted = varlen_attention.backward_op.reference(exact[0], *wide, *exact)
    forward, backward = (
        next(p.run for p in op.providers if p.name == "triton")
        for op in (varlen_attention, varlen_attention.backward_op)
    )
    made = forward(q, k, v, *rest)
    got = backward(exact[0].to(dtype), q, k, v, *rest, *made)
    for mine, right in zip((*made, *got), (*exact, *wanted)):
        assert error(mine, right) < limit


@pytest.mark.parametrize("window, softcap", [(0, 0.0), (20, 2.0)])
def test_all_of_a_document(device, error, window, softcap):
    compare_both_ways(device, error, 2e-6, (5, 0, 1, 70), 2, 16, window, softcap, torch.float32)


def test_half_precision_in_chunks_and_slices(device, error):
    """A head wider than a chunk, and than a slice: scores are sums over chunks, results are written in parts."""
    tile = Tile(64, rows=64, num_warps=4, num_stages=1, step=64)
    compare(device, error, 2e-3, (70,), 2, 1, 320, 20, 5.0, torch.float16, tile)


def test_scores_far_apart(device):
    """A token that sees itself alone, and scores of hundreds."""
    q, k, v = (make((66, 1, 16), device, torch.float32, seed) * 30 for seed in range(3))
    out, logsumexp = attention.forward(q, k, v, torch.tensor([0, 66], device=device).int(), 66, 1.0)
    assert torch.isfinite(out).all() and torch.isfinite(logsumexp).all() and torch.equal(out[0], v[0])


def test_shapes_that_do_not_fit(device):
    q, k = make((4, 3, 16), device, torch.float32, 0), make((4, 2, 16), device, torch.float32, 1)
    with pytest.raises(ValueError, match="queries"):
        attention.forward(q, k, k, torch.tensor([0, 4], device=device).int(), 4, 1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("width, shared, window, softcap", [(256, 2, 0, 50.0), (128, 4, 100, 5.0), (512, 1, 0, 0.0)])
def test_real_size(gpu_only, device, error, width, shared, window, softcap):
    lengths, scale = (1000, 1, 300), width**-0.5
    compare(device, error, 8e-3, lengths, 4, shared, width, window, softcap, torch.bfloat16, scale=scale)


@pytest.mark.gpu
@pytest.mark.parametrize("width, shared, causal", [(64, 4, False), (128, 2, True)])
def test_real_size_of_dropped_weights(gpu_only, device, error, width, shared, causal):
    compare_dropout(device, error, 8e-3, (300, 1, 64, 500), 4, shared, width, 0, causal, 0.1, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("width, shared, window, softcap", [(72, 4, 0, 0.0), (512, 1, 0, 0.0), (128, 2, 100, 5.0)])
def test_real_size_of_all_of_a_document(gpu_only, device, error, width, shared, window, softcap):
    compare_both_ways(device, error, 8e-3, (1000, 1, 300), shared, width, window, softcap, torch.bfloat16)
