"""Loss and gradient of chunks of logits against fp64 autograd."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
from tunecompile.templates import cross_entropy  # noqa: E402
from tunecompile.templates._tiles import Tile  # noqa: E402

SMALL = Tile(256, num_warps=1)  # several blocks a row already for a small vocabulary


def reference(logits, labels, *, ignore_index=-100, softcap=None, scale=1.0, label_smoothing=0.0):
    x = logits.double().requires_grad_()
    z = x * scale
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    loss = F.cross_entropy(z, labels, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing)
    (grad,) = torch.autograd.grad(loss.sum(), x)
    return loss.detach(), grad


def inputs(rows, vocabulary, device, dtype=torch.float32, spread=3.0, seed=0):
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, vocabulary, generator=g) * spread).to(device, dtype)
    return logits, torch.randint(0, vocabulary, (rows,), generator=g).to(device)


def check(logits, labels, error, bound, tile=SMALL, **options):
    loss, grad = reference(logits, labels, **options)
    got = cross_entropy.loss_and_grad_(logits, labels, tile=tile, **options)
    assert got.dtype == torch.float32 and error(got, loss) < 5e-6
    assert error(logits, grad) < max(bound(logits.dtype), 1e-5)


OPTIONS = (
    {},
    {"softcap": 30.0},
    {"softcap": 5.0, "scale": 0.5},
    {"scale": 0.0625},
    {"label_smoothing": 0.1},
    {"label_smoothing": 0.1, "softcap": 10.0, "scale": 2.0, "ignore_index": 7},
)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_against_fp64(device, error, bound, dtype, options):
    logits, labels = inputs(5, 700, device, dtype)
    labels[2] = options.get("ignore_index", -100)
    check(logits, labels, error, bound, **options)


@pytest.mark.parametrize("rows,vocabulary", [(1, 1), (1, 2), (3, 128), (2, 129), (4, 127), (2, 384), (2, 1001)])
def test_odd_sizes(device, error, bound, rows, vocabulary):
    check(*inputs(rows, vocabulary, device), error, bound)
    check(*inputs(rows, vocabulary, device), error, bound, tile=None)


def test_labels_at_the_ends_of_blocks(device, error, bound):
    logits, labels = inputs(6, 300, device)
    labels.copy_(torch.tensor([0, 127, 128, 255, 256, 299]))
    check(logits, labels, error, bound)
    check(*inputs(6, 300, device)[:1], labels.int().long(), error, bound, label_smoothing=0.2)


def test_ignored_rows_are_zero_and_not_read(device):
    logits, labels = inputs(4, 300, device)
    labels[1] = labels[3] = -100
    logits[1] = float("nan")
    logits[3] = float("inf")
    loss = cross_entropy.loss_and_grad_(logits, labels, tile=SMALL)
    for t in (loss, logits):
        assert (t[[1, 3]] == 0).all() and t[[0, 2]].isfinite().all() and (t[[0, 2]] != 0).any()


def test_row_strided_logits_leave_the_padding_alone(device, error, bound):
    buffer = torch.full((3, 260), 77.0, device=device)
    logits, labels = inputs(3, 250, device)
    buffer[:, 5:255] = logits
    loss, grad = reference(logits, labels)
    got = cross_entropy.loss_and_grad_(buffer[:, 5:255], labels, tile=SMALL)
    assert error(got, loss) < 1e-6 and error(buffer[:, 5:255], grad) < 1e-5
    assert (buffer[:, :5] == 77).all() and (buffer[:, 255:] == 77).all()


@pytest.mark.parametrize("offset", (1000.0, -1000.0))
def test_large_logits(device, error, bound, offset):
    logits, labels = inputs(3, 300, device)
    logits += offset
    loss, grad = reference(logits, labels)
    got = cross_entropy.loss_and_grad_(logits, labels, tile=SMALL)
    assert error(got, loss) < 1e-4 and error(logits, grad) < 1e-3  # lse is a number near 1000 in fp32


def test_masked_tokens_at_minus_infinity(device, error, bound):
    logits, labels = inputs(3, 300, device)
    logits[:, :140] = float("-inf")  # more than a block
    labels.fill_(200)
    check(logits, labels, error, bound)


def test_loss_only_keeps_the_logits(device, error):
    logits, labels = inputs(3, 300, device)
    before = logits.clone()
    loss = cross_entropy.loss_and_grad_(logits, labels, grad=False, tile=SMALL)
    assert torch.equal(logits, before) and error(loss, reference(logits, labels)[0]) < 1e-6


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
def test_each_rows_gradient_has_its_factor(device, error, options):
    logits, labels = inputs(5, 700, device)
    labels[2] = options.get("ignore_index", -100)
    loss, grad = reference(logits, labels, **options)
    factors = torch.tensor([0.5, -2.0, 3.0, 0.0, 1e3], device=device)
    got = cross_entropy.loss_and_grad_(logits, labels, factors=factors, tile=SMALL, **options)
    assert error(got, loss) < 5e-6 and error(logits, grad * factors[:, None]) < 1e-5
    with pytest.raises(ValueError, match="4 factors for 5 rows|factors"):
        cross_entropy.loss_and_grad_(logits, labels, factors=factors[:4])


def test_a_label_out_of_range_gives_nan(device):
    logits, labels = inputs(3, 300, device)
    labels[1] = 300
    labels[2] = -5
    loss = cross_entropy.loss_and_grad_(logits, labels, tile=SMALL)
    assert loss.isnan().tolist() == [False, True, True]


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", (49152, 128256, 262144))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_real_size(gpu_only, device, error, bound, dtype, vocabulary):
    logits, labels = inputs(64, vocabulary, device, dtype)
    labels[::7] = -100
    check(logits, labels, error, bound, tile=None, softcap=30.0 if vocabulary == 262144 else None)


def statistics(logits, labels, factors, rises, *, softcap=None, scale=1.0):
    x = logits.double().requires_grad_()
    z = x * scale
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    logp = z.log_softmax(1)
    entropy = -(logp.exp() * logp).sum(1)
    loss = -logp.gather(1, labels[:, None])[:, 0]
    (grad,) = torch.autograd.grad((loss * factors).sum() + (entropy * rises).sum(), x)
    found = {
        "entropy": entropy,
        "log_sum_sq_probs": (2 * logp).logsumexp(1),
        "mean_logits": z.mean(1),
        "is_top1": z.argmax(1) == labels,
    }
    return loss.detach(), {name: value.detach() for name, value in found.items()}, grad


@pytest.mark.parametrize("options", OPTIONS[:3], ids=lambda o: "-".join(o) or "plain")
def test_statistics(device, error, bound, options):
    logits, labels = inputs(6, 700, device, torch.float32)
    labels[0] = logits[0].argmax()
    logits[4, [5, 100]] = logits[5, [5, 100]] = 12.0
    labels[4:] = torch.tensor([100, 5])  # the second of two equals, and the first
    factors, rises = torch.tensor([[1.0, -2, 0, 3, 0.5, 1], [0.0, 1, 2, -1, 1, 0.5]], device=device)
    loss, values, grad = statistics(logits, labels, factors, rises, **options)
    plain = cross_entropy.loss_and_grad_(logits.clone(), labels, tile=SMALL, **options)
    got, found = cross_entropy.statistics_and_grad_(
        logits, labels, cross_entropy.STATISTICS, factors=factors, entropy_factors=rises, tile=SMALL, **options
    )
    assert torch.equal(got, plain) and error(got, loss) < 5e-6
    assert torch.equal(found.pop("is_top1"), values["is_top1"])
    assert all(error(value, values[name]) < 5e-6 for name, value in found.items())
    assert error(logits, grad) < max(bound(torch.float32), 1e-5)
