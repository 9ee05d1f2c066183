"""A batch as one row of documents: arguments that go in, and results that come back."""

from collections import OrderedDict, namedtuple

import pytest
import torch

from tests.support.batches import lengths_mask
from tunecompile.compiler.token_wise.graph import OFFSETS
from tunecompile.runtime.unpad.documents import Documents, read_padding
from tunecompile.runtime.unpad.flat_batch import ADDED, LONGEST, MASKS, WINDOW, FlatBatch
from tunecompile.runtime.unpad.traced_mask import with_document_mask


def flat_of(*lengths, length=6):
    return FlatBatch.of(read_padding(lengths_mask(*lengths, length=length), None).documents)


def test_arguments_of_each_token():
    flat = flat_of(4, 6)
    tokens = torch.arange(12).view(2, 6)
    order = [0, 1, 2, 3, 6, 7, 8, 9, 10, 11]
    hidden, table = torch.randn(2, 6, 3), torch.randn(1, 6, 3)
    args, kwargs = flat.enter(
        (hidden, tokens),
        {"table": table, "column": torch.arange(6), "pair": (table, tokens), "seq_idx": tokens[:1, :1], "n": 3},
        None,
        keep=False,
    )
    assert args[1][0, :10].tolist() == order and torch.equal(args[0][0, :10], hidden.flatten(0, 1)[order])
    assert torch.equal(kwargs["table"][0, :10], table[0, [n % 6 for n in order]]) and kwargs["n"] == 3
    assert kwargs["column"][:10].tolist() == [n % 6 for n in order] and kwargs["seq_idx"].shape == (1, 1)
    assert kwargs["pair"][0] is kwargs["table"] and kwargs["pair"][1] is args[1], "each is gathered once"
    assert kwargs[OFFSETS].tolist() == [0, 4, 10, 16] and kwargs[MASKS] == () and kwargs[WINDOW] == "0"
    assert kwargs[ADDED] == "" and kwargs[LONGEST].shape[1] == 0
    assert flat.enter((hidden, torch.randn(6)), {}, None, keep=False) is None, "numbers of a column may be anything"
    assert flat.enter((hidden, torch.randn(7, 3)), {}, None, keep=False) is None
    assert flat.enter((hidden,), {"x": torch.randn(2, 5)}, None, keep=False) is None


def test_tables_of_one_row():
    """As of an image's tower: [T, D] has no row."""
    flat = flat_of(4)
    table = torch.randn(6, 3)
    made = flat.enter((torch.randn(1, 6, 2), table), {}, None, keep=False)[0][1]
    assert torch.equal(made[:4], table[:4]) and made.shape == (8, 3)
    assert flat.enter((torch.randn(1, 6, 2), torch.randn(5, 3)), {}, None, keep=False) is None
    assert flat.enter((torch.randn(1, 6, 2), torch.randn(6, 3, 2)), {}, None, keep=False) is None
    two = flat_of(4, 6)
    assert two.enter((torch.randn(2, 6, 2), table), {}, None, keep=False) is None
    positions = torch.randn(3, 2, 6, 4)
    made = two.enter((torch.randn(2, 6, 2), positions), {}, None, keep=False)[0][1]
    assert made.shape == (3, 1, 16, 4) and torch.equal(made[:, 0, 4:10], positions[:, 1])


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_results_are_read_as_they_were_before_they_were_padded(keep, named):
    """By the next layer, as its hidden states."""
    flat = flat_of(4, 6)
    row = torch.randn(1, 16, 3)
    padded = flat.leave(row, keep=True)
    assert padded.shape == (2, 6, 3) and not padded[0, 4:].any() and torch.equal(padded[1], row[0, 4:10])

    def entered(*values):
        given = ((), dict(zip("ab", values))) if named else (values, {})
        args, kwargs = flat.enter(*given, None, keep=keep)
        return [kwargs[name] for name in "ab"[: len(values)]] if named else list(args)

    assert (entered(padded)[0] is row) is keep
    assert all(each is not row for each in entered(torch.randn(2, 6, 3).mul_(2), padded)), "other hidden states"
    padded.add_(1)
    assert entered(padded)[0] is not row
    flat.leave(row, keep=False)
    again = flat.leave(row, keep=True)
    assert flat.rows.shared
    flat.rows.forget()
    assert not flat.rows.shared and flat.rows.last is None and entered(again)[0] is not row


@pytest.mark.parametrize("watch", [torch.Tensor.retain_grad, lambda x: x.register_hook(lambda grad: grad * 3)])
def test_a_gradient_that_is_watched_passes_the_padded_result(watch):
    """The row in its place would lead past it: no gradient was retained, and no hook called."""
    flat, row = flat_of(4, 6), torch.randn(1, 16, 3, requires_grad=True)
    padded = flat.leave(row * 1, keep=True)
    watch(padded)
    (again,), _ = flat.enter((padded,), {}, None, keep=True)
    again[:, :10].sum().backward()
    if watch is torch.Tensor.retain_grad:
        assert torch.equal(padded.grad, lengths_mask(4, 6)[..., None].expand(2, 6, 3).float())
    else:
        assert (row.grad[:, :10] == 3).all()


def test_results_of_any_form():
    flat = flat_of(4, 6)
    row, other = torch.randn(1, 16, 3), torch.randn(2, 2)
    Pair = namedtuple("Pair", "first second")
    pair = flat.leave(Pair(row, other), keep=True)
    assert type(pair) is Pair and pair.first.shape == (2, 6, 3) and pair.second is other
    assert flat.leave([row, None], keep=False)[1] is None and flat.leave(5, keep=True) == 5
    flat.rows.last = None
    made = flat.leave(OrderedDict(x=row), keep=True)
    assert type(made) is OrderedDict and made["x"].shape == (2, 6, 3) and flat.rows.last is None
    flat.leave((other, row), keep=True)
    assert flat.rows.last is None, "the next layer is given the first"
    whole = FlatBatch.of_whole_rows(2, 6, 0, torch.device("cpu"))
    assert torch.equal(whole.leave(row, keep=False), row[:, :12].view(2, 6, 3))


def test_attention_weights_of_no_row_are_those_of_the_batch():
    """What takes their place until somebody reads them has a size for each token."""
    flat = flat_of(4, 6)
    row, nothing = torch.randn(1, 16, 2, 3), torch.randn(0, 3)
    left = flat.leave((torch.empty(0, 5, 16, 16, dtype=torch.half), row, nothing), keep=False)
    assert left[0].shape == (0, 5, 6, 6) and left[0].dtype is torch.half and left[2] is nothing
    assert left[1].shape == (2, 6, 2, 3) and torch.equal(left[1][1], row[0, 4:10])


def test_two_batches_are_compared():
    first = flat_of(4, 6)
    assert first.on_row_of(same := flat_of(4, 6)) is same
    for other in (flat_of(6, 4), flat_of(4, 5), flat_of(4, 6, length=7)):
        assert first.on_row_of(other) is None
    seen = Documents(lengths_mask(4, 6).bool(), read_padding(lengths_mask(4, 6), None).documents.starts, 10, 2, 6, 3)
    windowed = FlatBatch.of(seen).on_row_of(first)
    assert windowed.window == 3 and windowed.rows is first.rows and windowed.offsets is first.offsets
    assert windowed.on_row_of(first) is not first and first.window == 0
    assert flat_of(4, 6).drops and not flat_of(6, 6).drops


@pytest.mark.parametrize("dtype", [torch.bool, torch.float16])
def test_the_mask_is_made_in_the_layers_graph(dtype):
    flat = flat_of(4, 6)
    mask = torch.zeros(2, 1, 6, 6, dtype=dtype)
    args, kwargs = flat.enter(
        (torch.randn(2, 6, 3), mask), {"mask": mask, "other": torch.zeros(2, 6)}, mask, keep=False
    )
    assert args[1] is None and kwargs["mask"] is None and kwargs[MASKS] == (1, "mask")
    entered, named = with_document_mask(args, kwargs)
    assert entered[0] is args[0] and named["mask"] is entered[1] and set(named) == {"mask", "other"}
    seen = entered[1] if dtype is torch.bool else entered[1] == 0
    assert entered[1].dtype is dtype and seen.shape == (1, 1, 16, 16)
    expected = torch.block_diag(torch.ones(4, 4), torch.ones(6, 6)).tril().bool()
    assert torch.equal(seen[0, 0, :10, :10], expected)
    hidden, named = flat.enter((torch.randn(2, 6, 3),), {"mask": mask, "n": 3}, mask, keep=False)
    alone, by_name = with_document_mask(hidden, named)
    assert torch.equal(by_name["mask"], entered[1]) and by_name["n"] == 3 and len(alone) == 1
    plain = (args[:1], {"x": 1})
    assert with_document_mask(*plain) == plain


def test_a_result_that_becomes_that_of_another_function_is_gathered_again():
    """A reentrant checkpoint runs a layer without gradients, and returns the same tensor as its own: its row leads
    nowhere."""

    class Checkpoint(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return flat.leave(flat.enter((x,), {}, None, keep=True)[0][0] * 2, keep=True)

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    flat = FlatBatch.of_whole_rows(2, 6, 0, torch.device("cpu"))
    hidden = torch.randn(2, 6, 3, requires_grad=True)
    made = Checkpoint.apply(hidden)
    row = flat.rows.row_of(made)
    assert made.requires_grad and (row is None or row.requires_grad)
    (again,), _ = flat.enter((made,), {}, None, keep=True)
    again.sum().backward()
    assert hidden.grad is not None
