"""Causal attention of wide heads becomes an op where that is the fastest; any other attention stays torch's."""

import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.support.passes import run
from tests.support.passes.functions import repeated
from tests.support.passes.run import family, random
from tunecompile.compiler import attention_backend

check = partial(run.check, passes=family("causal_attention"))
HEADS, WIDTH, TOKENS = 4, 8, 6
ONE = {"causal_attention": 1}


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    """A GPU whose kernels take heads of less than 8 columns."""
    monkeypatch.setattr(attention_backend, "pretending", lambda: True)
    monkeypatch.setattr(attention_backend, "WIDEST", WIDTH - 1)


def heads(x, count=HEADS):
    return x[..., : count * WIDTH].unflatten(-1, (count, WIDTH)).transpose(1, 2)


def whole(q, k, v):
    return F.scaled_dot_product_attention(heads(q), heads(k), heads(v), is_causal=True)


def shared_keys(q, k, v):
    k, v = (repeated(heads(x, 2), 2) for x in (k, v))
    return F.scaled_dot_product_attention(heads(q), k, v, None, 0.0, True, scale=0.3).transpose(1, 2).contiguous()


def grouped(q, k, v):
    return F.scaled_dot_product_attention(
        heads(q), heads(k, 1), heads(v, 1), attn_mask=None, is_causal=True, scale=0.5, enable_gqa=True
    )


def inputs(dtype=torch.bfloat16):
    return [random(2, TOKENS, HEADS * WIDTH, dtype=dtype) for _ in range(3)]


@pytest.mark.parametrize("spelling", [whole, shared_keys, grouped])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_spellings(spelling, dtype):
    seen = check(spelling, *inputs(dtype), expect=ONE, tol=2e-2)
    assert "scaled_dot_product" not in str(seen.graphs[0]) and "expand" not in str(seen.graphs[0])


def test_lengths_that_change():
    check(shared_keys, *inputs(), expect=ONE, tol=2e-2, dynamic=True)


def test_under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        check(shared_keys, *inputs(torch.float32), expect=ONE, tol=2e-2)


def not_causal(q, k, v):
    return F.scaled_dot_product_attention(heads(q), heads(k), heads(v))


def under_a_mask(q, k, v):
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(heads(q), heads(k), heads(v), attn_mask=mask)


def with_dropout(q, k, v):
    return F.scaled_dot_product_attention(heads(q), heads(k), heads(v), is_causal=True, dropout_p=1e-12)


def fewer_queries(q, k, v):
    return F.scaled_dot_product_attention(heads(q[:, 2:]), heads(k), heads(v), is_causal=True)


def narrow_values(q, k, v):
    return F.scaled_dot_product_attention(heads(q), heads(k), heads(v)[..., :5], is_causal=True)


def narrow_heads(q, k, v):
    return F.scaled_dot_product_attention(*(heads(x)[..., 1:] for x in (q, k, v)), is_causal=True)


@pytest.mark.parametrize(
    "spelling", [not_causal, under_a_mask, with_dropout, fewer_queries, narrow_values, narrow_heads]
)
def test_other_attention(spelling):
    check(spelling, *inputs(), expect={}, tol=2e-2)


def one_row_of_keys(q, k, v):
    return F.scaled_dot_product_attention(heads(q), heads(k[:1]), heads(v[:1]), is_causal=True)


def one_head_of_values(q, k, v):
    return F.scaled_dot_product_attention(heads(q), heads(k), heads(v, 1), is_causal=True)


@pytest.mark.parametrize("spelling", [one_row_of_keys, one_head_of_values])
def test_keys_that_are_broadcast(spelling):
    seen = check(spelling, *inputs(), expect={}, tol=2e-2)
    assert any("differ in rows, tokens or heads" in reason for reason in seen.refused), seen.refused


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_whole_precision(dtype):
    check(whole, *inputs(dtype), expect={})


@pytest.mark.parametrize("takes", [True, False])
def test_where_something_else_is_faster(monkeypatch, takes):
    monkeypatch.setattr(
        sys.modules["tunecompile.passes.recognize.causal_attention"], "takes_blocks", lambda node: takes
    )
    check(whole, *inputs(), expect=ONE if takes else {}, tol=2e-2)


def test_none_where_kernels_have_to_be_the_same_each_time():
    torch.use_deterministic_algorithms(True)
    try:
        check(whole, *inputs(), expect={}, tol=2e-2)
    finally:
        torch.use_deterministic_algorithms(False)
