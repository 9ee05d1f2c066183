"""Which attention of a graph is under a document mask, and what is read of it; on graphs of fake tensors."""

import pytest
import torch
import torch.nn.functional as F

from tests.support.passes.traced import traced
from tunecompile.compiler.attention_calls import attention_calls, causal_calls
from tunecompile.compiler.attention_calls.calls import attention_arguments, document_mask_of
from tunecompile.ops import document_mask

HEADS, TOKENS, WIDTH = 3, 5, 4
LEAST = torch.finfo(torch.float32).min


def graph_of(fn, dtype=torch.float32, values=None):
    """The graph of a function of q, k, v, a document mask, and numbers to add."""
    q, k, v = (torch.randn(1, HEADS, TOKENS, WIDTH, dtype=dtype) for _ in range(3))
    offsets, bias = torch.tensor([0, 2, TOKENS], dtype=torch.int32), torch.randn(TOKENS, TOKENS)

    def whole(q, k, v, offsets, bias):
        return fn(q, k, v, document_mask(offsets, 3, TOKENS, 0), bias)

    graph = traced(whole, q, k, v if values is None else v.to(values), offsets, bias).graph
    return graph, dict(zip(("q", "k", "v", "offsets", "bias"), graph.find_nodes(op="placeholder")))


MASKS = {
    "as it is": (lambda m, b: m, True),
    "all of it": (lambda m, b: m[:, :, :, :TOKENS], True),
    "all of it in steps of one": (lambda m, b: m[:, :, 0::1], True),
    "all of its rows": (lambda m, b: m[:], True),
    "numbers to add": (lambda m, b: torch.where(m, 0.0, LEAST), True),
    "numbers to add, cast": (lambda m, b: torch.where(m, 0.0, LEAST).to(torch.float64), True),
    "infinity to add": (lambda m, b: torch.where(m, 0, float("-inf")), True),
    "the least of fp16": (lambda m, b: torch.where(m, 0.0, -65504.0), True),
    "a part of its rows": (lambda m, b: m[:, :, :3], False),
    "behind the first": (lambda m, b: m[:, :, 1:], False),
    "every second": (lambda m, b: m[:, :, ::2], False),
    "a row": (lambda m, b: m[0], False),
    "with a dimension more": (lambda m, b: m[None], False),
    "little to add": (lambda m, b: torch.where(m, 0.0, -65503.0), False),
    "more than nothing to add": (lambda m, b: torch.where(m, 1.0, LEAST), False),
    "its opposite": (lambda m, b: torch.where(m, LEAST, 0.0), False),
    "numbers of a tensor": (lambda m, b: torch.where(m, 0.0, b), False),
    "whole numbers": (lambda m, b: m.to(torch.int64), False),
    "turned": (lambda m, b: ~m, False),
    "another": (lambda m, b: b, False),
    "both": (lambda m, b: m & (b > 0), False),
}


@pytest.mark.parametrize("name", MASKS)
def test_what_is_a_document_mask(name):
    make, is_one = MASKS[name]
    graph, _ = graph_of(lambda q, k, v, m, b: make(m, b))
    (call,) = graph.find_nodes(op="call_function", target=document_mask.overload)
    assert document_mask_of(graph.output_node().args[0]) is (call if is_one else None)
    assert document_mask_of(None) is document_mask_of(3) is None


def sdpa(q, k, v, m, **options):
    return F.scaled_dot_product_attention(q, k, v, m, **options)


def written(change):
    return lambda q, k, v, m, b: change(q @ k.mT, m, b).softmax(-1) @ v


FOUND = {
    "torch's": lambda q, k, v, m, b: sdpa(q, k, v, m),
    "torch's, by names": lambda q, k, v, m, b: F.scaled_dot_product_attention(query=q, key=k, value=v, attn_mask=m),
    "added": written(lambda s, m, b: s * 0.5 + torch.where(m, 0.0, LEAST)),
    "added before the factor": written(lambda s, m, b: (s + torch.where(m, 0.0, LEAST)) / 2.0),
    "added before a factor of one": written(lambda s, m, b: (s + torch.where(m, 0.0, LEAST)) * 1.0),
    "of pairs": written(lambda s, m, b: s + torch.where(m, 0.0, LEAST)),
}
NONE = {
    "without a mask": lambda q, k, v, m, b: sdpa(q, k, v, None),
    "under another": lambda q, k, v, m, b: sdpa(q, k, v, b),
    "two masks": written(lambda s, m, b: s + torch.where(m, 0.0, LEAST) + b),
    "a factor that turns": written(lambda s, m, b: (s + torch.where(m, 0.0, LEAST)) * -0.5),
    "a factor of nearly nothing": written(lambda s, m, b: (s + torch.where(m, 0.0, LEAST)) * 1e-35),
    "filled before the factor": written(lambda s, m, b: s.masked_fill(~m, LEAST) * 0.5),
    "another before the factor": written(lambda s, m, b: (s + b) * 0.5),
    "of turned queries": lambda q, k, v, m, b: (
        ((torch.einsum("bqhd,bhkd->bhqk", q.transpose(1, 2) * 1, k) + torch.where(m, 0.0, LEAST)) * 0.5).softmax(-1) @ v
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_attention_under_a_document_mask(name):
    graph, inputs = graph_of(FOUND[name])
    ((node, found),) = attention_calls(graph).items()
    call = found.arguments
    assert node is graph.output_node().args[0] and [call.query, call.key, call.value] == [inputs[n] for n in "qkv"]
    assert document_mask_of(call.mask) is not None and not call.dropout and not call.causal


@pytest.mark.parametrize("name", NONE)
def test_attention_under_none(name):
    assert not attention_calls(graph_of(NONE[name])[0])


@pytest.mark.parametrize(
    "args, kwargs",
    [
        ((), {"dropout_p": 0.1, "is_causal": True, "scale": 0.5, "enable_gqa": True}),
        ((0.1, True), {"scale": 0.5}),
    ],
)
def test_arguments_of_a_call(args, kwargs):
    graph, _ = graph_of(lambda q, k, v, m, b: sdpa(q, k, v, m))
    node = graph.output_node().args[0]
    node.args, node.kwargs = (*node.args, *args), kwargs
    call = attention_arguments(node)
    assert (call.query, call.key, call.value, call.mask) == node.args[:4]
    assert (call.dropout, call.causal, call.scale, call.sinks, call.softcap) == (0.1, True, 0.5, None, 0.0)


CASTS = {
    "scores in fp32": (lambda q, k: (q.float(), k.float()), torch.bfloat16, True),
    "as they are": (lambda q, k: (q, k), torch.bfloat16, False),
    "in fp64": (lambda q, k: (q.double(), k.double()), torch.bfloat16, False),
    "keys alone": (lambda q, k: (q.float().sin(), k.float()), torch.bfloat16, False),
    "values of another dtype": (lambda q, k: (q.float(), k.float()), torch.float32, False),
}


@pytest.mark.parametrize("name", CASTS)
def test_queries_and_keys_that_are_cast_for_exact_scores(name):
    """They are read as they were, if values have that dtype."""
    cast, values, narrow = CASTS[name]

    def fn(q, k, v, m, b):
        wide, keys = cast(q, k)
        scores = wide @ keys.mT * 0.5 + torch.where(m, 0.0, LEAST)
        return scores.softmax(-1).to(v.dtype) @ v

    graph, inputs = graph_of(fn, torch.bfloat16, values)
    ((_, found),) = attention_calls(graph).items()
    call = found.arguments
    assert ((call.query, call.key) == (inputs["q"], inputs["k"])) == (narrow or name == "as they are")
    wide = [node for node in graph.nodes if node.target == "to" and node.args[0] in (inputs["q"], inputs["k"])]
    assert not narrow or (len(wide) == 2 and found.inside.issuperset(wide))


def attend(*given, **options):
    return F.scaled_dot_product_attention(*given, **options)


CAUSAL = {
    "one": (lambda q, k, v, m, b: attend(q, k, v, is_causal=True), 1),
    "two": (lambda q, k, v, m, b: attend(attend(q, k, v, None, 0.0, True), k, v, is_causal=True), 2),
    "none": (lambda q, k, v, m, b: q + k, 0),
    "not causal": (lambda q, k, v, m, b: attend(q, k, v), None),
    "one of two": (lambda q, k, v, m, b: attend(attend(q, k, v), k, v, is_causal=True), None),
    "a mask": (lambda q, k, v, m, b: attend(attend(q, k, v, attn_mask=m), k, v, is_causal=True), None),
    "other keys": (lambda q, k, v, m, b: attend(q, k[:, :, 1:], v[:, :, 1:], is_causal=True), None),
    "written out": (
        lambda q, k, v, m, b: attend(((q @ k.mT).softmax(-1) @ v), k, v, is_causal=True),
        None,
    ),
}


@pytest.mark.parametrize("name", CAUSAL)
def test_attention_that_is_causal_by_its_argument(name):
    """All of a graph, or none: with a mask in its place, any other would be another attention."""
    make, count = CAUSAL[name]
    assert causal_calls([graph_of(make)[0]]) == count
    with_one = causal_calls([graph_of(make)[0], graph_of(CAUSAL["one"][0])[0]])
    assert with_one == (None if count is None else count + 1)
    both_ways = {"not causal": 1, "none": 0}.get(name)
    assert causal_calls([graph_of(make)[0]], causal=False) == both_ways
