"""Scores of tokens without logits: values and gradients of torch's own, and no tensor of all logits."""

import importlib

import pytest
import torch
import torch.nn.functional as F

from tests.support.ops.cross_entropy import Largest, problem, sure
from tunecompile.runtime.loss_head.token_scores import STATISTICS, token_scores

module = importlib.import_module("tunecompile.ops.linear_cross_entropy")
rows = importlib.import_module("tunecompile.ops.linear_cross_entropy_rows")


@pytest.fixture(autouse=True)
def chunked(monkeypatch):
    monkeypatch.setattr(module, "chunk_rows", lambda vocabulary: 4)


def plain(hidden, weight, bias, labels, scale=1.0, softcap=0.0):
    return plain_of(F.linear(hidden, weight, bias), labels, scale, softcap)


def plain_of(logits, labels, scale=1.0, softcap=0.0):
    logits = logits * scale
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    logp = logits.log_softmax(-1)
    p = logp.exp()
    return logp.gather(1, labels[:, None])[:, 0], {
        "entropy": -(p * logp).sum(-1),
        "log_sum_sq_probs": p.square().sum(-1).log(),
        "mean_logits": logits.mean(-1),
        "is_top1": logits.argmax(-1) == labels,
    }


def differentiated(function, tensors, labels, uses, **options):
    """(scores, gradients of log-probabilities, entropies or both, weighed by row)."""
    log_probs, values = function(*tensors, labels, **options)
    weights = torch.randn(2, len(labels), dtype=log_probs.dtype, generator=torch.Generator().manual_seed(0))
    terms = {"log_probs": (log_probs * weights[0]).sum(), "entropy": (values["entropy"] * weights[1]).sum()}
    trained = [t for t in tensors if t is not None and t.requires_grad]
    made = torch.autograd.grad(sum(terms[use] for use in uses), trained)
    return log_probs.detach(), {name: value.detach() for name, value in values.items()}, made


@pytest.mark.parametrize("uses", [("log_probs",), ("entropy",), ("log_probs", "entropy")], ids="+".join)
@pytest.mark.parametrize("options", [{}, {"scale": -0.5}, {"scale": 2.0, "softcap": 1.5}], ids=str)
@pytest.mark.parametrize("trained", [(1, 0, 0), (1, 1, 0), (0, 1, 1), (0, 0, 1)], ids=str)
def test_is_torchs_in_fp64(trained, options, uses):
    *tensors, labels = problem(masked="none")
    tensors = [t.requires_grad_(bool(flag)) for t, flag in zip(tensors, trained)]
    ours = differentiated(
        lambda *given, scale=1.0, softcap=0.0: token_scores(*given, scale, softcap, STATISTICS),
        tensors,
        labels,
        uses,
        **options,
    )
    torch.testing.assert_close(ours, differentiated(plain, tensors, labels, uses, **options), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("trained, again", [((1, 0, 0), 0), ((1, 1, 0), 3)], ids=str)
def test_logits_are_made_once_under_a_frozen_head(trained, again, monkeypatch):
    """And their gradient with them."""
    made = []
    monkeypatch.setattr(module, "linear", lambda *given: made.append(1) or F.linear(*given))
    *tensors, labels = problem(masked="none")
    tensors = [t.requires_grad_(bool(flag)) for t, flag in zip(tensors, trained)]
    log_probs, _ = token_scores(*tensors, labels, 1.0, 0.0, ["entropy"])
    once = len(made)
    log_probs.sum().backward()
    assert once == 4 and len(made) - once == again, "13 rows, 4 at a time, or 6 for the gradient of a weight"


@pytest.mark.parametrize(
    "trained, grad_mode, ahead", [((1, 0, 0), True, True), ((0, 0, 0), True, False), ((1, 0, 0), False, False)], ids=str
)
def test_gradients_are_made_ahead_where_one_is_wanted(trained, grad_mode, ahead, monkeypatch):
    """Of chunks of the vocabulary's size."""
    asked, sizes, inner = [], [], rows.losses_and_gradient
    monkeypatch.setattr(rows, "losses_and_gradient", lambda *given: asked.append(given[7]) or inner(*given))
    monkeypatch.setattr(module, "chunk_rows", lambda vocabulary: sizes.append(vocabulary) or 100)
    *tensors, labels = problem(masked="none")
    tensors = [t.requires_grad_(bool(flag)) for t, flag in zip(tensors, trained)]
    with torch.set_grad_enabled(grad_mode):
        token_scores(*tensors, labels, 1.0, 0.0, ())
    assert asked == [ahead] and sizes == [tensors[1].shape[0]] != [tensors[1].shape[1]]


def test_the_first_of_equal_logits_is_the_top():
    hidden, weight = torch.ones(3, 1), torch.tensor([[0.0], [2.0], [2.0], [1.0]])
    _, values = token_scores(hidden, weight, None, torch.tensor([1, 2, 3]), 1.0, 0.0, ["is_top1"])
    assert values["is_top1"].tolist() == [True, False, False]


@pytest.mark.parametrize("trained", [False, True])
def test_no_rows_have_gradients_that_are_zero(trained):
    """A batch without labels."""
    hidden, weight = torch.randn(0, 6, requires_grad=True), torch.randn(9, 6, requires_grad=trained)
    log_probs, values = token_scores(hidden, weight, None, torch.zeros(0, dtype=torch.long), 1.0, 0.0, ["entropy"])
    (log_probs.sum() + values["entropy"].sum()).backward()
    assert hidden.grad.shape == (0, 6) and (not trained or not weight.grad.any())


def test_no_tensor_holds_all_logits_and_gradients_change_no_bit():
    hidden, weight, _, labels = problem(torch.bfloat16, masked="none", rows=64)
    with Largest() as largest:
        first, _ = token_scores(hidden.requires_grad_(), weight, None, labels, 1.0, 0.0, STATISTICS)
        first.sum().backward()
    assert largest.numel < 64 * 9
    with torch.no_grad():
        assert torch.equal(token_scores(hidden, weight, None, labels, 1.0, 0.0, ())[0], first)


@pytest.mark.gpu
@pytest.mark.parametrize("uses", [("log_probs",), ("log_probs", "entropy")], ids="+".join)
@pytest.mark.parametrize("options", [{}, {"scale": 1.7}, {"scale": 2.0, "softcap": 15.0}], ids=str)
@pytest.mark.parametrize("trains_head", [False, True])
def test_on_a_gpu_as_near_to_fp32_as_torch(trains_head, options, uses, monkeypatch):
    """By the kernel, in bf16, with several chunks; logits in bf16 are the yardstick."""
    monkeypatch.setattr(module, "chunk_rows", lambda vocabulary: 128)
    generator = torch.Generator("cuda").manual_seed(0)
    hidden, weight = (torch.randn(n, 256, device="cuda", generator=generator).bfloat16() for n in (300, 5003))
    weight = weight / 8
    labels = torch.randint(0, 5003, (300,), device="cuda", generator=generator)

    def run(function, wide: bool) -> tuple:
        tensors = [t.float() if wide else t.clone() for t in (hidden, weight)]
        tensors = [tensors[0].requires_grad_(), tensors[1].requires_grad_(trains_head), None]
        log_probs, values = function(*tensors, labels, **{"scale": 1.0, "softcap": 0.0, **options})
        factors = torch.linspace(-1, 2, 300, device="cuda")
        terms = {"log_probs": (log_probs * factors).sum(), "entropy": (values["entropy"] * factors.flip(0)).sum()}
        made = torch.autograd.grad(sum(terms[use] for use in uses), [t for t in tensors[:2] if t.requires_grad])
        return log_probs, values["entropy"], values["log_sum_sq_probs"], values["mean_logits"], *made

    def in_bf16(hidden, weight, bias, labels, **given):
        return plain_of(F.linear(hidden, weight).float(), labels, **given)

    ours = run(lambda *given, scale, softcap: token_scores(*given, scale, softcap, STATISTICS), False)
    theirs, exact = run(in_bf16, False), run(plain, True)
    for a, b, truth in zip(ours, theirs, exact):  # a row's gradient is rounded before its factor comes, and after
        assert (a - truth).norm() <= 1.3 * (b - truth).norm() + 1e-5 * truth.norm()
    with torch.no_grad():
        scale, softcap = options.get("scale", 1.0), options.get("softcap", 0.0)
        assert torch.equal(token_scores(hidden, weight, None, labels, scale, softcap, ())[0], ours[0])


def test_sure_tokens_in_fp16_under_a_loss_scale():
    """As accurate as eager, which scales before anything is rounded."""
    hidden, weight, labels = sure(torch.float16)
    found = []
    for dtype, of in ((torch.float64, plain), (torch.float16, None), (torch.float16, plain)):
        leaf, head = hidden.to(dtype).requires_grad_(), weight.to(dtype)
        if of is None:
            scores, _ = token_scores(leaf, head, None, labels, 1.0, 0.0, ())
        else:
            logits = F.linear(leaf, head)
            scores, _ = plain_of(logits if dtype is torch.float64 else logits.float(), labels)
        (scores.sum() / 64 * 65536).backward()
        found.append(leaf.grad.double())
    exact, ours, eager = found
    assert (ours - exact).norm() <= 1.5 * (eager - exact).norm() + 1e-3 * exact.norm()
