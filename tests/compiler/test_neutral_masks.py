"""Which graphs compute the same where a mask leaves nothing out."""

import pytest
import torch
import torch.nn.functional as F

from tunecompile._torch.dynamo import mark_dynamic
from tunecompile.compiler.attention_calls.neutral_masks import flows_of, masks_instead

WIDTH, HEADS, ROWS, LENGTH = 12, 3, 2, 6
BIAS = torch.randn(1, HEADS, 64, 64)


def traced(layer, *args, dynamic: bool = True, **kwargs):
    """Dynamo's graph of a layer's call; sizes of rows and tokens are symbols."""
    found = []

    def backend(gm, inputs):
        found.append(gm)
        return gm.forward

    def run(*args, **kwargs):
        return layer(*args, **kwargs)

    torch._dynamo.reset()
    for each in (*args, *kwargs.values()) if dynamic else ():
        if each is not None:
            dims = [0, 1] if each.dim() == 3 else [0, 2, 3]
            mark_dynamic(each, [dim for dim in dims if each.shape[dim] != 1])
    torch.compile(run, backend=backend, fullgraph=True)(*args, **kwargs)
    return found[0]


def states(rows: int = ROWS, length: int = LENGTH) -> torch.Tensor:
    return torch.randn(rows, length, WIDTH)


def pairs(rows: int = ROWS, queries: int = LENGTH, keys: int = LENGTH) -> torch.Tensor:
    return torch.rand(rows, 1, queries, keys) > 0.5


def split(x, heads=HEADS):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def joined(heads):
    return heads.transpose(1, 2).flatten(2)


def attend(x, mask, *, key=None, value=None, **options):
    key = x if key is None else key
    value = key if value is None else value
    return joined(F.scaled_dot_product_attention(split(x), split(key), split(value), attn_mask=mask, **options))


def repeated(x, mask):
    """One head of keys and values, which a mask has repeated, as transformers does."""
    narrow = split(x[:, :, :4], heads=1)
    if mask is None:
        return joined(F.scaled_dot_product_attention(split(x), narrow, narrow, is_causal=True, enable_gqa=True))
    rows, heads, tokens, width = narrow.shape
    wide = narrow[:, :, None, :, :].expand(rows, heads, HEADS, tokens, width).reshape(rows, HEADS, tokens, width)
    again = narrow[:, :, None, :, :].expand(rows, heads, HEADS, tokens, width).reshape(rows, HEADS, tokens, width)
    return joined(F.scaled_dot_product_attention(split(x), wide, again, attn_mask=mask))


def biased(x, mask):
    bias = BIAS[:, :, : x.shape[1], : x.shape[1]]
    added = bias if mask is None else torch.where(mask, bias, torch.finfo(bias.dtype).min)
    return attend(x, added.contiguous())


ALIKE = {
    "both ways": (lambda x, mask: attend(x, mask) * 2, False),
    "causal": (lambda x, mask: attend(x.relu(), mask, is_causal=mask is None), True),
    "a slice that is all": (lambda x, mask: attend(x, None if mask is None else mask[:, :, :, : x.shape[1]]), False),
    "two calls": (lambda x, mask: attend(attend(x, mask), mask), False),
    "repeated heads": (repeated, True),
    "a bias": (biased, False),
}


@pytest.mark.parametrize(
    "dynamic",
    [(True, True), *(pytest.param(each, marks=pytest.mark.slow) for each in ((False, True), (True, False)))],
    ids=str,
)
@pytest.mark.parametrize("name", ALIKE)
def test_graphs_that_compute_the_same(name, dynamic):
    layer, causal = ALIKE[name]
    known = flows_of(traced(layer, states(3, 7), pairs(3, 7, 7), dynamic=dynamic[0]))
    whole = states()
    found = masks_instead(traced(layer, whole, None, dynamic=dynamic[1]), known)
    assert found is not None
    ((wanted,),) = found[1:]
    assert (wanted.mask.argument, wanted.mask.causal, wanted.mask.expanded) == (1, causal, ())
    given = [torch.empty(4, 9, WIDTH) if each else whole for each in dynamic[1:]] * 8  # whichever input it is
    assert wanted.of(given) == ((4, 1, 9, 9) if dynamic[1] else (2, 1, 6, 6))
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    assert torch.allclose(layer(whole, mask.tril() if causal else mask), layer(whole, None), atol=1e-6)


def more(x, mask):
    return attend(x, mask) if mask is not None else attend(x, mask).relu()


DIFFERENT = {
    "more without a mask": more,
    "less without a mask": lambda x, mask: attend(x if mask is None else x.relu(), mask),
    "another scale": lambda x, mask: attend(x, mask, scale=0.5 if mask is None else None),
    "dropout": lambda x, mask: attend(x, mask, dropout_p=0.5 if mask is None else 0.0),
    "another integer": lambda x, mask: attend(x.roll(1 if mask is None else 2, 1), mask),
    "other operands": lambda x, mask: (
        attend(x, mask, key=x.relu(), value=x.sin()) if mask is None else attend(x, mask, key=x.sin(), value=x.relu())
    ),
    "another result": lambda x, mask: (attend(x, mask), x.relu())[:: 1 if mask is None else -1],
    "in place": lambda x, mask: attend(x.clone(), mask) + (x.clone().mul_(2) if mask is None else x.clone().mul_(3)),
    "one causal, one not": lambda x, mask: attend(attend(x, mask, is_causal=mask is None), mask),
    "a mask that is read": lambda x, mask: attend(x, mask) * (1.0 if mask is None else mask.sum()),
    "a mask that is turned": lambda x, mask: attend(x, None if mask is None else ~mask),
    "part of a mask": lambda x, mask: attend(x, None if mask is None else mask[:, :, :, :1]),
    "a mask that is causal, too": lambda x, mask: (
        attend(x, None, is_causal=True) if mask is None else attend(x, mask & torch.ones_like(mask).tril())
    ),
    "another bias": lambda x, mask: biased(x, mask) if mask is None else biased(x, ~mask),
    "a choice that others read": lambda x, mask: (
        x[:, None] @ x[:, None].mT if mask is None else torch.where(mask, x[:, None] @ x[:, None].mT, -1e9)
    ),
    "written out": lambda x, mask: (
        ((x @ x.mT) + (0.0 if mask is None else torch.where(mask[:, 0], 0.0, -1e9))).softmax(-1) @ x
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_graphs_that_do_not(name):
    layer = DIFFERENT[name]
    known = flows_of(traced(layer, states(3, 7), pairs(3, 7, 7)))
    assert masks_instead(traced(layer, states(), None), known) is None


def test_masks_of_other_kinds():
    """Numbers that are added, rows of tokens, and more masks than are tried."""

    def layer(x, mask=None, **others):
        return sum((attend(x, each) for each in others.values()), attend(x, mask))

    x = states(3, 7)
    assert not flows_of(traced(layer, x, torch.zeros(3, 1, 7, 7)))
    rows = traced(lambda x, mask: attend(x, mask[:, None, None]), x, pairs(3, 7, 7)[:, 0, 0], dynamic=False)
    assert not flows_of(rows)
    assert not flows_of(traced(layer, x, **{name: pairs(3, 7, 7) for name in ("a", "b", "c")}))
    assert not flows_of(traced(layer, x))


def test_the_form_of_a_mask():
    """One for all rows, for all queries, or with a stride of 0: as padded batches had it."""

    def layer(x, mask):
        return attend(x, mask)

    def found(mask):
        ((wanted,),) = masks_instead(traced(layer, states(), None), flows_of(traced(layer, states(3, 7), mask)))[1:]
        return wanted

    own, shared = found(pairs(3, 7, 7)), found(pairs(1, 7, 7))
    assert (own.mask.rows, own.mask.queries) == (True, True) and (shared.mask.rows, shared.mask.queries) == (
        False,
        True,
    )
    given = [torch.empty(4, 9, WIDTH)] * 8
    assert own.of(given) == (4, 1, 9, 9) and shared.of(given) == (1, 1, 9, 9)
    assert found(pairs(3, 1, 7)).of(given) == (4, 1, 1, 9)
    wide = found(pairs(3, 1, 7).expand(3, 1, 7, 7))
    assert wide.of(given) == (4, 1, 9, 9) and wide.mask.expanded == (2,)
    assert found(pairs(1, 7, 7).expand(3, 1, 7, 7)).mask.expanded == (0,)
    turned = traced(layer, states(3, 7), pairs(3, 7, 7).transpose(2, 3))
    assert not flows_of(turned), "it would have other strides"


def test_masks_of_queries_and_of_other_states():
    """A decoder's: causal for its own tokens, and all of an encoder's."""

    def layer(x, encoded, mask=None, encoder_mask=None):
        return attend(attend(x, mask, is_causal=mask is None), encoder_mask, key=encoded)

    masks = dict(mask=pairs(3, 7, 7), encoder_mask=pairs(3, 7, 5))
    known = flows_of(traced(layer, states(3, 7), states(3, 5), **masks))
    found = masks_instead(traced(layer, states(), states(2, 4)), known)
    own, other = sorted(found[1], key=lambda each: str(each.mask.argument))[::-1]
    assert (own.mask.argument, own.mask.causal) == ("mask", True)
    assert (other.mask.argument, other.mask.causal) == ("encoder_mask", False)
    assert all({flow.masks[0].argument} <= {"mask", "encoder_mask"} for flow in known)
    one = masks_instead(traced(layer, states(), states(2, 4), mask=pairs()), known)
    assert [each.mask.argument for each in one[1]] == ["encoder_mask"]


def test_constants_of_graphs_are_compared():
    """Of the same names, and other numbers."""

    def layer(table):
        return lambda x, mask: attend(x, mask) * torch.tensor(table)

    known = flows_of(traced(layer([1.0] * WIDTH), states(3, 7), pairs(3, 7, 7)))
    assert masks_instead(traced(layer([1.0] * WIDTH), states(), None), known) is not None
    assert masks_instead(traced(layer([2.0] * WIDTH), states(), None), known) is None
