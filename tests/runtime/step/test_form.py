"""In which form batches reach the layers, by a table. No mask is read."""

from itertools import product

import pytest

from tunecompile.notes import note
from tunecompile.runtime.step.form import PACKED, PADDED, Form, MaskFacts, form_of

KEEPS, HEAD, HOOK = note("no-labels"), note("head-mixes-tokens"), note("hook-on-all-modules")


def seen(hook=None, head=None):
    return lambda heads: hook or (head if heads else None)


def code(form: Form) -> str | None:
    return form.reason and form.reason.code


@pytest.mark.parametrize(
    ("facts", "rows", "reason", "batches"),
    [
        # what is not understood stays, whatever else is known
        (dict(understood=False), False, "masks-not-understood", PADDED),
        (dict(understood=False, interrupted=True, joins=True), False, "row-interrupted", PADDED),
        # padding goes where nobody reads it
        (dict(padded=True), True, None, PADDED),
        (dict(padded=True, keeps=KEEPS), False, "no-labels", PADDED),
        (dict(padded=True, labelled=True), False, "labels-at-padding", PADDED),
        (dict(padded=True, keeps=KEEPS, labelled=True), False, "no-labels", PADDED),
        (dict(padded=True, seen=seen(hook=HOOK)), False, "hook-on-all-modules", PADDED),
        (dict(padded=True, seen=seen(head=HEAD)), False, "head-mixes-tokens", PADDED),
        # documents in a row drop nothing: labels and heads do not matter
        (dict(keeps=KEEPS, labelled=True, seen=seen(head=HEAD)), True, None, PACKED),
        (dict(seen=seen(hook=HOOK)), False, "hook-on-all-modules", PACKED),
        # whole rows need no mask, and nothing is told of them
        (dict(needless=True), False, None, PADDED),
        (dict(needless=True, keeps=KEEPS), False, None, PADDED),
        (dict(needless=True, narrows=True), True, None, PACKED),
        (dict(needless=True, joins=True), True, None, PACKED),
        (dict(needless=True, narrows=True, seen=seen(hook=HOOK)), False, None, PACKED),
    ],
)
def test_forms(facts, rows, reason, batches):
    form = form_of(MaskFacts(**{"understood": True, **facts}))
    assert (form.rows, code(form), form.batches) == (rows, reason, batches)


def test_modules_are_looked_at_last():
    """It takes milliseconds where there are thousands."""
    for facts in (
        dict(understood=False),
        dict(padded=True, keeps=KEEPS),
        dict(padded=True, labelled=True),
        dict(needless=True),
    ):
        asked = []
        form_of(MaskFacts(**{"understood": True, **facts}, seen=lambda heads, asked=asked: asked.append(heads)))
        assert not asked, facts


def test_a_row_never_has_a_reason():
    bools = ("understood", "interrupted", "padded", "labelled", "needless", "narrows", "joins")
    for values in product((False, True), repeat=len(bools)):
        for keeps, look in product((None, KEEPS), (seen(), seen(HOOK), seen(None, HEAD))):
            form = form_of(MaskFacts(**dict(zip(bools, values, strict=True)), keeps=keeps, seen=look))
            assert not (form.rows and form.reason)
            assert not form.rows or (form != Form() and values[0])
