"""Head and loss without logits: values and gradients of torch's own, chunked or not, and never the full logits in memory."""

import importlib

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tests.support.ops.checks import QUICK, assert_fake_is_real, error, tensor
from tests.support.ops.cross_entropy import OPTIONS, H, Largest, T, V, problem, sure
from tunecompile.ops import linear_cross_entropy

module = importlib.import_module("tunecompile.ops.linear_cross_entropy")


@pytest.fixture
def chunked(monkeypatch):
    monkeypatch.setattr(module, "chunk_rows", lambda vocabulary: 4)


def fused(hidden, weight, bias, labels, scale=1.0, softcap=0.0, ignore=-100, smoothing=0.0):
    trained = weight.requires_grad or (bias is not None and bias.requires_grad)
    return linear_cross_entropy(
        hidden, weight, bias, None, None, labels, scale, softcap, ignore, smoothing, hidden.requires_grad, trained
    )[0]


def plain(hidden, weight, bias, labels, scale=1.0, softcap=0.0, ignore=-100, smoothing=0.0):
    logits = F.linear(hidden, weight, bias) * scale
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    return F.cross_entropy(logits, labels, reduction="sum", ignore_index=ignore, label_smoothing=smoothing)


def gradients(fn, tensors, *rest, **options):
    new = [None if t is None else t.detach().requires_grad_() for t in tensors]
    loss = fn(*new, *rest, **options)
    (loss * 0.37).backward()
    return loss.detach(), [t.grad for t in new if t is not None]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("masked", ["none", "some", "all"])
@pytest.mark.parametrize("bias", [True, False])
def test_is_torchs_cross_entropy_in_fp64(chunked, bias, masked, options):
    *tensors, labels = problem(bias=bias, masked=masked)
    got, ours = gradients(fused, tensors, labels, **options)
    exact, theirs = gradients(plain, tensors, labels, **options)
    torch.testing.assert_close(got, exact, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradcheck(chunked, options):
    hidden, weight, bias, labels = problem()
    new = [t.requires_grad_() for t in (hidden, weight, bias)]
    assert torch.autograd.gradcheck(lambda *n: fused(*n, labels, **options), new)


@given(
    rows=st.integers(0, 11),
    chunk=st.integers(1, 12),
    ignore=st.sampled_from([-100, 0, 3]),
    bias=st.booleans(),
    smoothing=st.sampled_from([0.0, 0.1]),
    softcap=st.sampled_from([0.0, 3.0]),
    strided=st.booleans(),
    seed=st.integers(0, 3),
)
@QUICK
def test_any_number_of_rows_and_chunks(rows, chunk, ignore, bias, smoothing, softcap, strided, seed):
    torch.manual_seed(seed)
    hidden, weight, b, labels = problem(rows=rows, bias=bias, ignore=ignore)
    if strided and rows:
        hidden, weight = tensor((rows, H), "strided", torch.float64), tensor((V, H), "transposed", torch.float64)
    options = dict(ignore=ignore, smoothing=smoothing, softcap=softcap)
    before, module.chunk_rows = module.chunk_rows, lambda vocabulary: chunk
    try:
        got, ours = gradients(fused, (hidden, weight, b), labels, **options)
    finally:
        module.chunk_rows = before
    exact, theirs = gradients(plain, (hidden, weight, b), labels, **options)
    torch.testing.assert_close(got, exact, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("trained", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (1, 0, 1)], ids=str)
def test_frozen_inputs_get_nothing_and_trained_ones_all(trained):
    hidden, weight, bias, labels = problem()
    ours = [t.detach().requires_grad_(bool(flag)) for t, flag in zip((hidden, weight, bias), trained)]
    theirs = [t.detach().requires_grad_(bool(flag)) for t, flag in zip((hidden, weight, bias), trained)]
    fused(*ours, labels).backward()
    plain(*theirs, labels).backward()
    for o, t in zip(ours, theirs):
        assert (o.grad is None) == (t.grad is None)
        if t.grad is not None:
            torch.testing.assert_close(o.grad, t.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("options", [dict(), dict(softcap=5.0, smoothing=0.1)], ids=str)
def test_half_precision_is_no_worse_than_torch(chunked, options, dtype):
    """Against fp64, with F.cross_entropy of logits.float() as the yardstick."""
    torch.manual_seed(3)
    hidden, weight, labels = (
        torch.randn(64, 32).to(dtype),
        torch.randn(50, 32).to(dtype) * 32**-0.5,
        torch.randint(0, 50, (64,)),
    )

    def eager(h, w, b, y, scale=1.0, softcap=0.0, ignore=-100, smoothing=0.0):
        logits = F.linear(h, w, b).float()
        logits = softcap * torch.tanh(logits / softcap) if softcap else logits
        return F.cross_entropy(logits, y, reduction="sum", ignore_index=ignore, label_smoothing=smoothing)

    got, ours = gradients(fused, (hidden, weight, None), labels, **options)
    mid, theirs = gradients(eager, (hidden, weight, None), labels, **options)
    exact, wanted = gradients(plain, (hidden.double(), weight.double(), None), labels, **options)
    assert got.dtype == torch.float32 and [g.dtype for g in ours] == [dtype, dtype]
    floor = torch.finfo(dtype).eps / 2
    assert error(got, exact) <= 2 * max(error(mid, exact), floor)
    for o, t, w in zip(ours, theirs, wanted):
        assert error(o, w) <= 2 * max(error(t, w), floor)


def test_fp16_under_a_loss_scale_that_the_gradient_alone_would_not_survive():
    """A mean over many rows times a small weight: what fp16 cannot hold before the scaler has scaled it."""
    hidden, weight, _, labels = problem(torch.float16, bias=False, masked="none")
    h = hidden.clone().requires_grad_()
    (fused(h, weight, None, labels) * 1e-7 * 2.0**16).backward()
    h64 = hidden.double().requires_grad_()
    (plain(h64, weight.double(), None, labels) * 1e-7 * 2.0**16).backward()
    assert error(h.grad, h64.grad) < 5e-3


@pytest.mark.parametrize("masked", ["none", "some", "all"])
@pytest.mark.parametrize("flags", [(True, True), (True, False), (False, True), (False, False)])
def test_the_fake_tells_the_truth(flags, masked):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        hidden, weight, bias, labels = problem(dtype, masked=masked)
        for adapter in ((None, None), (torch.randn(T, 3), torch.randn(V, 3))):
            args = (hidden, weight, bias, *adapter, labels, 1.0, 0.0, -100, 0.0, *flags)
            assert_fake_is_real(linear_cross_entropy, *args)
            _, *outs = linear_cross_entropy(*args)
            if all(flags):
                assert_fake_is_real(
                    linear_cross_entropy.backward_op, torch.ones(()), hidden, weight, bias, *adapter, *outs
                )


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("masked", ["none", "some"])
def test_with_an_adapter(chunked, masked, options):
    hidden, weight, bias, labels = problem(masked=masked)
    inner, outer = torch.randn(T, 3, dtype=torch.float64), torch.randn(V, 3, dtype=torch.float64)

    def adapted(hidden, bias, inner, outer, labels, scale=1.0, softcap=0.0, ignore=-100, smoothing=0.0):
        return linear_cross_entropy(
            hidden, weight, bias, inner, outer, labels, scale, softcap, ignore, smoothing, True, True
        )[0]

    def apart(hidden, bias, inner, outer, labels, **options):
        return plain(torch.cat((hidden, inner), 1), torch.cat((weight, outer), 1), bias, labels, **options)

    got, ours = gradients(adapted, (hidden, bias, inner, outer), labels, **options)
    exact, theirs = gradients(apart, (hidden, bias, inner, outer), labels, **options)
    torch.testing.assert_close(got, exact, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_no_tensor_is_as_large_as_the_logits(monkeypatch):
    monkeypatch.setattr(module, "chunk_rows", lambda vocabulary: 16)
    hidden, weight, labels = torch.randn(256, 8), torch.randn(512, 8), torch.randint(0, 512, (256,))
    mode = Largest()
    with mode:
        module.linear_cross_entropy.reference(hidden, weight, None, None, None, labels, 1.0, 0.0, -100, 0.1, True, True)
    assert mode.numel <= 16 * 512
    whole = Largest()
    with whole:
        F.cross_entropy(hidden @ weight.t(), labels)
    assert whole.numel == 256 * 512


def test_rows_without_a_label_cost_nothing(monkeypatch):
    calls = []
    inner = module.logits_of
    monkeypatch.setattr(module, "logits_of", lambda x, *rest: calls.append(x.shape[0]) or inner(x, *rest))
    hidden, weight, bias, labels = problem(masked="some")
    fused(hidden, weight, bias, labels)
    assert sum(calls) == int((labels != -100).sum())


def test_chunks_are_bounded_by_bytes():
    assert module.chunk_rows(128_256) == 1024 and module.chunk_rows(1000) == module.CHUNK_BYTES // 4000


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_trained_heads_gradient_is_summed_in_fp32(dtype, monkeypatch):
    """Over many chunks, whose sum in half precision would lose what each adds."""
    monkeypatch.setattr(module, "step_rows", lambda weight, trained: 64)
    hidden, weight = (torch.randn(rows, 64, device="cuda").to(dtype) for rows in (4096, 500))
    labels = torch.randint(0, 500, (4096,), device="cuda")
    _, (ours, found) = gradients(fused, (hidden, weight, None), labels)
    _, (_, exact) = gradients(plain, (hidden.double(), weight.double(), None), labels)
    _, (_, torchs) = gradients(plain, (hidden, weight, None), labels)
    assert error(found, exact) < 1.1 * error(torchs, exact) + 1e-4


def test_opcheck():
    hidden, weight, bias, labels = problem(torch.float32)
    new = [t.requires_grad_() for t in (hidden, weight, bias)]
    args = (*new, None, None, labels, 1.0, 0.0, -100, 0.0, True, True)
    torch.library.opcheck(
        linear_cross_entropy.overload, args, test_utils=("test_schema", "test_autograd_registration", "test_faketensor")
    )


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("train_weight", [False, True])
def test_sure_tokens_in_fp16_under_a_loss_scale(train_weight, device):
    """Their gradient is below what fp16 has all its bits for, until the loss is scaled. Eager scales first."""
    scale, errors = 65536.0, []

    def eager(hidden, weight, bias, labels):
        return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")

    hidden, weight, labels = (each.to(device) for each in sure(torch.float16))
    exact = [each.double().requires_grad_() for each in (hidden, weight)]
    (plain(*exact, None, labels) / 64).backward()
    for fn in (fused, eager):
        new = [each.clone().requires_grad_() for each in (hidden, weight)]
        new[1].requires_grad_(train_weight)
        (fn(new[0], new[1], None, labels).float() / 64 * scale).backward()
        made = [each.grad for each in new if each.grad is not None]
        errors.append([error(each.double() / scale, of.grad) for each, of in zip(made, exact)])
    for ours, theirs in zip(*errors):
        assert ours <= 1.5 * theirs + 1e-3, errors
