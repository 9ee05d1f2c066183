"""Masks of long rows are recorded as what they are computed of, and computed where somebody reads them."""

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import tunecompile
from tests.support import zoo
from tests.support.batches import packed, padded
from tests.support.compare import assert_same_flattened
from tests.support.models.pairs import attending, pair
from tests.support.reports import flattened, told_apart
from tunecompile._torch.autograd import plain_functions
from tunecompile.runtime.unpad import documents
from tunecompile.runtime.unpad.documents import BOTH_WAYS, read_mask
from tunecompile.runtime.unpad.masks import pairs as pair_masks
from tunecompile.runtime.unpad.masks import recorder as recording
from tunecompile.runtime.unpad.masks.pairs import MaskCell, PairMask, blocks, diagonal, identity
from tunecompile.runtime.unpad.masks.recorder import MaskRecorder

masking = pytest.importorskip("transformers.masking_utils")
pytestmark = pytest.mark.filterwarnings("ignore")
B, T = 3, 20
PADDING = torch.arange(T) < torch.tensor([[T], [7], [4]])
PACKED = torch.tensor([[0] * 8 + [1] * 12, [0] * 20, [0] * 3 + [1] * 7 + [2] * 10])
KINDS = {
    "causal": masking.causal_mask_function,
    "window": masking.sliding_window_causal_mask_function(4),
    "both ways": masking.bidirectional_mask_function,
    "around": masking.sliding_window_bidirectional_mask_function(3),
    "packed": masking.and_masks(masking.causal_mask_function, masking.packed_sequence_mask_function(PACKED)),
    "chunked": masking.chunked_causal_mask_function(5, torch.tensor([0, 2, 1])),
}


@pytest.fixture
def small(monkeypatch):
    """Every mask counts as large, and is read in many blocks."""
    monkeypatch.setattr(recording, "LONG", 1)
    monkeypatch.setattr(pair_masks, "BLOCK", 2 * T)


def test_a_number_makes_the_default_dtype_of_a_mask():
    """What the first default dtype gave was kept for all."""
    tokens, before = torch.arange(T), torch.get_default_dtype()
    try:
        for default in (torch.float32, torch.float64, torch.bfloat16):
            torch.set_default_dtype(default)
            mask = made(lambda: (tokens[None, :] <= tokens[:, None]) * 1.5)
            assert type(mask) is PairMask and mask.dtype == default
    finally:
        torch.set_default_dtype(before)


def made(make, least: int = T * T):
    """What `make` returns while masks are recorded."""
    recorder = MaskRecorder(least)
    recorder.begin()
    try:
        return make()
    finally:
        recorder.end()


def of_transformers(kind: str, added: bool, padding: torch.Tensor | None):
    function = masking.eager_mask if added else masking.sdpa_mask
    more = {"dtype": torch.bfloat16} if added else {"allow_is_causal_skip": False}
    return lambda: function(
        batch_size=B, q_length=T, kv_length=T, mask_function=KINDS[kind], attention_mask=padding, **more
    )


@pytest.mark.parametrize("padding", [None, PADDING], ids=["whole", "padded"])
@pytest.mark.parametrize("added", [False, True], ids=["bools", "added"])
@pytest.mark.parametrize("kind", KINDS)
def test_masks_of_transformers(kind, added, padding, small):
    """They say what they would have said, whole, along diagonals and in blocks."""
    make = of_transformers(kind, added, padding)
    mask, real = made(make), make()
    if kind == "both ways" and padding is None:  # made of one comparison of a column
        return
    assert isinstance(mask, PairMask) and (mask.shape, mask.dtype) == (real.shape, real.dtype)
    for offset in (0, -1):
        assert torch.equal(diagonal(mask, offset), diagonal(real, offset))
    count = 0
    for rows, queries, values in blocks(mask, 1 << 20):
        assert torch.equal(values, real[rows, 0, queries]) and values.numel() <= 2 * T
        count += values.numel()
    assert count == real.numel()
    for windows in ((4, 0), (0,), (BOTH_WAYS,)):
        ours, theirs = (read_mask(each, windows, None) for each in (mask, real))
        assert ours.interrupted == theirs.interrupted and (ours.documents is None) == (theirs.documents is None)
        if ours.documents is not None:
            assert all(torch.equal(*pair) for pair in zip(*map(_tensors, (ours.documents, theirs.documents))))
            assert _numbers(ours.documents) == _numbers(theirs.documents)
    assert mask.cell.made is None
    assert torch.equal(mask, real) and torch.equal(mask.cell.real(), real)


@pytest.mark.parametrize(
    "at_once, rows, queries",
    [(10**6, [4], [6]), (80, [2, 2], [6]), (36, [1] * 4, [6]), (29, [1] * 4, [4, 2]), (6, [1] * 4, [1] * 6)],
)
def test_a_mask_is_read_in_parts_of_so_many_pairs(at_once, rows, queries):
    """Whole rows together, or one in parts, or one query at least."""
    mask = torch.rand(4, 1, 6, 6) > 0.5
    found = list(blocks(mask, at_once))
    assert [tuple(values.shape) for *_, values in found] == [(r, q, 6) for r in rows for q in queries]
    again = torch.zeros(4, 6, 6, dtype=torch.bool)
    for some, of, values in found:
        again[some, of] = values
    assert torch.equal(again, mask[:, 0])


def _tensors(found):
    return found.real, found.starts


def _numbers(found):
    return found.count, found.documents, found.longest, found.window


def without_overrides(function, *args, **kwargs):
    """A call as code in C++ makes it, of autograd or of a user's extension."""
    with plain_functions():
        return function(*args, **kwargs)


READERS = {
    "sum": lambda mask: mask.sum(),
    "slice": lambda mask: mask[:, :, 3:, :5],
    "some queries": lambda mask: mask[:, :, -3:, :],
    "every second": lambda mask: mask[:, :, ::2],
    "all": lambda mask: mask[:, :, -0:, :],
    "one row": lambda mask: mask[0],
    "another size": lambda mask: mask[:, None, :],
    "chosen rows": lambda mask: mask[[0, 1]],
    "where": lambda mask: torch.where(mask, 1, 2.5),
    "where alone": lambda mask: torch.where(mask)[3],
    "number": lambda mask: mask * 1,
    "flag": lambda mask: mask & True,
    "not": lambda mask: (~mask).float(),
    "filled": lambda mask: torch.zeros(B, 1, T, T).masked_fill(~mask, -1.0),
    "subtracted": lambda mask: (1.0 - mask.float()) * -5.0,
    "written": lambda mask: mask.logical_not_(),
    "one query": lambda mask: mask.index_fill(2, torch.tensor([1]), True),
    "list": lambda mask: torch.tensor(mask.tolist()),
    "numpy": lambda mask: torch.from_numpy(mask.numpy()),
    "copy": copy.deepcopy,
    "pickle": lambda mask: pickle.loads(pickle.dumps(mask)),
    "detached": lambda mask: mask.detach().any(-1),
    "out": lambda mask: torch.logical_not(mask, out=torch.empty(B, 1, T, T, dtype=torch.bool)),
    "wider": lambda mask: mask[:1].expand(5, -1, T, T),
    "attention": lambda mask: nn.functional.scaled_dot_product_attention(
        *(torch.ones(B, 2, T, 4),) * 2, torch.arange(B * 2 * T * 4.0).view(B, 2, T, 4), attn_mask=mask
    ),
    "no overrides": lambda mask: without_overrides(torch.logical_xor, mask, PADDING[:, None, None]),
    "no overrides, by name": lambda mask: without_overrides(torch.sum, mask, (2,), dtype=torch.half),
    "no overrides, detached": lambda mask: without_overrides(Tensor.detach, mask).float(),
    "memory": lambda mask: torch.tensor(
        mask.data_ptr() == mask.cell.real().data_ptr() if hasattr(mask, "cell") else True
    ),
}


@pytest.mark.parametrize("reader", READERS)
def test_whoever_reads_a_mask_gets_its_values(reader, small):
    make = of_transformers("window", False, PADDING)
    ours, theirs = READERS[reader](made(make)), READERS[reader](make())
    assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize("sizes", [(B, 4, T, T), ((B, 4, -1, T),), (torch.Size([B, 4, T, T]),)], ids=str)
def test_a_mask_of_more_heads_is_not_made(sizes, small):
    """Nor one of as many: it is the mask itself."""
    make = of_transformers("window", False, PADDING)
    mask, real = made(make), make()
    wider = mask.expand(*sizes)
    assert isinstance(wider, PairMask) and wider.shape == (B, 4, T, T) and mask.cell.made is wider.cell.made is None
    assert torch.equal(wider, real.expand(*sizes)) and identity(wider) == identity(mask)
    assert mask.expand(-1, 1, T, T).cell is mask.cell


@pytest.mark.parametrize("sizes", [(5,), (2, T, T), ((2, 1, T, T),), (B, 1, T), (-1, 2.0, T, T)], ids=str)
def test_sizes_that_do_not_fit_are_torchs_error(sizes, small):
    make = of_transformers("window", False, PADDING)
    for mask in (made(make), make()):
        with pytest.raises(TypeError if sizes[:2] == (-1, 2.0) else RuntimeError, match="expand"):
            mask.expand(*sizes)


def test_a_mask_is_what_it_was_when_it_was_made(small):
    """Whatever is written afterwards, into what it was made of or into it."""
    row, column, seen = torch.arange(T), torch.arange(T)[:, None], PADDING[:, None, None, :].clone()
    earlier = made(lambda: (row <= column)[None, None])  # another shape: computed at once
    mask, alias, whole, later = made(lambda: _three(row[None, None, None], column[None, None], seen))
    exact = (earlier & seen).clone()
    for each in (row, column, seen):
        each.zero_()
    assert not torch.is_tensor(mask.cell.made) and torch.equal(diagonal(mask, 0), exact[:, 0].diagonal(0, 1, 2))
    mask[:, :, 0] = True
    assert torch.equal(later, ~exact) and torch.equal(alias, mask) and mask[:, :, 0].all()
    assert not torch.equal(mask, exact) and identity(alias) == identity(mask) != identity(later)
    assert type(whole) is PairMask and identity(whole) == identity(mask) and torch.equal(whole, mask)
    exact[:, :, 0] = True
    assert torch.equal(torch.cat([values for *_, values in blocks(mask, T)]), exact[:, 0].reshape(-1, 1, T))


def _three(row, column, seen):
    mask = (row <= column) & seen
    return mask, mask.expand(-1, 1, -1, T), mask[:, :, -0:, :T], ~mask


def test_other_comparisons_are_computed(small):
    """Of numbers, of large tensors, of few pairs, of what needs gradients, and once layers run."""
    row = torch.arange(T)
    for make in (
        lambda: row <= 3,
        lambda: torch.ones(T, T) <= torch.zeros(T, T),
        lambda: row[:6] <= row[:6, None],
        lambda: torch.le(row, row[:, None], out=torch.empty(T, T, dtype=torch.bool)),
    ):
        assert type(made(make)) is torch.Tensor
    with pytest.raises(RuntimeError):
        made(lambda: torch.arange(20) <= torch.arange(21)[:, None].expand(21, 5))
    recorder = MaskRecorder(1)
    recorder.begin()
    with torch.device("cpu"):  # a mode of another package, which ends later
        recorder.end()
        assert type(row <= row[:, None]) is torch.Tensor
    recorder.end()
    assert torch.overrides._get_current_function_mode() is None


@pytest.mark.parametrize("value, dtype", [(0.0, torch.bfloat16), (0.5, None), (3, None), (True, None)])
def test_a_number_for_a_gpu_is_not_waited_for(value, dtype, monkeypatch):
    """`torch.tensor` copies it from the host, behind all that was launched: each step's mask waited for the step before."""
    asked = []
    monkeypatch.setattr(torch, "full", lambda *args, **kwargs: asked.append((args, kwargs)))
    named = {"device": "cuda:1"} | ({"dtype": dtype} if dtype else {})
    made(lambda: torch.tensor(value, **named))
    assert asked == [(((), value), named)]
    monkeypatch.undo()
    expected, found = (
        make(device="cpu", dtype=dtype) for make in (partial(torch.tensor, value), partial(torch.full, (), value))
    )
    assert found.dtype == expected.dtype and torch.equal(found, expected)


def test_queries_may_be_fewer_than_keys(small):
    """As of a row that continues another: blocks have all keys, and some of the queries."""
    queries, keys = torch.arange(12, 12 + 8)[:, None] - torch.tensor([0, 3, 11])[:, None, None, None], torch.arange(T)
    mask, real = made(lambda: keys <= queries, 8 * T), keys <= queries
    assert isinstance(mask, PairMask) and mask.shape == (B, 1, 8, T)
    found = [(values, real[rows, 0, some]) for rows, some, values in blocks(mask, 1 << 20)]
    assert len(found) == B * 4 and all(torch.equal(values, expected) for values, expected in found)


class Largest(TorchDispatchMode):
    """The most elements of any tensor that is made inside."""

    found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if type(tensor) is torch.Tensor:
                self.found = max(self.found, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


@pytest.fixture
def largest(monkeypatch):
    """While masks are made and read. (Layers run eagerly in such a mode.)"""
    mode = Largest()
    begin, end, read = MaskRecorder.begin, MaskRecorder.end, documents.begin_reading

    def begins(recorder):
        begin(recorder)
        mode.__enter__()

    def ends(recorder):
        if not recorder.ended:
            mode.__exit__(None, None, None)
        end(recorder)

    def reads(*args):
        with mode:
            return read(*args)

    monkeypatch.setattr(MaskRecorder, "begin", begins)
    monkeypatch.setattr(MaskRecorder, "end", ends)
    monkeypatch.setattr(documents, "begin_reading", reads)
    monkeypatch.setattr(recording, "LONG", 1)
    monkeypatch.setattr(pair_masks, "BLOCK", 1 << 14)
    return mode


def test_no_mask_of_all_pairs_is_made(largest, monkeypatch):
    """Of padded, packed and whole rows of a model with windows."""
    length = 256
    monkeypatch.setattr(MaskCell, "real", lambda cell: pytest.fail("a mask was made"))

    model, reference = pair(lambda: attending(family="mistral", use_cache=False, sliding_window=6))
    for inputs in (zoo.batch(256, 1, length), padded(3, length, seed=1), packed((100, length - 100))):
        assert_same_flattened(model, reference, inputs)
        assert 0 < largest.found < length * length
    assert flattened(model) == 1 and not tunecompile.report(model).regions[0].recompiles
    assert told_apart(model) == 1 and all(each.recorded for each in model._tunecompile.paddings)
