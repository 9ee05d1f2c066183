"""Attention that is written out under any mask or bias becomes torch's own; what is more than that stays."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.support.passes import run
from tests.support.passes.run import family, random, recognize
from tests.support.passes.traced import traced
from tunecompile.compiler.attention_calls.found import Term
from tunecompile.compiler.pass_manager import Context
from tunecompile.passes.recognize.attention import _joined

PASSES = family("document_attention", "attention")
check = partial(run.check, passes=PASSES)
ROWS, HEADS, TOKENS, KEYS, WIDTH = 2, 4, 6, 7, 8
LEAST = torch.finfo(torch.float32).min


def masked(blind=None):
    """Additive, [B, 1, T, S], with a row that sees nothing, or none."""
    seen = torch.ones(TOKENS, KEYS, dtype=torch.bool).tril()
    if blind is not None:
        seen[blind] = False
    return torch.where(seen, 0.0, LEAST).expand(ROWS, 1, TOKENS, KEYS).contiguous()


def inputs(dtype=torch.float32):
    q, k, v = (random(ROWS, HEADS, n, WIDTH, dtype=dtype) for n in (TOKENS, KEYS, KEYS))
    return [
        q,
        k,
        v,
        masked().to(dtype) if dtype == torch.float32 else masked().clamp(min=torch.finfo(dtype).min).to(dtype),
    ]


def bert(q, k, v, mask, bias):
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.3 + mask
    return torch.matmul(F.dropout(F.softmax(scores, dim=-1), p=0.0, training=True), v).transpose(1, 2).contiguous()


def without_a_mask(q, k, v, mask, bias):
    return (q @ k.mT / 2.5).softmax(-1) @ v


def in_fp32(q, k, v, mask, bias):
    weights = F.softmax(torch.matmul(q, k.transpose(2, 3)) * 0.3 + mask, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, v)


def learned_bias(q, k, v, mask, bias):
    """T5: no scale, and a bias with a gradient beside the mask."""
    return F.softmax((torch.matmul(q, k.transpose(3, 2)) + (bias + mask)).float(), dim=-1).type_as(q) @ v


def two_terms(q, k, v, mask, bias):
    return (q @ k.mT * 0.3 + bias + mask).softmax(-1) @ v


def of_two_dimensions(q, k, v, mask, bias):
    return (q @ k.mT * 0.3 + mask[0, 0]).softmax(-1) @ v


def alibi_and_fill(q, k, v, mask, bias):
    """MPT: a bias of three dimensions, and a boolean mask."""
    scores = (torch.matmul(q, k.transpose(-1, -2)) * 0.3 + bias[0, :, :1]).masked_fill(mask < 0, LEAST)
    return F.softmax(scores.float(), dim=-1).to(v.dtype) @ v


def bloom(q, k, v, mask, bias):
    """Rows and heads in one dimension, where ALiBi is what the product is added to."""
    alibi = bias[0, :, :1].repeat(ROWS, 1, 1)
    q, k, v = q.reshape(-1, TOKENS, WIDTH), k.reshape(-1, KEYS, WIDTH).transpose(-1, -2), v.reshape(-1, KEYS, WIDTH)
    scores = alibi.baddbmm(batch1=q, batch2=k, beta=0.5, alpha=0.3).view(ROWS, HEADS, TOKENS, -1) + mask
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.bmm(weights.view(ROWS * HEADS, TOKENS, -1), v).view(ROWS, HEADS, TOKENS, WIDTH)


def xglm(q, k, v, mask, bias):
    """Masks are added in four dimensions, the softmax is of three."""
    q, k, v = q.reshape(-1, TOKENS, WIDTH), k.reshape(-1, KEYS, WIDTH), v.reshape(-1, KEYS, WIDTH)
    scores = torch.bmm(q * 0.3, k.transpose(1, 2)).view(ROWS, HEADS, TOKENS, KEYS) + mask
    weights = F.softmax(scores.view(ROWS * HEADS, TOKENS, KEYS), dim=-1)
    return torch.bmm(weights, v).view(ROWS, HEADS, TOKENS, WIDTH)


def without_heads(q, k, v, mask, bias):
    """One head of three dimensions, and a mask of one row."""
    scores = torch.baddbmm(q.new_empty(ROWS, TOKENS, KEYS), q[:, 0], k[:, 0].mT, beta=0, alpha=0.3)
    return (scores + mask[:1, 0]).softmax(2) @ v[:, 0]


def gpt_neo(q, k, v, mask, bias):
    """Scores in fp32 stay where a mask is true; the number beside is a tensor."""
    least = torch.tensor(LEAST, dtype=torch.float32)
    scores = torch.where(mask >= 0, torch.matmul(q.to(torch.float32), k.to(torch.float32).transpose(-1, -2)), least)
    return torch.matmul(F.softmax(scores + bias, dim=-1).to(v.dtype), v)


def codegen(q, k, v, mask, bias):
    """Scores are divided once the mask is added."""
    return torch.matmul(torch.nn.Softmax(dim=-1)((torch.matmul(q, k.transpose(-1, -2)) + mask + bias) / 2.5), v)


def einsum(q, k, v, mask, bias):
    weights = (torch.einsum("bhqd,bhkd->bhqk", q, k) * 0.3 + mask).softmax(-1)
    return torch.einsum("b h q k, b h k d -> b h q d", [weights, v])


def einsum_tokens_first(q, k, v, mask, bias):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    weights = (torch.einsum("...khd,...qhd->...hqk", k, q) * 0.3 + mask + bias).softmax(-1)
    return torch.einsum("...hqk,...khd->...qhd", weights, v)


def permuted_keys(q, k, v, mask, bias):
    return (q @ k.transpose(1, 2).permute(0, 2, 3, 1) * 0.3 + mask).softmax(-1) @ v


SPELLINGS = [bert, without_a_mask, in_fp32, learned_bias, two_terms, alibi_and_fill]
OTHERS = [of_two_dimensions, bloom, xglm, without_heads, gpt_neo, codegen, einsum, einsum_tokens_first, permuted_keys]


@pytest.mark.parametrize("spelling", SPELLINGS + OTHERS)
def test_spellings(spelling):
    seen = check(spelling, *inputs(), random(1, HEADS, TOKENS, KEYS), expect={}, tol=2e-6)
    text = str(seen.graphs[0])
    assert "softmax" not in text and "scaled_dot_product_attention" in text, seen.refused


def test_half_precision():
    """No further from fp64 than the model's own code."""
    given = [*inputs(torch.bfloat16), random(1, HEADS, TOKENS, KEYS, dtype=torch.bfloat16)]
    seen = check(in_fp32, *given, expect={}, tol=2e-2)
    assert "softmax" not in str(seen.graphs[0])


def test_a_row_that_sees_nothing():
    """Its result is eager's, the mean of all values; and it disturbs no gradient of another's."""

    def fn(q, k, v, mask):
        made = in_fp32(q, k, v, mask, None)
        return made * (torch.arange(TOKENS) != 2)[:, None], made.detach()

    seen = check(fn, *inputs()[:3], masked(2), expect={}, tol=2e-6)
    assert "softmax" not in str(seen.graphs[0])


def dropped(q, k, v, mask, bias):
    return F.dropout((q @ k.mT).softmax(-1), 1.0) @ v


def capped(q, k, v, mask, bias):
    return (torch.tanh(q @ k.mT / 5.0) * 5.0 + mask).softmax(-1) @ v


def weights_read(q, k, v, mask, bias):
    weights = (q @ k.mT + mask).softmax(-1)
    return weights @ v + weights.sum()


def weights_returned(q, k, v, mask, bias):
    """As blocks of MPT, GPT-J and BLOOM do, whether their caller reads them or not."""
    weights = F.softmax((q @ k.mT + mask).float(), dim=-1).to(q.dtype)
    return weights @ v, weights


def over_queries(q, k, v, mask, bias):
    return (q @ k.mT + mask).softmax(-2) @ v


def filled_with_little(q, k, v, mask, bias):
    return (q @ k.mT).masked_fill(mask < 0, -5.0).softmax(-1) @ v


def divided_too_far(q, k, v, mask, bias):
    """Where the number stands, scores count for something."""
    return ((q @ k.mT).masked_fill(mask < 0, -7e4) / 1e4).softmax(-1) @ v


def scores_squared(q, k, v, mask, bias):
    return ((q @ k.mT) ** 2 + mask).softmax(-1) @ v


@pytest.mark.parametrize(
    "spelling, why",
    [
        (dropped, "dropout"),
        (capped, "soft-capped"),
        (weights_read, "read elsewhere"),
        (weights_returned, "returns its weights"),
        (over_queries, "more than"),
        (filled_with_little, "more than"),
        (divided_too_far, "more than"),
        (scores_squared, "more than"),
    ],
)
def test_near_misses_say_why(spelling, why):
    seen = check(spelling, *inputs(), random(1, HEADS, TOKENS, KEYS), expect={}, whole=False)
    assert "softmax" in str(seen.graphs[0]) and any(why in reason for reason in seen.refused), seen.refused


def keys_changed(q, k, v):
    k = k * 1.0
    weights = (q @ k.mT).softmax(-1)
    k.zero_()
    return weights @ v


def places_changed(q, k, v):
    places = (k[..., 0] > 0).unsqueeze(-2)
    weights = (q @ k.mT).masked_fill(places, LEAST).softmax(-1)
    places.fill_(False)
    return weights @ v


def weights_without_gradients(q, k, v):
    with torch.no_grad():
        weights = (q @ k.mT * 0.3).softmax(-1)
    return weights @ v + q.sum() * k.sum()


@pytest.mark.parametrize("fn", [keys_changed, places_changed, weights_without_gradients])
def test_what_changes_between_scores_and_result(fn):
    """Scores would be computed later: of other values, or with gradients."""
    frozen = fn is not weights_without_gradients
    q, k, v = (random(ROWS, HEADS, n, WIDTH, grad=not frozen) for n in (TOKENS, KEYS, KEYS))
    seen = check(fn, q, k, v, expect={}, whole=False)
    assert "scaled_dot_product" not in str(seen.graphs[0]) and "in place" in str(seen.refused)


@pytest.mark.parametrize("factor", [1.0, 2.0, 0.5])
def test_a_factor_of_one_mask_alone(factor):
    """As a scale behind the sum of scores and mask leaves it. A number that is filled in has it, too."""
    added, where = random(4, 4), torch.eye(4, dtype=torch.bool)
    terms = Term(None, factor=factor), Term(None, fill=-3.0, factor=factor)
    alone = _joined([added], [added], terms[:1], torch.float32, scaled=True)
    both = _joined([added, where], [added, where], terms, torch.float32, scaled=True)
    assert torch.equal(alone, added * factor)
    assert torch.equal(both, torch.where(where, -3.0 * factor, added * factor))
    assert torch.equal(_joined([added], [added], terms[:1], torch.float32), added)


@pytest.mark.parametrize("unread", [True, False])
def test_weights_that_nobody_reads(unread):
    """They keep their place among the results, without rows, and no scores are computed for them."""
    rows = inputs()
    gm, context = traced(lambda q, k, v, mask: weights_returned(q, k, v, mask, None), *rows), Context("test")
    context.weights_unread = unread
    recognize(PASSES, gm, context, tidy=True)
    gm.recompile()
    expected, (made, weights) = weights_returned(*rows, None), gm(*rows)
    torch.testing.assert_close(made, expected[0])
    assert ("softmax" in gm.code) is not unread
    if unread:
        assert weights.shape == (0, HEADS, TOKENS, KEYS) and weights.dtype == expected[1].dtype
    else:
        torch.testing.assert_close(weights, expected[1])
