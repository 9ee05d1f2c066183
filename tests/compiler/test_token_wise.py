"""Which graphs leave tokens apart, by the operations that they are made of."""

import pytest
import torch
import torch.nn.functional as F

from tunecompile._torch.dynamo import mark_dynamic
from tunecompile._torch.fake_tensors import copied
from tunecompile.compiler.token_wise.graph import (
    hands_on,
    is_told_of_images,
    why_not_token_wise,
)
from tunecompile.ops import branch_rows, document_mask, first_copies, short_convolution

WIDTH, HEADS = 12, 3
LINEAR, TABLE = torch.randn(WIDTH, WIDTH), torch.randn(20, WIDTH)
TRAINED = torch.randn(WIDTH, requires_grad=True)


def call(layer, x, mask):
    return layer(x, mask()) if layer.__code__.co_argcount == 2 else layer(x)


def reason(layer):
    """What is found of a function of a row [1, N, 12] and, if it takes one, a mask [1, 1, N, N]."""
    found = []

    def backend(gm, inputs):
        found.append(why_not_token_wise(gm))
        return gm.forward

    def run(x, offsets, longest):
        return call(layer, x, lambda: document_mask(offsets, longest.shape[0], x.shape[1], 0))

    torch._dynamo.reset()
    row, offsets, longest = torch.randn(1, 8, WIDTH), torch.tensor([0, 3, 8]).int(), torch.empty(5, 0)
    for tensor, dim in ((row, 1), (offsets, 0), (longest, 0)):
        mark_dynamic(tensor, dim)
    torch.compile(run, backend=backend, fullgraph=True)(row, offsets, longest)
    return found[0]


def split(x):
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def attention(x, mask, **options):
    return F.scaled_dot_product_attention(split(x), split(x), split(x), attn_mask=mask, **options)


def joined(heads):
    return heads.transpose(1, 2).flatten(2)


def tokens_first(layer):
    """A layer of [T, B, 12], as torch's own modules have them by default."""
    if layer.__code__.co_argcount == 2:
        return lambda x, mask: layer(x.transpose(0, 1), mask).transpose(0, 1)
    return lambda x: layer(x.transpose(0, 1)).transpose(0, 1)


def attention_of_tokens_first(x, mask):
    q = x.unflatten(-1, (HEADS, -1)).permute(1, 2, 0, 3)
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask).permute(2, 0, 1, 3).flatten(2)


def attention_of_torchs_modules(x, mask):
    """Rows and heads share a dimension, as in `torch.nn.MultiheadAttention`."""
    length, rows, _ = x.shape
    q = F.linear(x, LINEAR).view(length, rows * HEADS, -1).transpose(0, 1).view(rows, HEADS, length, -1)
    out = F.scaled_dot_product_attention(q, q, q, attn_mask=mask).permute(2, 0, 1, 3).contiguous()
    return F.linear(out.view(length * rows, -1), LINEAR).view(length, rows, -1)


def attention_written_out(x, mask):
    """What its scores read is read by nothing else, so that it would be gone where the result stands."""
    q, k, v = (split(F.linear(x, LINEAR * n)) for n in (1, 2, 3))
    scores = q @ k.transpose(2, 3) * 0.3 + torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    return joined(scores.softmax(-1) @ v)


class Frozen(torch.autograd.Function):
    """As bitsandbytes multiplies by weights in 4 bits."""

    @staticmethod
    def forward(ctx, x):
        return F.linear(x, LINEAR)

    @staticmethod
    def backward(ctx, grad):
        return grad @ LINEAR


class Averaged(torch.autograd.Function):
    """The number of tokens is a factor."""

    @staticmethod
    def forward(ctx, x):
        ctx.tokens = x.shape[1]
        return x * 1.0 / x.shape[1]

    @staticmethod
    def backward(ctx, grad):
        return grad / ctx.tokens


def _numbers(x):
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


APART = {
    "a function of autograd": lambda x: Frozen.apply(x * TRAINED),
    "linear": lambda x: F.linear(x, LINEAR) @ LINEAR,
    "norm": lambda x: F.rms_norm(x, (WIDTH,)) + F.layer_norm(x, (WIDTH,)),
    "softmax over the width": lambda x: x.softmax(-1) * x.mean(-1, keepdim=True),
    "attention": lambda x, m: joined(attention(x, m)),
    "attention that is written out": attention_written_out,
    "attention of narrow values": lambda x, m: joined(
        F.scaled_dot_product_attention(split(x), split(x), split(x)[..., :2], m)
    ),
    "all of the mask": lambda x, m: joined(attention(x, m[:, :, :, : x.shape[1]])),
    "rows and back": lambda x: (x.view(-1, WIDTH) @ LINEAR).view(x.shape),
    "heads as rows": lambda x: (x.reshape(-1, WIDTH // HEADS) * 2).view(x.shape),
    "parts of one projection": lambda x: sum(x.view(1, -1, 3, 4).permute(2, 0, 1, 3).unbind(0)),
    "all of it": lambda x: x[:, :, :] + x[:],
    "as many as there are, from behind": lambda x: x[:, -x.shape[1] :],
    "sizes of shapes": lambda x: x.reshape(x.shape[0], x.shape[1], 3, 4).view(x.shape[0], -1, WIDTH),
    "complex numbers": lambda x: torch.view_as_real(_numbers(x) * _numbers(x).sum(-1, True)).flatten(2),
    "halves": lambda x: torch.cat([x[..., 6:], -x[..., :6]], -1),
    "a table": lambda x: F.embedding((x.sum(-1) > 0).long(), TABLE),
    "a table of rows": lambda x: TABLE[(x.sum(-1) > 0).long()],
    "a table, by columns": lambda x: TABLE[None].gather(1, (x > 0).long()),
    "numbers of a token, repeated": lambda x: x[..., :1].repeat(1, 1, WIDTH),
    "experts' scores": lambda x: x.topk(2, -1).values.sum(-1, keepdim=True) * x,
    "dropout": lambda x: F.dropout(x, 0.5),
    "attention, tokens first": tokens_first(attention_of_tokens_first),
    "attention of torch's modules": tokens_first(attention_of_torchs_modules),
    "linear and norm, tokens first": tokens_first(lambda x: F.layer_norm(F.linear(x, LINEAR), (WIDTH,)).softmax(-1)),
    "one number a token": lambda x: x.sum(-1),
    "zeros": lambda x: torch.zeros_like(x) + x.new_ones(x.shape[1], 1) * x,
}

MIXED = {
    "a function of autograd": lambda x: Averaged.apply(x * TRAINED),
    "mean over rows": lambda x: x - x.mean(0, keepdim=True),
    "the first row": lambda x: x + x[0],
    "one row": lambda x: x[:1] * 2,
    "rows twice": lambda x: torch.cat([x, x])[1:],
    "divided by the length": lambda x: x / x.shape[1],
    "scores by the length": lambda x, m: joined(attention(x, m, scale=1 / x.shape[1])),
    "filled with the length": lambda x: x + x.new_full((1,), x.shape[1]),
    "other code for long rows": lambda x: x * 2 if x.shape[1] > 4096 else x,
    "complex numbers, over tokens": lambda x: torch.view_as_real(_numbers(x) * _numbers(x)[:, :1]).flatten(2),
    "complex numbers of two tokens": lambda x: torch.view_as_real(
        torch.view_as_complex(x.unflatten(1, (-1, 2)).transpose(2, 3).contiguous())
    ).reshape(x.shape),
    "mean over tokens": lambda x: x - x.mean(1, keepdim=True),
    "mean over all": lambda x: x * x.mean(),
    "extremes": lambda x: x / x.abs().max(),
    "running sum": lambda x: x.cumsum(1),
    "places": lambda x: x * torch.arange(x.shape[1])[:, None],
    "length": lambda x: x @ LINEAR + torch.arange(x.shape[1]).float().mean(),
    "shifted": lambda x: torch.cat([x[:, :1], x[:, :-1]], 1),
    "rolled": lambda x: x.roll(1, 1),
    "flipped": lambda x: x.flip(1),
    "softmax over tokens": lambda x: x.softmax(1),
    "convolution": lambda x: F.conv1d(x.transpose(1, 2), torch.ones(WIDTH, WIDTH, 3), padding=1).transpose(1, 2),
    "product over tokens": lambda x: x @ (x.transpose(1, 2) @ x),
    "written-out attention": lambda x, m: (x @ x.transpose(1, 2)).masked_fill(~m[:, 0], -1e9).softmax(-1) @ x,
    "attention without a mask": lambda x: joined(attention(x, None, is_causal=True)),
    "attention with another mask": lambda x, m: joined(attention(x, m & m.flip(-1))),
    "scrambled": lambda x: x.transpose(1, 2).reshape(x.shape),
    "all but the first": lambda x: F.pad(x[:, 1 - x.shape[1] :], (0, 0, 1, 0)),
    "first token": lambda x: x + x[:, :1],
    "sorted": lambda x: x.sort(1).values,
    "looked up in rows": lambda x: x[0][(x.sum(-1) > 0).long()],
    "looked up in columns": lambda x: x.gather(1, (x > 0).long()),
    "repeated": lambda x: x[:, :1].repeat(1, 4, 1).sum(1, keepdim=True) + x,
    "tokens repeated": lambda x: x.repeat(1, 2, 1).view(1, 2, -1, WIDTH)[:, 1],
    "rows repeated": lambda x: x.repeat(2, 1, 1)[1:],
    "rows behind, repeated": tokens_first(lambda x: x.repeat(1, 2, 1)[:, 1:]),
    "permuted": lambda x: x[:, torch.randperm(4)],
    "expanded over tokens": lambda x: x + x[:, 0].unsqueeze(1).expand(x.shape),
    "one number a call": lambda x: x.sum(),
    "rows by themselves": lambda x: x.view(-1, WIDTH),
    "mean over rows, tokens first": tokens_first(lambda x: x - x.mean(1, keepdim=True)),
    "softmax over rows, tokens first": tokens_first(lambda x: x.softmax(1)),
    "rows joined to heads": tokens_first(lambda x: x.reshape(x.shape[0], HEADS, -1).softmax(1).reshape(x.shape)),
    "products of rows": tokens_first(lambda x: x * torch.bmm(x.transpose(1, 2), x).sum(-1).unsqueeze(1)),
    "pairs of rows": tokens_first(lambda x: (x.unsqueeze(1) - x.unsqueeze(2)).square().sum(1)),
    "norm over rows, too": tokens_first(lambda x: F.layer_norm(x, (1, WIDTH))),
    "rows summed by a product": tokens_first(lambda x: x + torch.bmm(x.sum(-1, keepdim=True), x)),
    "the mask itself": lambda x, m: m,
}


@pytest.mark.parametrize("name", APART)
def test_tokens_are_left_apart(name):
    assert reason(APART[name]) is None


@pytest.mark.parametrize("name", MIXED)
def test_tokens_may_be_mixed(name):
    assert reason(MIXED[name]) is not None


def test_the_operation_and_its_line_are_named():
    found = reason(MIXED["running sum"])
    assert found.code == "mixes-tokens" and "cumsum at test_token_wise.py" in str(found)


@pytest.mark.parametrize(
    "layer, code",
    [
        (lambda x, m: joined(attention(x, m, dropout_p=1.0)), "attention-dropout"),
        (lambda x: (x, x.view(-1, WIDTH)), "output-holds-more"),
        (lambda x: (x, split(x).transpose(0, 1)), "output-holds-more"),
        (lambda x: (x, split(x).transpose(2, 3)), "output-holds-more"),
        (lambda x: (x, split(x).squeeze(0)), "output-holds-more"),
    ],
)
def test_why_a_layer_stays_as_it_is(layer, code):
    assert reason(layer).code == code


def convolved(x, document_offsets):
    return short_convolution(x, torch.ones(WIDTH, 3), None, document_offsets, False)


def told_otherwise(x, boundaries):
    return short_convolution(x, torch.ones(WIDTH, 3), None, boundaries, False)


def told_by_name(x, document_offsets):
    return short_convolution(x, torch.ones(WIDTH, 3), bias=None, offsets=document_offsets, silu=False)


def told_of_none(x, document_offsets):
    return short_convolution(x, torch.ones(WIDTH, 3), None, None, False)


@pytest.mark.parametrize(
    "layer, apart", [(convolved, True), (told_by_name, True), (told_otherwise, False), (told_of_none, False)]
)
def test_ops_that_are_told_of_documents(layer, apart):
    """They keep tokens apart where their documents are those of the row: a collator's count padding."""
    found = []

    def backend(gm, inputs):
        found.append(why_not_token_wise(gm))
        return gm.forward

    row, offsets = torch.randn(1, 8, WIDTH), torch.tensor([0, 3, 8]).int()
    mark_dynamic(row, 1)
    mark_dynamic(offsets, 0)
    torch._dynamo.reset()
    torch.compile(layer, backend=backend, fullgraph=True)(row, offsets)
    assert (found[0] is None) is apart, found
    assert apart or found[0].code == "mixes-tokens"


def in_rows(x, offsets, *places):
    return first_copies(convolved(branch_rows(x, *places), offsets), *places[:2])


def mixed_rows(x, offsets, *places):
    rows = branch_rows(x, *places)
    return first_copies(convolved(rows - rows.mean(1, keepdim=True), offsets), *places[:2])


def rows_that_are_returned(x, offsets, *places):
    return convolved(branch_rows(x, *places), offsets)


def rows_of_other_places(x, offsets, rows, *places):
    return first_copies(convolved(branch_rows(x, rows + 0, *places), offsets), rows, places[0])


def not_in_rows(x, offsets, *places):
    return convolved(x, offsets)


def not_of_rows(x, offsets, *places):
    return first_copies(convolved(branch_rows(x, *places), offsets.clone()), *places[:2])


@pytest.mark.parametrize(
    "layer, code",
    [
        (in_rows, None),
        (mixed_rows, "mixes-tokens"),
        (rows_of_other_places, "mixes-tokens"),
        (not_in_rows, "mixes-tokens"),
        (not_of_rows, "states-of-branches"),
        (rows_that_are_returned, "output-holds-more"),
    ],
)
def test_ops_of_rows_that_share_tokens(layer, code):
    found = []

    def backend(gm, inputs):
        found.append(why_not_token_wise(gm, is_tree=True))
        return gm.forward

    def run(x, row_offsets, row_tokens, first_places, further_places):
        return layer(x, row_offsets, row_tokens, first_places, further_places)

    given = [torch.zeros(shape, dtype=torch.int32) for shape in ((4,), (16,), (2, 8), (2, 8))]
    given.insert(0, torch.randn(1, 8, WIDTH))
    for tensor, dims in zip(given, (1, 0, 0, 1, [0, 1])):
        mark_dynamic(tensor, dims)
    torch._dynamo.reset()
    torch.compile(run, backend=backend, fullgraph=True)(*given)
    assert (found[0] and found[0].code) == code, found


def graph_of(layer, change):
    """A layer's graph with another input or constant, as other versions of Dynamo, or other tracers, make it."""
    found = []

    def backend(gm, inputs):
        found.append(copied(gm))
        return gm.forward

    torch._dynamo.reset()
    row = torch.randn(1, 8, WIDTH)
    mark_dynamic(row, 1)
    torch.compile(layer, backend=backend, fullgraph=True)(row, LINEAR[:1])
    change(found[0])
    found[0].recompile()
    return found[0]


def as_a_constant(gm):
    """The weight belongs to the graph."""
    weight = gm.graph.find_nodes(op="placeholder")[-1]
    gm.register_buffer("weight", LINEAR[:1])
    with gm.graph.inserting_before(weight):
        weight.replace_all_uses_with(gm.graph.get_attr("weight"))
    gm.graph.erase_node(weight)


def as_a_number(gm):
    """The second input is a number of Python's."""
    gm.graph.find_nodes(op="placeholder")[-1].meta["example_value"] = 0.5


@pytest.mark.parametrize("change", [as_a_constant, as_a_number])
def test_real_weights_and_numbers_are_understood(change):
    """Each token meets them by itself."""
    assert why_not_token_wise(graph_of(lambda x, w: x * w, change)) is None


def test_heads_that_a_layer_hands_on_are_counted():
    """Keys and values beside its result, which the caller has to find again; no weights, nor what has no heads."""
    found = []

    def backend(gm, inputs):
        found.append(hands_on(gm))
        return gm.forward

    def keys(x):
        weights = split(x) @ split(x).transpose(2, 3)
        return x, split(x), split(x * 2), weights, x[:, :, None, None, 0] * LINEAR[:1], LINEAR[None, None]

    row = torch.randn(1, 8, WIDTH)
    mark_dynamic(row, 1)
    torch.compile(keys, backend=backend, fullgraph=True)(row)
    assert found == [2] and reason(lambda x: (x, split(x))) is None


def of_patches(layer):
    """What is found of a function of a tower's patches [N, 12], a mask of its images, and what makes one of other bounds."""
    found = []

    def backend(gm, inputs):
        found.append((is_told_of_images(gm), why_not_token_wise(gm)))
        return gm.forward

    def run(x, image_offsets, longest, others):
        def other():
            return document_mask(others, longest.shape[0], len(x), 0, False)

        return layer(x, document_mask(image_offsets, longest.shape[0], len(x), 0, False), other)

    torch._dynamo.reset()
    given = torch.randn(8, WIDTH), torch.tensor([0, 3, 8, 8]).int(), torch.empty(5, 0), torch.tensor([0, 8]).int()
    for tensor in given:
        mark_dynamic(tensor, 0)
    torch.compile(run, backend=backend, fullgraph=True)(*given)
    ((told, reason),) = found
    assert told
    return reason


def of_images(x, mask):
    q = x.unflatten(-1, (HEADS, -1)).transpose(0, 1)[None]
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask).squeeze(0).transpose(0, 1).flatten(1)


def test_patches_that_are_told_apart():
    for layer in (
        lambda x, mask, other: x + of_images(x.sin() @ LINEAR, mask) * x.mean(-1, keepdim=True),
        lambda x, mask, other: of_images(x, mask)[None],
    ):
        assert of_patches(layer) is None


@pytest.mark.parametrize(
    ("layer", "code"),
    [
        (lambda x, mask, other: of_images(x, mask) - x.mean(0), "mixes-tokens"),
        (lambda x, mask, other: of_images(x, mask) - x.amax(), "mixes-tokens"),
        (lambda x, mask, other: of_images(x, mask).cumsum(0), "mixes-tokens"),
        (lambda x, mask, other: of_images(x, mask).flip(0), "mixes-tokens"),
        (lambda x, mask, other: of_images(x, mask) / len(x), "mixes-tokens"),
        (lambda x, mask, other: x.t() @ of_images(x, mask), "mixes-tokens"),
        (lambda x, mask, other: of_images(x, mask) + of_images(x, other()), "own-mask"),
        (lambda x, mask, other: (of_images(x, mask), x + 1), "output-holds-more"),
        (lambda x, mask, other: of_images(x, mask).view(-1, 4 * WIDTH), None),
    ],
)
def test_patches_that_may_not_be(layer, code):
    """The last one joins patches by four, which no prime number of them can be."""
    reason = of_patches(layer)
    assert reason is not None and code in (None, reason.code)
