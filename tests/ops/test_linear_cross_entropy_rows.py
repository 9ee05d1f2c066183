"""Each row's loss without logits: values of torch's own, gradients under any weights of the rows, whatever of the head is trained."""

import importlib

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tests.support.ops.checks import QUICK, assert_fake_is_real, error
from tests.support.ops.cross_entropy import OPTIONS, Largest, T, V, problem, sure
from tunecompile.ops import linear_cross_entropy_rows

module = importlib.import_module("tunecompile.ops.linear_cross_entropy")
TRAINED = [
    (1, 0, 0, 0, 0),
    (1, 1, 0, 0, 0),
    (0, 1, 0, 0, 0),
    (0, 0, 1, 0, 0),
    (1, 0, 0, 1, 1),
    (1, 1, 1, 1, 1),
]  #: hidden, weight, bias, inner, outer


@pytest.fixture(autouse=True)
def chunked(monkeypatch):
    monkeypatch.setattr(module, "chunk_rows", lambda vocabulary: 4)


def fused(hidden, weight, bias, inner, outer, labels, scale=1.0, softcap=0.0, ignore=-100, smoothing=0.0):
    trained = weight.requires_grad or (bias is not None and bias.requires_grad)
    return linear_cross_entropy_rows(
        hidden, weight, bias, inner, outer, labels, scale, softcap, ignore, smoothing, hidden.requires_grad, trained
    )[0]


def plain(hidden, weight, bias, inner, outer, labels, scale=1.0, softcap=0.0, ignore=-100, smoothing=0.0):
    logits = F.linear(hidden, weight, bias)
    logits = (logits if inner is None else logits + inner @ outer.t()).to(
        torch.promote_types(hidden.dtype, torch.float32)
    ) * scale
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    return F.cross_entropy(logits, labels, reduction="none", ignore_index=ignore, label_smoothing=smoothing)


def gradients(fn, tensors, trained, labels, weights, **options):
    """(losses, gradients of their sum under `weights`), None of what is not trained."""
    new = [None if t is None else t.detach().requires_grad_(bool(flag)) for t, flag in zip(tensors, trained)]
    losses = fn(*new, labels, **options)
    (losses * weights).sum().backward()
    return losses.detach(), [None if t is None else t.grad for t in new]


def adapter(rows=T, dtype=torch.float64):
    return torch.randn(rows, 3).to(dtype), torch.randn(V, 3).to(dtype)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("masked", ["none", "some", "all"])
@pytest.mark.parametrize("trained", TRAINED, ids=str)
def test_is_torchs_in_fp64(trained, masked, options):
    hidden, weight, bias, labels = problem(masked=masked)
    tensors = hidden, weight, bias, *(adapter() if trained[3] else (None, None))
    weights = torch.randn(T, dtype=torch.float64)
    got, ours = gradients(fused, tensors, trained, labels, weights, **options)
    exact, theirs = gradients(plain, tensors, trained, labels, weights, **options)
    torch.testing.assert_close(got, exact, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("trained", TRAINED, ids=str)
def test_gradcheck(trained):
    hidden, weight, bias, labels = problem()
    new = [t.requires_grad_(bool(flag)) for t, flag in zip((hidden, weight, bias, *adapter()), trained)]
    inner, outer = new[3:] if trained[3] else (None, None)
    assert torch.autograd.gradcheck(lambda *n: fused(*n, labels, softcap=3.0, smoothing=0.1), (*new[:3], inner, outer))


@given(
    rows=st.integers(0, 11),
    chunk=st.integers(1, 12),
    ignore=st.sampled_from([-100, 0, 3]),
    trained=st.sampled_from(TRAINED),
    seed=st.integers(0, 3),
)
@QUICK
def test_any_number_of_rows_and_chunks(rows, chunk, ignore, trained, seed):
    torch.manual_seed(seed)
    hidden, weight, bias, labels = problem(rows=rows, ignore=ignore)
    tensors = hidden, weight, bias, *(adapter(rows) if trained[3] else (None, None))
    weights = torch.randn(rows, dtype=torch.float64)
    before, module.chunk_rows = module.chunk_rows, lambda vocabulary: chunk
    try:
        got, ours = gradients(fused, tensors, trained, labels, weights, ignore=ignore)
    finally:
        module.chunk_rows = before
    exact, theirs = gradients(plain, tensors, trained, labels, weights, ignore=ignore)
    torch.testing.assert_close(got, exact, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("trained", [(1, 0, 0, 0, 0), (1, 1, 0, 0, 0)], ids=["frozen", "trained"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_half_precision_is_no_worse_than_torch(dtype, trained):
    """Against fp64, with F.cross_entropy of logits.float() as the yardstick."""
    torch.manual_seed(3)
    hidden, weight, labels = (
        torch.randn(64, 32).to(dtype),
        torch.randn(50, 32).to(dtype) * 32**-0.5,
        torch.randint(0, 50, (64,)),
    )
    tensors, weights = (hidden, weight, None, None, None), torch.randn(64)
    got, ours = gradients(fused, tensors, trained, labels, weights)
    mid, theirs = gradients(plain, tensors, trained, labels, weights)
    exact, wanted = gradients(
        plain, [None if t is None else t.double() for t in tensors], trained, labels, weights.double()
    )
    assert got.dtype == torch.float32 and error(got, exact) <= 2 * max(error(mid, exact), torch.finfo(dtype).eps / 2)
    for o, t, w in zip(ours, theirs, wanted):
        if w is not None:
            assert o.dtype == dtype and error(o, w) <= 2 * max(error(t, w), torch.finfo(dtype).eps / 2)


@pytest.mark.parametrize("train_weight", [False, True])
def test_a_row_without_a_label_has_no_gradient_whatever_comes_in(train_weight):
    hidden, weight, _, labels = problem(torch.float32, bias=False)
    hidden.requires_grad_()
    fused(hidden, weight.requires_grad_(train_weight), None, None, None, labels).backward(
        torch.where(labels == -100, float("inf"), 1.0)
    )
    assert hidden.grad.isfinite().all() and (hidden.grad[labels == -100] == 0).all()


@pytest.mark.parametrize("masked", ["none", "all"])
@pytest.mark.parametrize("flags", [(True, True), (True, False), (False, True), (False, False)])
def test_the_fake_tells_the_truth(flags, masked):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        hidden, weight, bias, labels = problem(dtype, masked=masked)
        for both in ((None, None), adapter(dtype=torch.float32)):
            args = (hidden, weight, bias, *both, labels, 1.0, 0.0, -100, 0.0, *flags)
            assert_fake_is_real(linear_cross_entropy_rows, *args)
            losses, unit = linear_cross_entropy_rows(*args)
            assert_fake_is_real(linear_cross_entropy_rows.backward_op, torch.ones_like(losses), *args, unit)


@pytest.mark.parametrize("train_weight", [False, True])
def test_no_tensor_is_as_large_as_the_logits(train_weight, monkeypatch):
    monkeypatch.setattr(module, "chunk_rows", lambda vocabulary: 16)
    hidden, weight, labels = torch.randn(256, 8), torch.randn(512, 8), torch.randint(0, 512, (256,))
    args = (hidden, weight, None, None, None, labels, 1.0, 0.0, -100, 0.1, True, train_weight)
    with Largest() as mode:
        losses, unit = linear_cross_entropy_rows.reference(*args)
        linear_cross_entropy_rows.backward_op.reference(torch.ones_like(losses), *args, unit)
    assert mode.numel <= 16 * 512


def test_sure_tokens_in_fp16_under_a_loss_scale():
    """Their gradient is below what fp16 has all its bits for, until the loss is scaled: a quarter of it was lost."""
    hidden, weight, labels = sure(torch.float16)
    found = []
    for dtype, function in ((torch.float64, plain), (torch.float16, fused)):
        leaf, head = hidden.to(dtype).requires_grad_(), weight.to(dtype)
        (function(leaf, head, None, None, None, labels).sum() / 64 * 65536).backward()
        found.append(leaf.grad.double())
    exact, ours = found
    assert error(ours, exact) < 0.05


def test_a_graph_that_is_retained():
    hidden, weight, _, labels = problem(bias=False)
    hidden.requires_grad_()
    losses = fused(hidden, weight.requires_grad_(), None, None, None, labels)
    losses.sum().backward(retain_graph=True)
    once = [t.grad.clone() for t in (hidden, weight)]
    losses.sum().backward()
    torch.testing.assert_close([hidden.grad, weight.grad], [2 * g for g in once])


def test_opcheck():
    hidden, weight, bias, labels = problem(torch.float32)
    args = (*(t.requires_grad_() for t in (hidden, weight, bias)), None, None, labels, 1.0, 0.0, -100, 0.0, True, True)
    torch.library.opcheck(
        linear_cross_entropy_rows.overload,
        args,
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    "trained", [(1, 0, 0, 0, 0), (1, 1, 0, 0, 0), (1, 0, 0, 1, 1)], ids=["frozen", "trained", "adapted"]
)
@pytest.mark.parametrize("options", [{}, {"softcap": 30.0, "scale": 0.5}], ids=str)
def test_on_a_gpu(trained, options):
    torch.manual_seed(3)
    rows, width, vocabulary = 700, 256, 4099
    tensors = [
        t.to("cuda", torch.bfloat16)
        for t in (
            torch.randn(rows, width),
            torch.randn(vocabulary, width) * width**-0.5,
            torch.randn(vocabulary),
            torch.randn(rows, 8),
            torch.randn(vocabulary, 8) * 0.1,
        )
    ]
    tensors[3:] = tensors[3:] if trained[3] else (None, None)
    labels, weights = torch.randint(0, vocabulary, (rows,), device="cuda"), torch.randn(rows, device="cuda")
    labels[::5] = -100
    got, ours = gradients(fused, tensors, trained, labels, weights, **options)
    mid, theirs = gradients(plain, tensors, trained, labels, weights, **options)
    exact, wanted = gradients(
        plain, [None if t is None else t.double() for t in tensors], trained, labels, weights.double(), **options
    )
    assert error(got, exact) <= 1.2 * error(mid, exact)
    for o, t, w in zip(ours, theirs, wanted):
        if w is not None:
            assert error(o, w) <= 1.5 * max(error(t, w), torch.finfo(torch.bfloat16).eps / 2)
