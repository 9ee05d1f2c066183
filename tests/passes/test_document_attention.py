"""Attention under a document mask reads offsets; under any other it stays."""

import pytest
import torch
import torch.nn.functional as F

from tests.support.passes.run import check, family, random
from tunecompile.ir.canonicalize import value
from tunecompile.ops import document_mask, varlen_attention

PASSES = family("document_attention")
HEADS, WIDTH = 4, 8
OFFSETS = torch.tensor([0, 3, 7, 7, 11], dtype=torch.int32)
TOTAL, LONGEST = 11, 4


def heads(x, count=HEADS):
    return x.unflatten(-1, (count, WIDTH)).transpose(1, 2)


def repeated(x, groups):
    """As transformers writes it."""
    batch, shared, tokens, width = x.shape
    return (
        x[:, :, None, :, :].expand(batch, shared, groups, tokens, width).reshape(batch, shared * groups, tokens, width)
    )


def whole(q, k, v, offsets):
    return F.scaled_dot_product_attention(
        heads(q), heads(k), heads(v), attn_mask=document_mask(offsets, LONGEST, TOTAL, 0)
    )


def shared_keys(q, k, v, offsets):
    mask = document_mask(offsets, LONGEST, TOTAL, 3)
    k, v = heads(k[..., : 2 * WIDTH], 2), heads(v[..., : 2 * WIDTH], 2)
    return F.scaled_dot_product_attention(heads(q), repeated(k, 2), repeated(v, 2), attn_mask=mask, scale=0.3)


def sliced_mask(q, k, v, offsets):
    mask = document_mask(offsets, LONGEST, TOTAL, 0)[:, :, :, : k.shape[1]]
    return F.scaled_dot_product_attention(heads(q), heads(k), heads(v), attn_mask=mask, dropout_p=0.0, is_causal=False)


def grouped(q, k, v, offsets):
    mask = document_mask(offsets, LONGEST, TOTAL, 0)
    k, v = heads(k[..., :WIDTH], 1), heads(v[..., :WIDTH], 1)
    return F.scaled_dot_product_attention(heads(q), k, v, mask, 0.0, False, scale=0.5, enable_gqa=True)


def inputs(dtype=torch.float32):
    return [random(1, TOTAL, HEADS * WIDTH, dtype=dtype) for _ in range(3)]


@pytest.mark.parametrize("spelling", [whole, shared_keys, sliced_mask, grouped])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_spellings(spelling, dtype):
    check(spelling, *inputs(dtype), OFFSETS, passes=PASSES, expect={"varlen_attention": 1})


def another_mask(q, k, v, offsets):
    mask = document_mask(offsets, LONGEST, TOTAL, 0)
    return F.scaled_dot_product_attention(heads(q), heads(k), heads(v), attn_mask=mask | (torch.arange(TOTAL) == 0))


def part_of_it(q, k, v, offsets):
    mask = document_mask(offsets, LONGEST, TOTAL, 0)[:, :, :, 1:]
    return F.scaled_dot_product_attention(heads(q), heads(k)[:, :, 1:], heads(v)[:, :, 1:], attn_mask=mask)


def narrow_values(q, k, v, offsets):
    mask = document_mask(offsets, LONGEST, TOTAL, 0)
    return F.scaled_dot_product_attention(heads(q), heads(k), heads(v)[..., :4], attn_mask=mask)


@pytest.mark.parametrize("spelling", [another_mask, narrow_values])
def test_near_misses(spelling):
    """The mask is then made, and the numbers are right."""
    check(spelling, *inputs(), OFFSETS, passes=PASSES, expect={"document_mask": 1})


def test_keys_that_were_repeated_are_read_once():
    """The op gets the shared heads: it sums their gradients by itself."""
    (graph,) = check(shared_keys, *inputs(), OFFSETS, passes=PASSES, whole=False).graphs
    (call,) = [node for node in graph.nodes if node.target is varlen_attention.overload]
    assert value(call.args[1]).shape == (TOTAL, 2, WIDTH)
