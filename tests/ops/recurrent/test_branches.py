"""Tokens that rows share, as rows and back: what indexing gives, forward and backward."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.ops.checks import QUICK, assert_fake_is_real, tensor
from tunecompile.ops import branch_rows, first_copies
from tunecompile.runtime.unpad.prefixes.forest import forest_of
from tunecompile.runtime.unpad.prefixes.rows import BranchRows

BITS = st.integers(0, 1)
ROWS = st.lists(st.lists(BITS, max_size=7), max_size=6)
SHAPES = st.sampled_from([(), (3,), (2, 3)])


def forest(rows):
    flat = torch.tensor([token for row in rows for token in row], dtype=torch.int64)
    return forest_of(flat[None], [len(row) for row in rows], 1, 0.0)


def rows_of(made, multiple):
    total = made.count + made.count % multiple
    return total, BranchRows(*(part.to(torch.int32) for part in BranchRows.of(made, total, multiple)))


@given(rows=ROWS, twice=st.lists(BITS, min_size=1, max_size=7), shape=SHAPES, multiple=st.sampled_from([2, 8]))
@QUICK
def test_values_and_gradients_are_those_of_indexing(rows, twice, shape, multiple):
    made = forest([*rows, twice, twice])
    total, (offsets, *places) = rows_of(made, multiple)
    count, size = len(made.tokens), len(places[0])
    assert offsets.tolist() == [*made.begins, size] and size > total and len(places[2]) > 1
    x = tensor((1, total, *shape), dtype=torch.float64).requires_grad_()
    copied, weight = branch_rows(x, *places), tensor((1, size, *shape), dtype=torch.float64)
    assert torch.equal(copied[:, :count], x[:, made.tokens]) and not copied[:, count:].any()
    firsts = [made.tokens.tolist().index(token) for token in range(made.count)]
    taken, factor = first_copies(copied * weight, *places[:2]), tensor((1, total, *shape), dtype=torch.float64)
    assert torch.equal(taken[:, : made.count], (copied * weight)[:, firsts]) and not taken[:, made.count :].any()
    plain = (x[:, made.tokens] * weight[:, :count] * 2).sum() + (x[:, : made.count] * factor[:, : made.count]).sum()
    mine = (copied * weight * 2).sum() + (first_copies(copied, *places[:2]) * factor).sum()
    torch.testing.assert_close(*(torch.autograd.grad(each, x)[0] for each in (mine, plain)), rtol=1e-12, atol=1e-12)


def test_copies_are_summed_in_fp32():
    """Of 300 rows in bf16: a running sum in bf16 would stand still at 256."""
    made = forest([[1, 0]] * 300)
    total, (_, *places) = rows_of(made, 2)
    x = torch.ones(1, total, 2, dtype=torch.bfloat16, requires_grad=True)
    branch_rows(x, *places).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 300.0))


def test_fakes_and_opcheck():
    _, (_, *places) = rows_of(forest([[0, 1, 1], [0, 1], [1, 0], [0, 1, 0]]), 8)
    sizes = places[1].shape[1], len(places[0])
    for dtype in (torch.bfloat16, torch.float32):
        tokens, whole = (tensor((1, size, 4, 3), "transposed", dtype=dtype) for size in sizes)
        assert_fake_is_real(branch_rows, tokens, *places)
        assert_fake_is_real(branch_rows.backward_op, whole, *places[1:])
        assert_fake_is_real(first_copies, whole, *places[:2])
        assert_fake_is_real(first_copies.backward_op, tokens, *places[:2])
    torch.library.opcheck(branch_rows.overload, (tokens.requires_grad_(), *places))
    torch.library.opcheck(first_copies.overload, (whole.requires_grad_(), *places[:2]))
