"""Grouped products of stacks, adapted or not, and the rows that go to experts and come back."""

from functools import partial

import pytest
import torch

from tests.support.passes import run
from tests.support.passes.run import family, random
from tunecompile.compiler.backend import Backend
from tunecompile.ops import adapted_stack
from tunecompile.passes import PIPELINE

check = partial(run.check, passes=family("experts", "expert_rows", "expert_biases", "expert_masks"))
EXPERTS, CHOICES, TOKENS, WIDTH, INNER = 4, 2, 12, 16, 8
TOL = 1.5e-2  #: in bfloat16, where a product is rounded once or twice


def bf16(*shape, grad=True, scale=1.0):
    return random(*shape, dtype=torch.bfloat16, grad=grad, scale=scale)


def routing():
    return torch.randint(EXPERTS, (TOKENS, CHOICES)), random(TOKENS, CHOICES, dtype=torch.bfloat16)


def sorted_rows(x, chosen):
    ids, order = torch.sort(chosen.reshape(-1))
    counts = torch.histc(ids.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
    return x[order // CHOICES], order, torch.cumsum(counts, dim=0, dtype=torch.int32)


def back(rows, order):
    places = torch.empty_like(order)
    places[order] = torch.arange(order.size(0), device=order.device)
    return rows[places].view(TOKENS, CHOICES, -1).sum(dim=1)


def whole(x, up, down, chosen, weights):
    rows, order, ends = sorted_rows(x, chosen)
    hidden = torch._grouped_mm(rows, up.transpose(-2, -1), offs=ends).relu()
    made = torch._grouped_mm(hidden, down.transpose(-2, -1), offs=ends)
    made = made * weights.reshape(-1)[order].unsqueeze(-1)
    return back(made, order).to(x.dtype)


def masked(x, up, down, chosen, weights):
    """As transformers 5.17 writes it, for rows that another rank has."""
    ids, order = torch.sort(chosen.reshape(-1))
    rows = x[order // CHOICES]
    counts = torch.histc(ids.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
    ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
    away = (ids >= EXPERTS).unsqueeze(-1)
    ids.clamp_(max=EXPERTS - 1)
    rows.masked_fill_(away, 0.0)
    hidden = torch.nn.functional.grouped_mm(rows, up.mT, offs=ends).masked_fill(away, 0.0).relu()
    made = torch._grouped_mm(hidden, down.permute(0, 2, 1), offs=ends).masked_fill(away, 0.0)
    return back(made * weights.reshape(-1)[order].unsqueeze(-1), order)


def with_biases(chooses=torch.topk, ids_of=lambda ids: ids, spare=0, in_place=True):
    """As transformers writes gpt-oss."""

    def layer(x, up, up_bias, down, down_bias, scores):
        weights, chosen = chooses(scores, CHOICES)
        ids, order = torch.sort(chosen.reshape(-1))
        rows = x[order // CHOICES]
        counts = torch.histc(ids.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
        away = (ids >= EXPERTS).unsqueeze(-1)
        ids.clamp_(max=EXPERTS - 1 - spare)
        hidden = torch._grouped_mm(rows, up, offs=ends)
        hidden = hidden.add_(up_bias[ids_of(ids)]) if in_place else hidden + up_bias[ids_of(ids)]
        hidden = hidden.masked_fill(away, 0.0).relu()
        made = torch._grouped_mm(hidden, down, offs=ends)
        made.add_(down_bias[ids])
        return back(made.masked_fill(away, 0.0) * weights.reshape(-1)[order].unsqueeze(-1), order)

    return layer


def stacks_and_biases(trained=True):
    return (
        bf16(EXPERTS, WIDTH, INNER, grad=trained, scale=0.3),
        bf16(EXPERTS, INNER, grad=trained),
        bf16(EXPERTS, INNER, WIDTH, grad=trained, scale=0.3),
        random(EXPERTS, WIDTH, grad=trained),  # in fp32, as under autocast
    )


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("in_place", [True, False])
def test_biases_are_part_of_products(trained, in_place):
    scores = bf16(TOKENS, EXPERTS)
    products = {"grouped_lora_linear": 2, "spread_rows": 2, "collect_rows": 1, "inverse_order": 1}
    inputs = bf16(TOKENS, WIDTH), *stacks_and_biases(trained), scores
    seen = check(with_biases(in_place=in_place), *inputs, expect=products, tol=TOL)
    left = str(seen.graphs[0])
    assert "add" not in left and "masked_fill" not in left and "up_bias" in left, left


@pytest.mark.parametrize(
    "other, reason",
    [
        (with_biases(chooses=lambda scores, k: (scores[:, :k].exp(), scores[:, :k].argsort(-1))), "other ids"),
        (with_biases(ids_of=lambda ids: (ids + 1) % EXPERTS), "other ids"),
        (with_biases(spare=1), "changed"),
    ],
)
def test_other_biases_are_added_as_they_are(other, reason):
    """Of ids that may be below 0, of other ids, of ids that a clamp moves to another expert."""
    inputs = bf16(TOKENS, WIDTH), *stacks_and_biases(), bf16(TOKENS, EXPERTS)
    products = {"grouped_lora_linear": 2, "spread_rows": 2, "collect_rows": 1, "inverse_order": 1}
    seen = check(other, *inputs, expect=products, tol=TOL)
    assert "add" in str(seen.graphs[0]) and any(reason in told for told in seen.refused), seen.refused


@pytest.mark.parametrize("layer", [whole, masked])
@pytest.mark.parametrize("trained", [False, True])
def test_a_layer(layer, trained):
    seen = check(
        layer,
        bf16(TOKENS, WIDTH),
        bf16(EXPERTS, INNER, WIDTH, grad=trained, scale=0.3),
        bf16(EXPERTS, WIDTH, INNER, grad=trained, scale=0.3),
        *routing(),
        expect={"grouped_lora_linear": 2, "spread_rows": 2, "collect_rows": 1, "inverse_order": 1},
        tol=TOL,
    )
    products = [n for n in seen.graphs[0].nodes if "grouped_lora_linear" in str(n.target)]
    assert str(products[1].args[0].target).count("mul"), "the second product reads weighted rows"
    assert "masked_fill" not in str(seen.graphs[0]), "what nobody's rows are set to, products give"


@pytest.mark.parametrize("layer", [whole, masked])
def test_rows_are_not_saved_behind_a_mask_either(layer):
    """They are as large as the tokens times their experts, and a gather away."""
    backend = Backend("test", PIPELINE, "eager")
    stacks = (bf16(EXPERTS, INNER, WIDTH, grad=False), bf16(EXPERTS, WIDTH, INNER, grad=False))
    torch.compile(layer, backend=backend)(bf16(TOKENS, WIDTH), *stacks, *routing()).sum().backward()
    (context,) = backend.contexts
    saved, rows = [size for _, size in context.saved], TOKENS * CHOICES * torch.bfloat16.itemsize
    assert rows * INNER in saved and rows * WIDTH not in saved, context.saved


def adapted(across=False, transposed=False, read_elsewhere=False):
    def layer(x, weight, a, b, ends):
        stack = adapted_stack(weight, [a], [b], [2.0], transposed)
        turned = stack if transposed != across else stack.transpose(-2, -1)
        made = torch._grouped_mm(x, turned, offs=ends)
        return (made, stack.sum()) if read_elsewhere else made

    return layer


def stacks(transposed, width=WIDTH, columns=INNER):
    shape = (EXPERTS, width, columns) if transposed else (EXPERTS, columns, width)
    return (
        bf16(TOKENS, width),
        bf16(*shape, grad=False, scale=0.3),
        random(EXPERTS * 3, width, scale=0.3),
        random(columns, 3 * EXPERTS, scale=0.3),
        torch.tensor([3, 3, 9, 12], dtype=torch.int32),
    )


@pytest.mark.parametrize("transposed", [False, True])
def test_adapters(transposed):
    check(adapted(transposed=transposed), *stacks(transposed), expect={"grouped_lora_linear": 1}, tol=TOL)


def test_a_stack_that_is_read_elsewhere_is_written_out_too():
    check(adapted(read_elsewhere=True), *stacks(False), expect={"grouped_lora_linear": 1, "adapted_stack": 1}, tol=TOL)


def test_adapters_across_the_product_are_left():
    seen = check(adapted(across=True), *stacks(False, WIDTH, WIDTH), expect={"adapted_stack": 1}, tol=TOL)
    assert "the other way round" in str(seen.refused)


@pytest.mark.parametrize(
    "product",
    [
        lambda x, weight, ids: torch.bmm(weight[ids], x.unsqueeze(-1)).squeeze(-1),
        lambda x, weight, ids: torch.bmm(x.unsqueeze(1), weight[ids].transpose(1, 2)).squeeze(1),
    ],
)
def test_copies_of_matrices_are_told(product):
    """As transformers' batched_mm writes it, for a few tokens."""
    seen = check(product, random(3, WIDTH), random(EXPERTS, INNER, WIDTH), torch.tensor([2, 0, 2]))
    assert "copy of its expert's matrix" in str(seen.refused)


@pytest.mark.parametrize("what", ["stack", "weight", "b"])
def test_a_stack_that_is_mutated_is_left(what):
    def layer(x, weight, a, b, ends):
        weight, b = weight.clone(), b.clone()
        stack = adapted_stack(weight, [a], [b], [2.0], False)
        {"stack": stack, "weight": weight, "b": b.view(-1)}[what].mul_(2)
        return torch._grouped_mm(x, stack.transpose(-2, -1), offs=ends)

    x, *others = stacks(False)
    seen = check(layer, x.detach(), *(o.detach() for o in others), expect={"adapted_stack": 1}, tol=TOL)
    assert "mutated" in str(seen.refused)


def test_weights_wait_for_what_is_mutated_behind_the_product():
    def layer(x, up, chosen, weights):
        rows, order, ends = sorted_rows(x, chosen)
        made = torch._grouped_mm(rows, up.transpose(-2, -1), offs=ends)
        rows.mul_(2)
        return back(made * weights.reshape(-1)[order].unsqueeze(-1), order), rows

    check(
        layer,
        bf16(TOKENS, WIDTH, grad=False),
        bf16(EXPERTS, INNER, WIDTH, grad=False),
        *(r.detach() for r in routing()),
        tol=TOL,
    )


def biased(x, up, bias, chosen, weights):
    """A bias is added behind the product, so that weights cannot go before it."""
    rows, order, ends = sorted_rows(x, chosen)
    made = torch._grouped_mm(rows, up.transpose(-2, -1), offs=ends)
    made.add_(bias[torch.sort(chosen.reshape(-1))[0]])
    return back(made * weights.reshape(-1)[order].unsqueeze(-1), order)


def read_twice(x, up, bias, chosen, weights):
    rows, order, ends = sorted_rows(x, chosen)
    made = torch._grouped_mm(rows, up.transpose(-2, -1), offs=ends)
    return back(made * weights.reshape(-1)[order].unsqueeze(-1), order) + made.sum() + bias.sum()


@pytest.mark.parametrize("layer", [biased, read_twice])
def test_weights_stay_behind_what_they_weigh(layer):
    seen = check(
        layer,
        bf16(TOKENS, WIDTH),
        bf16(EXPERTS, INNER, WIDTH, grad=False, scale=0.3),
        bf16(EXPERTS, INNER),
        *routing(),
        expect={"grouped_lora_linear": 1, "spread_rows": 2, "collect_rows": 1, "inverse_order": 1},
        tol=TOL,
    )
    (product,) = [n for n in seen.graphs[0].nodes if "grouped_lora_linear" in str(n.target)]
    assert "spread_rows" in str(product.args[0].target)


def test_fp32_goes_by_the_op_of_transformers():
    pytest.importorskip("transformers.integrations.moe")

    def layer(x, weight, ends):
        return torch.ops.transformers.grouped_mm_fallback(x, weight.transpose(-2, -1), offs=ends)

    check(
        layer,
        random(TOKENS, WIDTH),
        random(EXPERTS, INNER, WIDTH, grad=False),
        torch.tensor([3, 3, 9, 12], dtype=torch.int32),
        expect={"grouped_lora_linear": 1},
    )


def halves_of_them(x, chosen):
    order = torch.sort(chosen.reshape(-1))[1]
    return x[(order // CHOICES)[::2]]


def by_another_number(x, chosen):
    order = torch.sort(chosen.reshape(-1))[1]
    return x[order // 3]


def not_the_inverse(x, chosen):
    order = torch.sort(chosen.reshape(-1))[1]
    places = torch.empty_like(order)
    places[order] = torch.arange(order.size(0)).flip(0)
    return x.repeat(CHOICES, 1)[places].view(TOKENS, CHOICES, -1).sum(1)


def only_sorted(x, chosen):
    order = torch.sort(chosen.reshape(-1))[1]
    return x.repeat(CHOICES, 1)[order]


@pytest.mark.parametrize("reads", [halves_of_them, by_another_number, not_the_inverse, only_sorted])
def test_other_reads_are_left(reads):
    check(reads, random(TOKENS, WIDTH), routing()[0], expect={})


def test_a_sum_in_another_dtype():
    """As autocast on a GPU sums."""

    def layer(x, chosen):
        order = torch.sort(chosen.reshape(-1))[1]
        places = torch.empty_like(order)
        places[order] = torch.arange(order.size(0))
        return x[order // CHOICES][places].view(TOKENS, CHOICES, -1).sum(dim=1, dtype=torch.float32)

    check(
        layer,
        bf16(TOKENS, WIDTH),
        routing()[0],
        expect={"spread_rows": 1, "collect_rows": 1, "inverse_order": 1},
        tol=TOL,
    )


def test_sums_over_another_dim_keep_their_rows_apart():
    def layer(x, chosen):
        order = torch.sort(chosen.reshape(-1))[1]
        rows = x[order // CHOICES]
        places = torch.empty_like(order)
        places[order] = torch.arange(order.size(0))
        return rows[places].view(TOKENS, CHOICES, -1).sum(dim=2)

    check(layer, random(TOKENS, WIDTH), routing()[0], expect={"spread_rows": 2, "inverse_order": 1})


def with_mask(make, before=lambda ids: None, value=0.0):
    """A product whose rows, and whose result, are set to a value under a mask."""

    def layer(x, up, chosen):
        ids, order = torch.sort(chosen.reshape(-1))
        counts = torch.histc(ids.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
        before(ids)
        mask = make(ids).unsqueeze(-1)
        rows = x[order // CHOICES].masked_fill(mask, value)
        return torch._grouped_mm(rows, up.mT, offs=ends).masked_fill(mask, value).relu()

    return layer


@pytest.mark.parametrize(
    "layer, kept",
    [
        (with_mask(lambda ids: ids >= EXPERTS), False),
        (with_mask(lambda ids: ids >= EXPERTS - 1), True),
        (with_mask(lambda ids: ids < EXPERTS), True),
        (with_mask(lambda ids: ids >= EXPERTS, value=1.0), True),
        (with_mask(lambda ids: ids >= EXPERTS, before=lambda ids: ids.add_(1)), True),
        (with_mask(lambda ids: ids.flip(0) >= EXPERTS), True),
    ],
)
def test_only_masks_over_rows_of_nobody_go(layer, kept):
    torch.manual_seed(0)
    seen = check(
        layer,
        bf16(TOKENS, WIDTH),
        bf16(EXPERTS, INNER, WIDTH, grad=False, scale=0.3),
        torch.randint(EXPERTS if kept else EXPERTS + 1, (TOKENS, CHOICES)),  # eager leaves nobody's rows unwritten
        expect={"grouped_lora_linear": 1, "spread_rows": 1, "inverse_order": 1},
        tol=TOL,
    )
    assert ("masked_fill" in str(seen.graphs[0])) == kept
