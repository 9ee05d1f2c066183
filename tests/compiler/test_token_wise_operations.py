"""Which of ATen's operations leave tokens apart: what is said of each, against what it computes."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from tunecompile.compiler.token_wise.operations import (
    _BEHIND,
    TOKENS,
    has_rows_behind,
    leaves_apart,
    mark_rows,
    tokens_of,
)

aten = torch.ops.aten
W = 6
LAST, FIRST = 1 << 62, -TOKENS
BIAS, SQUARE, WIDE = torch.randn(W), torch.randn(W, W), torch.randn(1, 4, W)

#: operation, its arguments from x [1, T, 6]
APART = {
    "product": (aten.mm, lambda x: (x[0], SQUARE)),
    "product of the transposed": (aten.mm, lambda x: (SQUARE, x[0].T)),
    "product and sum": (aten.addmm, lambda x: (BIAS, x[0], SQUARE)),
    "products of a batch": (aten.bmm, lambda x: (x, SQUARE[None])),
    "products of tokens": (aten.bmm, lambda x: (x[0, :, :, None], x[0, :, None, :])),
    "norm": (aten.native_layer_norm, lambda x: (x, [W], BIAS, BIAS, 1e-5)),
    "table": (aten.embedding, lambda x: (SQUARE, (x[..., 0] > 0).long())),
    "view": (aten.view, lambda x: (x, [1, TOKENS, 2, 3])),
    "view of rows": (aten.view, lambda x: (x, [TOKENS, W])),
    "view of heads": (aten.view, lambda x: (x, [TOKENS * 2, 3])),
    "another dimension": (aten.unsqueeze, lambda x: (x, 1)),
    "transposed": (aten.transpose.int, lambda x: (x, 1, 2)),
    "permuted": (aten.permute, lambda x: (x, [1, 0, 2])),
    "matrix transposed": (aten.t, lambda x: (x[0],)),
    "expanded": (aten.expand, lambda x: (x[..., :1], [1, TOKENS, 3])),
    "of nothing, expanded": (aten.expand, lambda x: (BIAS, [1, TOKENS, W])),
    "a token's part": (aten.select.int, lambda x: (x, 2, 1)),
    "slice of the width": (aten.slice.Tensor, lambda x: (x, -1, 2, 4)),
    "all tokens": (aten.slice.Tensor, lambda x: (x, 1, 0, LAST)),
    "all tokens from behind": (aten.slice.Tensor, lambda x: (x, 1, FIRST, TOKENS)),
    "all tokens by number": (aten.slice.Tensor, lambda x: (x, 1, None, TOKENS)),
    "parts": (aten.split.Tensor, lambda x: (x, 2, 2)),
    "halves": (aten.split_with_sizes, lambda x: (x, [2, 4], -1)),
    "one by one": (aten.unbind.int, lambda x: (x, 2)),
    "joined": (aten.cat, lambda x: ([x, x * 2], -1)),
    "stacked": (aten.stack, lambda x: ([x, x * 2], -1)),
    "stacked ahead": (aten.stack, lambda x: ([x, x * 2], 0)),
    "sum": (aten.sum.dim_IntList, lambda x: (x, [-1])),
    "mean": (aten.mean.dim, lambda x: (x, [2], True)),
    "softmax": (aten._softmax, lambda x: (x, -1, False)),
    "running sum": (aten.cumsum, lambda x: (x, 2)),
    "flipped": (aten.flip, lambda x: (x, [2])),
    "norm of a vector": (aten.linalg_vector_norm, lambda x: (x, 2, [-1], True)),
    "function": (aten.sigmoid, lambda x: (x,)),
    "function of two": (aten.mul.Tensor, lambda x: (x, x[..., :1])),
    "with a weight": (aten.add.Tensor, lambda x: (x, BIAS)),
    "cast": (aten._to_copy, lambda x: (x,)),
    "blank": (aten.zeros_like, lambda x: (x,)),
    "of nothing": (aten.ones, lambda x: ([1, TOKENS],)),
    "chosen": (aten.where.self, lambda x: (x > 0, x, BIAS)),
}
MIXED = {
    "sum of products": (aten.mm, lambda x: (x[0].T, x[0])),
    "sums of products": (aten.bmm, lambda x: (x.mT, x)),
    "pairs": (aten.mm, lambda x: (x[0], x[0].T)),
    "norm over tokens": (aten.native_layer_norm, lambda x: (x.mT.contiguous(), [TOKENS], None, None, 1e-5)),
    "norm over all": (aten.native_layer_norm, lambda x: (x, [TOKENS, W], None, None, 1e-5)),
    "norm by a weight of tokens": (aten.native_layer_norm, lambda x: (WIDE, [W], x[0, 0] * 0 + 1, x[0, 1], 1e-5)),
    "tokens are the table": (aten.embedding, lambda x: (x[0], torch.tensor([3]))),
    "scrambled": (aten.view, lambda x: (x, [1, W, TOKENS])),
    "scrambled rows": (aten.view, lambda x: (x.mT.contiguous(), [1, TOKENS, W])),
    "a token": (aten.select.int, lambda x: (x, 1, 1)),
    "the row": (aten.select.int, lambda x: (x, 0, 0)),
    "all but the first": (aten.slice.Tensor, lambda x: (x, 1, 1, LAST)),
    "all but the last": (aten.slice.Tensor, lambda x: (x, 1, 0, TOKENS - 1)),
    "every second": (aten.slice.Tensor, lambda x: (x, 1, 0, LAST, 2)),
    "rows": (aten.slice.Tensor, lambda x: (x, 0, 1, LAST)),
    "parts of tokens": (aten.split.Tensor, lambda x: (x, 5000, 1)),
    "one after another": (aten.cat, lambda x: ([x, x * 2], 1)),
    "rows one after another": (aten.cat, lambda x: ([x, x * 2], 0)),
    "sum of tokens": (aten.sum.dim_IntList, lambda x: (x, [1])),
    "sum of rows": (aten.sum.dim_IntList, lambda x: (x, [0])),
    "sum of both": (aten.sum.dim_IntList, lambda x: (x, [-1, -2])),
    "sum of all": (aten.sum, lambda x: (x,)),
    "sum of no dimension": (aten.sum.dim_IntList, lambda x: (x, [])),
    "mean of tokens": (aten.mean.dim, lambda x: (x, [1], True)),
    "softmax over tokens": (aten._softmax, lambda x: (x, 1, False)),
    "running sum of tokens": (aten.cumsum, lambda x: (x, -2)),
    "flipped tokens": (aten.flip, lambda x: (x, [1])),
    "norm of all": (aten.linalg_vector_norm, lambda x: (x, 2)),
    "rolled": (aten.roll, lambda x: (x, [1], [1])),
    "places": (aten.arange, lambda x: (TOKENS,)),
    "expanded over tokens": (aten.expand, lambda x: (x[0], [TOKENS, TOKENS, W])),
    "pairs by a function": (aten.mul.Tensor, lambda x: (x[..., :1], x[..., :1].mT)),
}


def packet(operation):
    return operation if isinstance(operation, torch._ops.OpOverload) else operation.default


def looked_at(operation, args, kwargs=None):
    """(Whether tokens are said to be left apart, the results.)"""
    func = packet(operation)
    made = func(*args, **(kwargs or {}))
    given, results = ([x for x in tree_leaves(each) if isinstance(x, torch.Tensor)] for each in (args, made))
    return leaves_apart(func, args, kwargs or {}, given, results), results


def tokens():
    torch.manual_seed(0)
    return torch.randn(1, TOKENS, W)


@pytest.mark.parametrize("name", APART)
def test_what_leaves_tokens_apart(name):
    """Where one token is another, no other's results change."""
    operation, arguments = APART[name]
    x, y = tokens(), tokens()
    y[:, 7] += 1
    apart, results = looked_at(operation, arguments(x))
    assert apart
    for before, after in zip(results, looked_at(operation, arguments(y))[1]):
        (dim,) = tokens_of(before)
        changed = (before != after).movedim(dim, 0).reshape(TOKENS, -1).any(1)
        assert not changed.any() or changed.nonzero().flatten().tolist() == [7]


@pytest.mark.parametrize("name", MIXED)
def test_what_may_mix_them(name):
    operation, arguments = MIXED[name]
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert not looked_at(operation, arguments(torch.empty(1, TOKENS, W)))[0]


@pytest.mark.parametrize("name", ["mm", "bmm", "addmm", "baddbmm", "_scaled_mm", "_int_mm"])
def test_products_sum_over_no_tokens(name):
    """Rows are tokens, or columns; a bias ahead of both is no operand. (No product is computed here.)"""
    operation = getattr(aten, name)
    func = packet(operation)
    x, square = torch.empty(TOKENS, W, device="meta"), torch.empty(W, W, device="meta")
    for left, right, apart in ((x, square, True), (square, x.T, True), (x.T, x, False), (x, x.T, False)):
        operands = [each[None] if "b" in name.removeprefix("add") else each for each in (left, right)]
        made = operands[0] @ operands[1]
        args = ([torch.empty(1, device="meta")] if "add" in name else []) + operands
        assert leaves_apart(func, tuple(args), {}, args, [made]) == apart, (left.shape, right.shape)


def behind(x):
    """Tokens first, as [T, 1, 6]: rows may stand behind them."""
    turned = x.transpose(0, 1)
    setattr(turned, _BEHIND, True)
    return turned


@pytest.mark.parametrize(
    "operation, arguments, apart",
    [
        (aten.mm, lambda x: (x[:, 0], SQUARE), True),
        (aten.sum.dim_IntList, lambda x: (x, [2]), True),
        (aten.sum.dim_IntList, lambda x: (x, [1]), False),
        (aten.native_layer_norm, lambda x: (x, [W], None, None, 1e-5), True),
        (aten.native_layer_norm, lambda x: (x, [1, W], None, None, 1e-5), False),
        (aten.transpose.int, lambda x: (x, 0, 1), True),
        (aten.transpose.int, lambda x: (x.transpose(1, 2), 0, 2), True),
        (aten.permute, lambda x: (x, [2, 0, 1]), False),
        (aten.bmm, lambda x: (x.sum(-1, keepdim=True), x), False),
        (aten._softmax, lambda x: (x, 1, False), False),
        (aten.mul.Tensor, lambda x: (x, BIAS), True),
    ],
)
def test_rows_behind_tokens(operation, arguments, apart):
    def marked(each):
        if isinstance(each, torch.Tensor) and tokens_of(each):
            setattr(each, _BEHIND, True)
        return each

    assert looked_at(operation, tree_map(marked, arguments(behind(tokens()))))[0] == apart


def followed(operation, x, *args):
    made = packet(operation)(x, *args)
    mark_rows(packet(operation), [x], [made])
    return made


def test_rows_that_come_to_stand_behind_tokens_are_followed():
    x = tokens()
    turned = followed(aten.transpose.int, x, 0, 1)
    assert has_rows_behind(turned) and has_rows_behind(followed(aten.sigmoid, turned))
    assert not has_rows_behind(followed(aten.transpose.int, turned, 0, 1))
    assert not has_rows_behind(followed(aten.sum.dim_IntList, turned, [0]))
    assert has_rows_behind(followed(aten.permute, x, [1, 2, 0]))
    for operation, *args in (
        (aten.sigmoid,),
        (aten.view, [TOKENS, W]),
        (aten.view, [TOKENS, 1, W]),
        (aten.permute, [0, 2, 1]),
        (aten.transpose.int, 1, 2),
    ):
        assert not has_rows_behind(followed(operation, x, *args))
    assert not has_rows_behind(followed(aten.t, x[0]))
    (four := turned.unsqueeze(1)).__dict__[_BEHIND] = True  # [T, 1, 1, 6]: which of them are the rows is not known
    assert has_rows_behind(followed(aten.transpose.int, four, 0, 1))
