"""Which rows of biases become part of a product by experts, and why others do not; seen on graphs that nobody runs."""

import pytest
import torch

from tests.support.passes.run import family, recognize
from tests.support.passes.traced import traced
from tunecompile.compiler.pass_manager import Context
from tunecompile.ops import grouped_lora_linear

PASSES = family("experts", "expert_biases")
EXPERTS, CHOICES, TOKENS, WIDTH, INNER = 4, 2, 12, 16, 8


def choose(scores):
    return torch.topk(scores, CHOICES)[1].reshape(-1)


def count(ids, chosen):
    return torch.histc(ids.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)


def add(made, bias, ids):
    return made + bias[ids]


def layer(
    choose=choose,
    sort=torch.sort,
    count=count,
    end=lambda counts: torch.cumsum(counts, dim=0, dtype=torch.int32),
    change=lambda ids, bias: ids,
    add=add,
    place=0,
):
    """A product by experts as transformers writes it, and a bias."""

    def fn(x, up, bias, scores):
        chosen = choose(scores)
        made = sort(chosen)
        ids, order = made[place], made[1]
        ends = end(count(ids, chosen))
        change(ids, bias)
        return add(torch._grouped_mm(x[order // CHOICES], up, offs=ends), bias, ids)

    return fn


def seen(fn, biases=EXPERTS, dtype=torch.bfloat16):
    """(The bias of the product, why it has none.)"""
    half = [(TOKENS, WIDTH), (EXPERTS, WIDTH, INNER), (biases, INNER), (TOKENS, EXPERTS)]
    x, up, bias, scores = (torch.randn(shape).bfloat16() for shape in half)
    gm, context = traced(fn, x, up, bias.to(dtype), scores), Context("test")
    recognize(PASSES, gm, context, tidy=True)
    (product,) = [node for node in gm.graph.nodes if node.target is grouped_lora_linear.overload]
    bias = product.args[grouped_lora_linear.parameters.index("bias")]
    return bias, "; ".join(reason for tally in context.tallies for reason in tally.refused)


INSIDE = {
    "as it is": layer(),
    "in place": layer(add=lambda made, bias, ids: made.add_(bias[ids])),
    "a method": layer(add=lambda made, bias, ids: made.add(bias[ids])),
    "a function, the bias first": layer(add=lambda made, bias, ids: torch.add(bias[ids], made)),
    "the bias first": layer(add=lambda made, bias, ids: bias[ids] + made),
    "read behind it, in place": layer(add=lambda made, bias, ids: (made.add_(bias[ids]), made * 2)),
    "counted by methods": layer(
        count=lambda ids, chosen: ids.to(torch.float32).histc(EXPERTS, 0, EXPERTS - 1),
        end=lambda counts: counts.cumsum(-1, dtype=torch.int32),
    ),
    "sorted by a method": layer(sort=lambda chosen: chosen.sort()),
    "chosen by a method": layer(choose=lambda scores: scores.topk(CHOICES)[1].view(-1).flatten()),
    "clamped above": layer(change=lambda ids, bias: ids.clamp_(max=EXPERTS - 1)),
    "clamped on both sides": layer(change=lambda ids, bias: ids.clamp_(0, EXPERTS - 1)),
    "another bias is changed": layer(change=lambda ids, bias: bias.clone().add_(1)),
}
OUTSIDE = {
    "of ids that may be negative": (layer(choose=lambda scores: (scores[:, :2] * 9).long().reshape(-1)), "other ids"),
    "of the values of a choice": (layer(choose=lambda scores: torch.topk(scores, 2)[0].long().view(-1)), "other ids"),
    "of all of an order": (layer(choose=lambda scores: torch.sort(scores)[1][:, :2].reshape(-1)), "other ids"),
    "sorted the other way": (layer(sort=lambda chosen: torch.sort(chosen, descending=True)), "other ids"),
    "of places": (layer(place=1), "other ids"),
    "counted of others": (layer(count=lambda ids, chosen: count(chosen, None)), "other ids"),
    "counted from one": (
        layer(count=lambda ids, chosen: torch.histc(ids.float(), bins=EXPERTS, min=1, max=EXPERTS)),
        "other ids",
    ),
    "counted up to one more": (
        layer(count=lambda ids, chosen: torch.histc(ids.float(), bins=EXPERTS, min=0, max=EXPERTS)),
        "other ids",
    ),
    "counts, not ends": (layer(end=lambda counts: counts.int()), "other ids"),
    "ends of others": (layer(end=lambda counts: torch.cumsum(counts * 1, 0, dtype=torch.int32)), "other ids"),
    "of other ids": (layer(add=lambda made, bias, ids: made + bias[ids.flip(0)]), "other ids"),
    "clamped below": (layer(change=lambda ids, bias: ids.clamp_(1)), "ids are changed"),
    "clamped to fewer": (layer(change=lambda ids, bias: ids.clamp_(max=EXPERTS - 2)), "ids are changed"),
    "clamped to more": (layer(change=lambda ids, bias: ids.clamp_(0, EXPERTS)), "ids are changed"),
    "changed": (layer(change=lambda ids, bias: ids.add_(0)), "ids are changed"),
    "by slices": (layer(add=lambda made, bias, ids: made + bias[ids, :]), "no bias of an expert"),
    "transposed": (layer(add=lambda made, bias, ids: made + bias.T[ids % 8, :1]), "no bias of an expert"),
    "read before": (
        layer(add=lambda made, bias, ids: (lambda twice: (made.add_(bias[ids]), twice))(made * 2)),
        "without its bias",
    ),
    "read beside": (layer(add=lambda made, bias, ids: (made + bias[ids], made * 2)), "without its bias"),
    "rows are changed in between": (
        layer(add=lambda made, bias, ids: (bias.clone().zero_(), made + bias[ids])[1]),
        "in between",
    ),
    "changed behind": (layer(add=lambda made, bias, ids: (made + bias[ids], bias.add_(1))), "behind it"),
    "made behind": (layer(add=lambda made, bias, ids: made + (bias * 2)[ids]), "behind it"),
    "twice": (layer(add=lambda made, bias, ids: made.add(bias[ids], alpha=2)), ""),
    "written over": (layer(add=lambda made, bias, ids: bias[ids].add_(made)), ""),
    "taken off": (layer(add=lambda made, bias, ids: made - bias[ids]), ""),
    "a number": (layer(add=lambda made, bias, ids: made + 1), ""),
    "itself": (layer(add=lambda made, bias, ids: made + made), ""),
    "no row of a table": (layer(add=lambda made, bias, ids: made + bias.sum(0)), ""),
}


@pytest.mark.parametrize("name", INSIDE)
def test_biases_of_experts(name):
    bias, why = seen(INSIDE[name])
    assert bias is not None and bias.op == "placeholder" and not why


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_is_no_bias_of_the_experts(name):
    fn, reason = OUTSIDE[name]
    bias, why = seen(fn)
    assert bias is None and reason in why and bool(why) == bool(reason), why


def test_biases_of_another_number_or_dtype():
    """A sum in fp32 stays; in place it would be rounded all the same."""
    assert "no bias of an expert" in seen(layer(), biases=EXPERTS + 1)[1]
    assert "the sum is torch.float32" in seen(layer(), dtype=torch.float32)[1]
    bias, why = seen(layer(add=lambda made, bias, ids: made.add_(bias[ids])), dtype=torch.float32)
    assert bias is not None and not why


def test_a_product_that_stays_as_it_is_says_why_in_the_graph():
    """Drawings show it."""
    inputs = torch.randn(3, WIDTH), torch.randn(EXPERTS, INNER, WIDTH), torch.tensor([2, 0, 2])
    gm = traced(lambda x, weight, ids: torch.bmm(weight[ids], x.unsqueeze(-1)), *inputs)
    recognize(PASSES, gm, Context("test"))
    missed = {node.name: node.meta["missed"] for node in gm.graph.nodes if "missed" in node.meta}
    assert list(missed) == ["bmm"] and "copy of its expert's matrix" in missed["bmm"]
