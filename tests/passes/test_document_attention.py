"""Attention under a document mask reads offsets; under any other it stays."""

import operator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Graph

from tests.support.passes import run
from tests.support.passes.functions import repeated
from tests.support.passes.run import family, random
from tests.support.passes.traced import traced
from tests.support.trees import tree_of
from tunecompile.compiler.attention_calls import unrepeated
from tunecompile.ir.canonicalize import value
from tunecompile.ops import document_mask, dropout_attention, varlen_attention

check = partial(run.check, passes=family("document_attention"))
HEADS, WIDTH = 4, 8
OFFSETS = torch.tensor([0, 3, 7, 7, 11], dtype=torch.int32)
TOTAL, LONGEST = 11, 4


def heads(x, count=HEADS):
    return x.unflatten(-1, (count, WIDTH)).transpose(1, 2)


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


def narrow_values(q, k, v, offsets):
    """As latent attention has them: the scale is that of queries."""
    values = heads(v)[..., :5]
    return F.scaled_dot_product_attention(heads(q), heads(k), values, document_mask(offsets, LONGEST, TOTAL, 3))


def wide_values(q, k, v, offsets):
    queries, keys = heads(q)[..., :3], heads(k[..., : 2 * WIDTH], 2)[..., :3]
    mask, values = document_mask(offsets, LONGEST, TOTAL, 0), heads(v[..., : 2 * WIDTH], 2)
    return F.scaled_dot_product_attention(queries, repeated(keys, 2), repeated(values, 2), mask)


def images(q, k, v, offsets):
    mask = document_mask(offsets, LONGEST, TOTAL, 0, False)
    return F.scaled_dot_product_attention(heads(q), heads(k), heads(v), mask, is_causal=False)


def of_branches(q, k, v, offsets, tree, places):
    mask = document_mask(offsets, LONGEST, TOTAL, 3, True, tree, places)
    return F.scaled_dot_product_attention(heads(q), heads(k), heads(v), mask)


def inputs(dtype=torch.float32):
    return [random(1, TOTAL, HEADS * WIDTH, dtype=dtype) for _ in range(3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_branches(dtype):
    offsets, tree, places = tree_of(((-1, 4), (0, 3), (0, 1), (-1, 3)))
    check(of_branches, *inputs(dtype), offsets, tree, places, expect={"branch_attention": 1})


@pytest.mark.parametrize("spelling", [whole, shared_keys, sliced_mask, grouped, narrow_values, wide_values, images])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_spellings(spelling, dtype):
    check(spelling, *inputs(dtype), OFFSETS, expect={"varlen_attention": 1})


def added(offsets, window=0, dtype=torch.float32):
    """The mask as numbers to add."""
    return torch.where(document_mask(offsets, LONGEST, TOTAL, window), 0.0, torch.finfo(dtype).min).to(dtype)


def written_out(q, k, v, offsets):
    k, v = heads(k[..., : 2 * WIDTH], 2), heads(v[..., : 2 * WIDTH], 2)
    scores = torch.matmul(heads(q), repeated(k, 2).transpose(2, 3)) * 0.3 + added(offsets, 3)
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(F.dropout(weights, p=0.0, training=True), repeated(v, 2)).transpose(1, 2).contiguous()


def divided(q, k, v, offsets):
    scores = (heads(q) @ heads(k).mT) / 2.5 + added(offsets)[:, :, :, : q.shape[1]]
    return F.dropout(scores.softmax(-1), 0.7, False) @ heads(v)


def soft_capped(q, k, v, offsets):
    """As Gemma 2 writes it."""
    scores = torch.tanh(torch.matmul(heads(q), heads(k).transpose(2, 3)) * 0.3 / 0.7) * 0.7 + added(offsets, 3)
    return F.softmax(scores, dim=-1, dtype=torch.float32).type(q.dtype) @ heads(v)


def with_sinks(q, k, v, offsets):
    """As gpt-oss writes it."""
    scores = torch.matmul(heads(q), heads(k).transpose(-1, -2)) * 0.3 + added(offsets)
    sinks = q[0, 0, :HEADS].reshape(1, -1, 1, 1).expand(1, -1, TOTAL, -1)
    joined = torch.cat([scores, sinks], dim=-1)
    joined = joined - joined.max(dim=-1, keepdim=True).values
    return torch.matmul(F.softmax(joined, dim=-1, dtype=joined.dtype)[..., :-1], heads(v))


def factor_behind_mask(q, k, v, offsets):
    """As CodeGen writes it."""
    scores = (torch.matmul(heads(q), heads(k).transpose(-1, -2)) + added(offsets)) / 2.5
    return torch.matmul(scores.softmax(-1), heads(v))


@pytest.mark.parametrize("spelling", [written_out, divided, soft_capped, with_sinks, factor_behind_mask])
def test_written_out(spelling):
    seen = check(spelling, *inputs(), OFFSETS, expect={"varlen_attention": 1})
    assert "softmax" not in str(seen.graphs[0]) and "where" not in str(seen.graphs[0])


def capped(scores, v):
    return torch.tanh(scores).softmax(-1) @ v


def capped_by_another(scores, v):
    return (torch.tanh(scores / 0.7) * 0.8).softmax(-1) @ v


def over_queries(scores, v):
    return scores.softmax(-2) @ v


def read_elsewhere(scores, v):
    weights = scores.softmax(-1)
    return weights @ v + weights.sum()


def first_column_is_left_out(scores, v):
    return torch.cat([scores, scores[..., :1]], -1).softmax(-1)[..., 1:] @ v


def another_column(scores, v):
    return torch.cat([scores, scores.sum(-1, keepdim=True)], -1).softmax(-1)[..., :-1] @ v


def sinks_by_token(scores, v):
    column = scores[0, 0, :, 0].reshape(1, 1, -1, 1).expand(1, HEADS, -1, -1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v


@pytest.mark.parametrize(
    "rest",
    [capped, capped_by_another, over_queries, read_elsewhere, first_column_is_left_out, another_column, sinks_by_token],
)
def test_near_misses_written_out(rest):
    def layer(q, k, v, offsets):
        scores = (heads(q) @ heads(k).mT) * 0.3 + added(offsets, dtype=torch.float16).float()
        return rest(scores, heads(v))

    check(layer, *inputs(), OFFSETS, expect={"document_mask": 1}, whole=False)


def weighed(q, k, v, offsets):
    mask = torch.where(document_mask(offsets, LONGEST, TOTAL, 0), 0.0, -1.0)
    return ((heads(q) @ heads(k).mT) * 0.3 + mask).softmax(-1) @ heads(v)


def with_dropout(q, k, v, offsets):
    mask = document_mask(offsets, LONGEST, TOTAL, 0, False)
    return F.scaled_dot_product_attention(heads(q), heads(k[..., :WIDTH], 1), heads(v[..., :WIDTH], 1), mask, 0.4)


def test_dropout_is_by_a_seed_that_the_graph_draws():
    """Each call draws another one, of which the same weights are dropped in the backward."""
    torch.manual_seed(0)
    leaves, recorder = inputs(torch.float64), run.Recorder(family("document_attention"))
    compiled = torch.compile(with_dropout, backend=recorder)
    got = []
    for _ in range(2):
        torch.manual_seed(7 + len(got))
        made = compiled(*leaves, OFFSETS)
        torch.manual_seed(7 + len(got))
        seed = torch.randint_like(OFFSETS[:1], 2**31 - 1, dtype=torch.int64)
        rows = [heads(x[..., : n * WIDTH], n)[0].transpose(0, 1) for x, n in zip(leaves, (HEADS, 1, 1))]
        right = dropout_attention(*rows, OFFSETS, LONGEST, WIDTH**-0.5, 0, False, 0.4, seed)[0]
        right = right.transpose(0, 1)[None]
        grad = torch.randn_like(made)
        for mine, theirs in zip(torch.autograd.grad(made, leaves, grad), torch.autograd.grad(right, leaves, grad)):
            torch.testing.assert_close(mine, theirs)
        torch.testing.assert_close(made, right)
        got.append(made)
    assert recorder.seen.ops["dropout_attention"] == 1 and not torch.equal(*got)


def dropped(q, k, v, offsets):
    weights = ((heads(q) @ heads(k).mT) * 0.3 + added(offsets)).softmax(-1)
    return F.dropout(weights, 1.0, True) @ heads(v)


@pytest.mark.parametrize("layer", [weighed, dropped])
def test_near_misses_of_masks_and_dropout(layer):
    check(layer, *inputs(), OFFSETS, expect={"document_mask": 1}, whole=False)


def another_mask(q, k, v, offsets):
    mask = document_mask(offsets, LONGEST, TOTAL, 0)
    return F.scaled_dot_product_attention(heads(q), heads(k), heads(v), attn_mask=mask | (torch.arange(TOTAL) == 0))


def test_near_misses():
    """The mask is then made, and the numbers are right."""
    check(another_mask, *inputs(), OFFSETS, expect={"document_mask": 1})


def test_kernels_get_queries_as_they_were_before_scores_were_made_exact():
    """As GPT-J writes it: kernels sum products of half precision in fp32 anyway."""

    def exact_scores(q, k, v, offsets):
        q, k = heads(q).to(torch.float32), heads(k).to(torch.float32)
        weights = (torch.matmul(q, k.transpose(-1, -2)) / 2.5 + added(offsets)).softmax(-1).to(v.dtype)
        return torch.matmul(weights, heads(v))

    (graph,) = check(exact_scores, *inputs(torch.bfloat16), OFFSETS, whole=False, tol=2e-2).graphs
    (call,) = [node for node in graph.nodes if node.target is varlen_attention.overload]
    assert {value(each).dtype for each in call.args[:3]} == {torch.bfloat16} and "float32" not in str(graph)


def test_keys_that_were_repeated_are_read_once():
    """The op gets the shared heads: it sums their gradients by itself."""
    (graph,) = check(shared_keys, *inputs(), OFFSETS, whole=False).graphs
    (call,) = [node for node in graph.nodes if node.target is varlen_attention.overload]
    assert value(call.args[1]).shape == (TOTAL, 2, WIDTH)


NOT_REPEATED = {
    "themselves": lambda k: k * 2,
    "reshaped": lambda k: k.reshape(2, 3, 20),
    "expanded alone": lambda k: k[:, :, None, :, :].expand(2, 3, 2, 5, 4),
    "reshaped twice": lambda k: k.reshape(2, 3, 20).reshape(6, 20),
    "made longer": lambda k: k[:, :, None, :, :].expand(2, 3, 2, 5, 4).reshape(2, 3, 10, 4),
    "heads in another order": lambda k: k[:, None, :, :, :].expand(2, 2, 3, 5, 4).reshape(2, 6, 5, 4),
    "of a part": lambda k: k[:, 1:, None, :, :].expand(2, 2, 2, 5, 4).reshape(2, 4, 5, 4),
    "of one head": lambda k: k[:, :1, None, :, :].expand(2, 3, 2, 5, 4).reshape(2, 6, 5, 4),
    "of three dimensions": lambda k: k[0][:, None, :, :].expand(3, 2, 5, 4).reshape(6, 5, 4),
}


@pytest.mark.parametrize("name", NOT_REPEATED)
def test_keys_that_were_not_repeated_stay(name):
    node = traced(NOT_REPEATED[name], torch.randn(2, 3, 5, 4)).graph.output_node().args[0]
    assert unrepeated(node) is node


def test_a_part_of_several_results_was_not_repeated():
    graph = Graph()
    apart = graph.call_function(operator.getitem, (pair := graph.placeholder("pair"), 0))
    node = graph.call_method("reshape", (graph.call_method("expand", (apart, 2, 3, 2, 5, 4)), 2, 6, 5, 4))
    pair.meta["example_value"] = (torch.empty(2, 3, 1, 5, 4), None)
    assert unrepeated(node) is node


def test_keys_before_they_were_repeated():
    made = traced(lambda k: repeated_six(k * 2), torch.randn(2, 3, 5, 4))
    assert value(unrepeated(made.graph.output_node().args[0])).shape == (2, 3, 5, 4)


def repeated_six(k):
    return k[:, :, None, :, :].expand(2, 3, 2, 5, 4).reshape(2, 6, 5, 4)


def test_keys_that_change_between_scores_and_result():
    def fn(q, k, v, offsets):
        keys = heads(k) * 1.0
        weights = (heads(q) @ keys.mT * 0.3 + added(offsets)).softmax(-1)
        keys.zero_()
        return weights @ heads(v)

    q, k, v = (each.detach() for each in inputs())
    seen = check(fn, q, k, v, OFFSETS, expect={"document_mask": 1}, whole=False)
    assert "in place" in str(seen.refused)
