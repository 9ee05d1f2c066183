"""Sinks that scale the result of attention are those of a column beside the scores, and what only looks so stays.

All sizes are equal, so that dimensions taken for others would still fit. In fp64, with the gradients of sinks.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.support.passes import run
from tests.support.passes.run import family, random
from tests.support.passes.traced import traced
from tunecompile.compiler.attention_calls.written_out import read_written_out, written_out_attention
from tunecompile.ops import document_mask, varlen_attention

check = partial(run.check, passes=family("document_attention", "attention"))
N = 4
OFFSETS = torch.tensor([0, 1, 4], dtype=torch.int32)


def inputs(dtype=torch.float64):
    torch.manual_seed(0)
    return [*(random(1, N, N, N, dtype=dtype) for _ in range(3)), random(N, dtype=dtype)]


def scores_of(q, k, offsets, window=0):
    seen = document_mask(offsets, 3, N, window)
    return q @ k.mT * 0.3 + torch.where(seen, 0.0, torch.finfo(torch.float32).min).to(q.dtype)


def scaled(gate):
    """Attention whose result is scaled by what `gate` makes of scores and sinks."""

    def layer(q, k, v, sinks, offsets):
        scores = scores_of(q, k, offsets)
        return (scores.softmax(-1) @ v) * gate(scores, sinks)

    return layer


def granite(q, k, v, sinks, offsets):
    """As Granite's models with windows write it."""
    scores = scores_of(q, k, offsets, window=2)
    lse = torch.logsumexp(scores, dim=-1)
    scale = (lse - sinks.view(1, -1, 1)).to(torch.float32).sigmoid()
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    made = torch.matmul(F.dropout(weights, p=0.0, training=True), v)
    made = made * scale.unsqueeze(-1).to(made.dtype)
    return made.transpose(1, 2).contiguous()


def shares(scores, sinks, dim=-1):
    return scores.logsumexp(dim) - sinks.view(1, -1, 1)


FOUND = {
    "apart at the end": lambda s, sinks: shares(s, sinks).sigmoid().unsqueeze(-1),
    "apart by an index": lambda s, sinks: torch.sigmoid(shares(s, sinks))[..., None],
    "apart by a whole index": lambda s, sinks: torch.sigmoid(shares(s, sinks))[:, :, :, None],
    "apart before": lambda s, sinks: shares(s, sinks, 3).unsqueeze(3).sigmoid(),
    "apart from the first": lambda s, sinks: (s.logsumexp(-1, keepdim=True) - sinks.reshape(1, -1, 1, 1)).sigmoid(),
    "in a list": lambda s, sinks: (s.logsumexp([-1], True) - sinks.view(-1, 1, 1)).sigmoid(),
    "expanded": lambda s, sinks: (s.logsumexp(-1) - sinks.view(1, -1, 1).expand(1, N, N)).sigmoid()[..., None],
    "of other heads": lambda s, sinks: shares(s, sinks.flip(0)).sigmoid()[..., None],
    "cast": lambda s, sinks: shares(s.float().double(), sinks.float()).double().sigmoid()[..., None],
}
LEFT = {
    "turned": lambda s, sinks: (-shares(s, sinks)).sigmoid()[..., None],
    "exchanged": lambda s, sinks: (sinks.view(1, -1, 1) - s.logsumexp(-1)).sigmoid()[..., None],
    "a sum": lambda s, sinks: (s.logsumexp(-1) + sinks.view(1, -1, 1)).sigmoid()[..., None],
    "a multiple": lambda s, sinks: torch.sub(s.logsumexp(-1), sinks.view(1, -1, 1), alpha=2).sigmoid()[..., None],
    "no share": lambda s, sinks: shares(s, sinks).tanh()[..., None],
    "of half": lambda s, sinks: (shares(s, sinks) / 2).sigmoid()[..., None],
    "doubled": lambda s, sinks: (shares(s, sinks).sigmoid() * 2)[..., None],
    "of other scores": lambda s, sinks: shares(s * 2, sinks).sigmoid()[..., None],
    "of weights": lambda s, sinks: shares(s.softmax(-1), sinks).sigmoid()[..., None],
    "of queries": lambda s, sinks: shares(s, sinks, -2).sigmoid()[..., None],
    "of heads": lambda s, sinks: shares(s, sinks, 1).sigmoid()[..., None],
    "of all": lambda s, sinks: (s.logsumexp((-2, -1), True) - sinks.view(1, -1, 1, 1)).sigmoid(),
    "by width": lambda s, sinks: shares(s, sinks).sigmoid().unsqueeze(-2),
    "by query": lambda s, sinks: (s.logsumexp(-1) - sinks).sigmoid()[..., None],
    "by query, viewed": lambda s, sinks: (s.logsumexp(-1) - sinks.view(1, 1, -1)).sigmoid()[..., None],
    "by key": lambda s, sinks: (s.logsumexp(-1, keepdim=True) - sinks.view(1, 1, 1, -1)).sigmoid(),
    "by query, apart": lambda s, sinks: (s.logsumexp(-1, keepdim=True) - sinks.view(1, -1, 1)).sigmoid(),
    "with rows for heads": lambda s, sinks: (s.logsumexp(-1) - sinks.view(1, -1, 1, 1)).sigmoid(),
    "apart elsewhere": lambda s, sinks: shares(s, sinks).sigmoid().unsqueeze(2),
    "one for all heads": lambda s, sinks: shares(s, sinks[:1]).sigmoid()[..., None],
    "a number": lambda s, sinks: (s.logsumexp(-1) - 0.5).sigmoid()[..., None] + 0 * sinks.sum(),
    "by head and query": lambda s, sinks: (s.logsumexp(-1) - sinks.outer(sinks)[None]).sigmoid()[..., None],
    "squared": lambda s, sinks: (shares(s, sinks).sigmoid() ** 2)[..., None],
}


@pytest.mark.parametrize("layer", [granite, *map(scaled, FOUND.values())], ids=["granite", *FOUND])
def test_sinks_that_scale_become_those_of_the_op(layer):
    tol = 1e-6 if layer is granite or layer.__closure__[0].cell_contents is FOUND["cast"] else 1e-12
    seen = check(layer, *inputs(), OFFSETS, expect={"varlen_attention": 1}, tol=tol)
    (call,) = [node for node in seen.graphs[0].nodes if node.target is varlen_attention.overload]
    assert call.args[7] is not None and "logsumexp" not in str(seen.graphs[0])


@pytest.mark.parametrize("name", LEFT)
def test_what_looks_so(name):
    check(scaled(LEFT[name]), *inputs(), OFFSETS, expect={"document_mask": 1}, tol=1e-12, whole=False)


def before_the_mask(q, k, v, sinks, offsets):
    weights = scores_of(q, k, offsets).softmax(-1)
    return (weights @ v) * shares(q @ k.mT * 0.3, sinks).sigmoid()[..., None]


def of_other_queries(q, k, v, sinks, offsets):
    weights = scores_of(q, k, offsets).softmax(-1)
    return (weights @ v) * shares(scores_of(q.flip(1), k, offsets), sinks).sigmoid()[..., None]


def less_the_maximum(q, k, v, sinks, offsets):
    """No softmax changes by that, but sinks count for other shares."""
    scores = scores_of(q, k, offsets)
    scores = scores - scores.amax(-1, keepdim=True)
    return (scores.softmax(-1) @ v) * shares(scores, sinks).sigmoid()[..., None]


def beside_a_column(q, k, v, sinks, offsets):
    joined = torch.cat([scores_of(q, k, offsets), sinks.view(1, -1, 1, 1).expand(1, N, N, 1)], -1)
    return (joined.softmax(-1)[..., :-1] @ v) * shares(joined, sinks).sigmoid()[..., None]


def unscaled_too(q, k, v, sinks, offsets):
    scores = scores_of(q, k, offsets)
    made = scores.softmax(-1) @ v
    return made * shares(scores, sinks).sigmoid()[..., None] + made


def read_for_a_loss(q, k, v, sinks, offsets):
    scores = scores_of(q, k, offsets)
    total = scores.logsumexp(-1)
    made = (scores.softmax(-1) @ v) * (total - sinks.view(1, -1, 1)).sigmoid()[..., None]
    return made, total.square().sum()


def in_another_dtype(q, k, v, sinks, offsets):
    """The result is exact, and the product beside the scale was rounded."""
    scores = scores_of(q.float(), k.float(), offsets)
    return (scores.softmax(-1) @ v.float()) * shares(scores, sinks).double().sigmoid()[..., None]


def by_letters(q, k, v, sinks, offsets):
    """Heads stand elsewhere in the operands."""
    seen = torch.where(document_mask(offsets, 3, N, 0), 0.0, torch.finfo(torch.float32).min).to(q.dtype)
    scores = torch.einsum("hbqd,bhkd->bhqk", q.transpose(0, 1), k) + seen
    return (scores.softmax(-1) @ v) * shares(scores, sinks).sigmoid()[..., None]


@pytest.mark.parametrize(
    "layer", [less_the_maximum, beside_a_column, unscaled_too, read_for_a_loss, in_another_dtype, by_letters]
)
def test_scores_and_results_that_are_others(layer):
    seen = check(layer, *inputs(), OFFSETS, whole=False, tol=1e-6)
    assert "logsumexp" in str(seen.graphs[0]) and not seen.ops["varlen_attention"]


@pytest.mark.parametrize("layer", [before_the_mask, of_other_queries])
def test_attention_that_is_scaled_by_other_scores_has_no_sinks(layer):
    """It is the op, and what scales it stays."""
    seen = check(layer, *inputs(), OFFSETS, whole=False, tol=1e-12)
    (call,) = [node for node in seen.graphs[0].nodes if node.target is varlen_attention.overload]
    assert call.args[7] is None and "logsumexp" in str(seen.graphs[0])


def test_it_is_torchs_function_under_another_mask():
    def biased(q, k, v, sinks):
        return ((q @ k.mT + v).softmax(-1) @ v) * shares(q @ k.mT, sinks).sigmoid()[..., None]

    seen = check(biased, *inputs(), whole=False, tol=1e-12)
    assert "scaled_dot_product_attention" in str(seen.graphs[0]) and "logsumexp" in str(seen.graphs[0])


def test_sinks_under_another_mask_are_refused_as_such():
    def layer(q, k, v, sinks):
        scores = q @ k.mT + 0.1
        return (scores.softmax(-1) @ v) * shares(scores, sinks).sigmoid()[..., None]

    def biased(q, k, v, sinks):
        scores = q @ k.mT + v
        return (scores.softmax(-1) @ v) * shares(scores, sinks).sigmoid()[..., None]

    for fn, reason in (layer, "its scores are more"), (biased, "sinks under a mask"):
        (refused,) = check(fn, *inputs(), whole=False).refused
        assert reason in refused


@pytest.mark.parametrize("which, found", [("weights", True), ("product", False), ("lse", False)])
def test_of_what_nobody_reads_only_weights_are_left_out(which, found):
    def fn(q, k, v, sinks):
        scores = q @ k.mT
        weights, lse = scores.softmax(-1), scores.logsumexp(-1)
        product = weights @ v
        made = product * (lse - sinks.view(1, -1, 1)).sigmoid()[..., None]
        return made, {"weights": weights, "product": product, "lse": lse}[which]

    graph = traced(fn, *inputs()).graph
    made, _ = graph.output_node().args[0]
    assert (read_written_out(made, unread=True) is not None) == found
    assert (made in written_out_attention(graph, unread=True)) == found
