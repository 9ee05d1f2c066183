"""Which masks over rows are masks over rows of no expert, and go; of small functions without Dynamo."""

import operator

import pytest
import torch

from tests.support.passes.run import family, recognize
from tests.support.passes.traced import traced
from tunecompile.compiler.pass_manager import Context
from tunecompile.ops import grouped_lora_linear

PASSES = family("experts", "expert_masks")
EXPERTS, CHOICES, TOKENS, WIDTH, INNER = 4, 2, 12, 16, 8


def layer(
    sort=torch.sort,
    mask=lambda ids: (ids >= EXPERTS).unsqueeze(-1),
    first=lambda ids: None,
    change=lambda ids: None,
    before=lambda rows, away: rows,
    behind=lambda made, away: made,
):
    """A product by experts as transformers writes it, with masks before and behind it."""

    def fn(x, up, chosen):
        made = sort(chosen.reshape(-1))
        ids, order = made[0], made[1]
        first(ids)
        counts = torch.histc(ids.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
        away = mask(ids)
        change(ids)
        return behind(torch._grouped_mm(before(x[order // CHOICES] * 1, away), up, offs=ends), away)

    return fn


def fill(rows, away):
    return rows.masked_fill(away, 0.0)


def masks_left(fn):
    """(Masks that are left, masks that went.)"""
    gm = traced(
        fn, torch.randn(TOKENS, WIDTH).bfloat16(), torch.randn(EXPERTS, WIDTH, INNER).bfloat16(),
        torch.randint(EXPERTS + 1, (TOKENS, CHOICES)),
    )  # fmt: skip
    context = Context("test")
    recognize(PASSES, gm, context, tidy=True)
    assert sum(node.target is grouped_lora_linear.overload for node in gm.graph.nodes) == 1
    left = [node for node in gm.graph.nodes if "masked_fill" in str(node.target)]
    compared = [node for node in gm.graph.nodes if node.target in (operator.ge, torch.ge, "ge", "unsqueeze")]
    assert left or not compared  # which nothing reads any more
    tally = next(tally for tally in context.tallies if tally.family == "expert_masks")
    assert tally.found == tally.rewritten == len(tally.places) and not tally.refused
    return len(left), tally.found


GONE = {
    "before": (layer(before=fill), 1),
    "behind": (layer(behind=fill), 1),
    "both": (layer(before=fill, behind=fill), 2),
    "a function": (layer(behind=lambda made, away: torch.masked_fill(made, away, 0)), 1),
    "by names": (layer(behind=lambda made, away: made.masked_fill(mask=away, value=0.0)), 1),
    "in place": (layer(before=lambda rows, away: (rows.masked_fill_(away, 0.0), rows)[1]), 1),
    "twice behind": (layer(behind=lambda made, away: fill(made, away) + fill(made, away)), 2),
    "compared by a function": (layer(mask=lambda ids: torch.ge(ids, EXPERTS).unsqueeze(1), before=fill), 1),
    "compared by a method": (layer(mask=lambda ids: torch.unsqueeze(ids.ge(EXPERTS), dim=-1), before=fill), 1),
    "ids are changed behind it": (layer(change=lambda ids: ids.clamp_(max=EXPERTS - 1), before=fill), 1),
    "sorted by a method": (layer(sort=lambda chosen: chosen.sort(0), before=fill), 1),
    "sorted by place": (layer(sort=lambda chosen: torch.sort(chosen, -1, False), before=fill), 1),
    "sorted by names": (layer(sort=lambda chosen: chosen.sort(dim=-1, descending=False, stable=True), before=fill), 1),
}
STAYS = {
    "rows are changed behind it": layer(
        before=lambda rows, away: (lambda filled: (rows.add_(1), filled)[1])(fill(rows, away))
    ),
    "of the last expert too": layer(mask=lambda ids: (ids >= EXPERTS - 1).unsqueeze(-1), before=fill, behind=fill),
    "of others": layer(mask=lambda ids: (ids < EXPERTS).unsqueeze(-1), before=fill, behind=fill),
    "above": layer(mask=lambda ids: (ids > EXPERTS).unsqueeze(-1), before=fill),
    "ids the other way": layer(mask=lambda ids: (ids.flip(0) >= EXPERTS).unsqueeze(-1), before=fill, behind=fill),
    "of a row": layer(mask=lambda ids: (ids[:WIDTH] >= EXPERTS).unsqueeze(0), before=fill),
    "of no column": layer(mask=lambda ids: ids[:WIDTH] >= EXPERTS, before=fill),
    "filled with one": layer(before=lambda rows, away: rows.masked_fill(away, 1.0)),
    "ids are changed first": layer(first=lambda ids: ids.add_(1), before=fill, behind=fill),
    "kept, not filled": layer(behind=lambda made, away: fill(made.where(away, 0.0), away)),
    "sorted from the greatest": layer(sort=lambda chosen: chosen.sort(descending=True), before=fill, behind=fill),
    "from the greatest, by place": layer(sort=lambda chosen: torch.sort(chosen, -1, True), before=fill, behind=fill),
    "by an index": layer(mask=lambda ids: ids[:, None] >= EXPERTS, before=fill),
    "in place, and read beside": layer(before=lambda rows, away: rows.masked_fill_(away, 0.0) + rows),
    "in place on others": layer(before=lambda rows, away: (rows.clone().masked_fill_(away, 0.0), rows)[1] + 0),
    "what it returns is read": layer(before=lambda rows, away: rows.masked_fill_(away, 0.0) * 1),
    "changed behind": layer(behind=lambda made, away: (lambda f: (made.add_(1), f)[1])(fill(made, away))),
}


@pytest.mark.parametrize("name", GONE)
def test_masks_over_rows_of_no_expert(name):
    fn, number = GONE[name]
    assert masks_left(fn) == (0, number)


@pytest.mark.parametrize("name", STAYS)
def test_other_masks(name):
    assert masks_left(STAYS[name])[1] == 0


def two_readers(other):
    """Masked rows that another call reads, too."""

    def fn(x, up, chosen):
        made = torch.sort(chosen.reshape(-1))
        ids, order = made[0], made[1]
        counts = torch.histc(ids.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
        rows = fill(x[order // CHOICES], (ids >= EXPERTS).unsqueeze(-1))
        return torch._grouped_mm(rows, up, offs=ends), other(rows, up, ends)

    return fn


@pytest.mark.parametrize(
    "other, left",
    [
        (lambda rows, up, ends: torch._grouped_mm(rows, up * 2, offs=ends), 0),
        (lambda rows, up, ends: torch._grouped_mm(rows, up, offs=ends.flip(0)), 1),
        (lambda rows, up, ends: rows.sum(), 1),
        (lambda rows, up, ends: rows, 1),
    ],
)
def test_masked_rows_that_others_read(other, left):
    """Only products by the same experts leave out what a mask would."""
    gm = traced(
        two_readers(other), torch.randn(TOKENS, WIDTH).bfloat16(), torch.randn(EXPERTS, WIDTH, INNER).bfloat16(),
        torch.randint(EXPERTS + 1, (TOKENS, CHOICES)),
    )  # fmt: skip
    recognize(PASSES, gm, Context("test"))
    assert sum("masked_fill" in str(node.target) for node in gm.graph.nodes) == left
