"""In which form batches reach the layers, by a table. No mask is read."""

from itertools import product

import pytest

from tunecompile.notes import note
from tunecompile.runtime.unpad.decision import AS_IT_COMES, PACKED, PADDED, MaskFacts, decide_by

KEEPS, HEAD, HOOK = note("no-labels"), note("head-mixes-tokens"), note("hook-on-all-modules")
ROW = object()  #: of documents


def seen(hook=None, head=None):
    return lambda heads: hook or (head if heads else None)


def decide(look=None, **facts):
    return decide_by(MaskFacts(**{"understood": True, "seen": look or seen(), **facts}), lambda: ROW)


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
        (dict(needless=True, narrows=True, seen=seen(hook=HOOK)), False, None, PADDED),
    ],
)
def test_forms(facts, rows, reason, batches):
    made = decide(**facts)
    assert (made.flat, made.reason and made.reason.code) == (ROW if rows else None, reason)
    assert rows or made.batches == batches


def test_modules_are_looked_at_last():
    """It takes milliseconds where there are thousands."""
    for facts in (
        dict(understood=False),
        dict(padded=True, keeps=KEEPS),
        dict(padded=True, labelled=True),
        dict(needless=True),
    ):
        asked = []
        decide(asked.append, **facts)
        assert not asked, facts


def test_a_row_never_has_a_reason():
    bools = ("understood", "interrupted", "padded", "labelled", "needless", "narrows", "joins")
    for values in product((False, True), repeat=len(bools)):
        for keeps, look in product((None, KEEPS), (seen(), seen(HOOK), seen(None, HEAD))):
            made = decide(look, **dict(zip(bools, values, strict=True)), keeps=keeps)
            assert not (made.flat and made.reason)
            assert not made.flat or (made != AS_IT_COMES and values[0])
