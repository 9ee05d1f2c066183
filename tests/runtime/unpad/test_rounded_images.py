"""Images whose sizes do not recur: patches are filled up by an image behind the others, and text behind images is one row."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import tunecompile
from tests.support import zoo
from tests.support.compare import assert_close
from tests.support.memory.cpu_recorder import CpuRecorder
from tests.support.models.images import GRIDS, adapted, images_of, qwen2_5_vl, qwen3_vl
from tests.support.notes import fell_back, has
from tests.support.rounding import Shapes, waited_for
from tunecompile.notes import note
from tunecompile.runtime.cuda_graphs import launch_bound, replay
from tunecompile.runtime.layers import variant
from tunecompile.runtime.model_state import state_of
from tunecompile.runtime.step.rows_refused import RowsRefused
from tunecompile.runtime.unpad.flat_batch import FlatBatch
from tunecompile.runtime.unpad.image_bounds import ImageBounds, read_bounds
from tunecompile.runtime.unpad.owner_call import OwnerCall
from tunecompile.runtime.unpad.rounding.patches import row_of_patches
from tunecompile.runtime.unpad.rounding.rounding import Rounding

tf = pytest.importorskip("transformers")
pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")
EXACT = dict(loss=1e-6, limit=1e-6)  #: of models in fp64, whose norms and losses are in fp32


@pytest.fixture
def shapes(monkeypatch):
    waited_for(monkeypatch)
    return Shapes.of(monkeypatch)


def models(make=qwen3_vl):
    """(optimized, as it was), in fp64"""
    plain = adapted(make)[0].double()
    return tunecompile.optimize(copy.deepcopy(plain), executor="eager"), plain


def images(grids):
    return images_of(grids, torch.float64)


def same(ours, plain, batch, **limits):
    assert_close(zoo.step(ours, batch), zoo.step(plain, batch), **{**EXACT, **limits})


@pytest.mark.slow
@pytest.mark.parametrize("make", [qwen3_vl, qwen2_5_vl])
def test_ten_sizes_of_images_are_few_shapes(make, shapes):
    """Ten numbers of patches and ten lengths of text: one of each comes as it is, the others are of 64 or 128."""
    ours, plain = models(make)
    for grids in GRIDS:
        same(ours, plain, images(grids))
    kinds = {"qwen3_vl": ("Qwen3VLVisionBlock", "Qwen3VLTextDecoderLayer")}
    tower, text = kinds.get(make.__name__, ("Qwen2_5_VLVisionBlock", "Qwen2_5_VLDecoderLayer"))
    assert shapes.of_layers(tower) == {(32, 32), (64, 32), (128, 32)}
    assert shapes.of_layers(text) == {(2, 18, 64), (1, 64, 64), (1, 128, 64)}
    report = tunecompile.report(ours)
    assert not fell_back(ours), report
    assert all(region.compiles == (2 if "language" in region.name else 1) for region in report.regions), report
    assert has(ours, "sizes-rounded", subject="Text", count=9) and has(ours, "sizes-rounded", subject="Vision", count=9)


class Tower(nn.Module):
    """A tower alone, and a loss of each feature."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tower = qwen3_vl()[0].model.visual

    def forward(self, pixel_values, image_grid_thw, **_):
        made = self.tower(pixel_values, image_grid_thw).pooler_output
        return tf.utils.ModelOutput(loss=made.sin().mul(torch.arange(made.shape[-1])).mean())


def towers():
    plain = Tower().double()
    return tunecompile.optimize(copy.deepcopy(plain), executor="eager"), plain


def test_a_fill_that_is_seen_is_found(monkeypatch):
    """What the tests above compare differs, where patches that fill up a row take part."""
    waited_for(monkeypatch)
    by_images = FlatBatch.by_images

    def joined(self, *given):
        made = by_images(self, *given)
        made.offsets = made.offsets.masked_fill(made.offsets == made.real, len(made.index))
        return made

    monkeypatch.setattr(FlatBatch, "by_images", joined)
    ours, plain = towers()
    with pytest.raises(AssertionError):
        for grids in GRIDS[:4]:
            same(ours, plain, images(grids), floor=1e-6)
    assert not has(ours, "sizes-kept")


def test_patches_are_filled_once_before_the_first_block_and_cut_behind_the_last(monkeypatch):
    """Of one kind of bounds. A row that is filled for each block would be a copy for each."""
    waited_for(monkeypatch)
    ours, plain = towers()
    made, each = [], FlatBatch.at
    for at, grids in enumerate(GRIDS[:4]):
        if at == 3:
            monkeypatch.setattr(FlatBatch, "at", lambda self, x, index: made.append(x.shape) or each(self, x, index))
        same(ours, plain, images(grids), floor=1e-6)
    patches = sum(t * h * w for t, h, w in GRIDS[3])
    assert made == [(patches, 32), (patches, 16), (patches, 16)], "hidden states and two tables"


def test_what_fills_up_a_row_is_an_image_of_its_own():
    bounds = torch.tensor([0, 4, 12, 12, 20])
    flat = row_of_patches(20, 64, True, bounds.device)
    flat = flat.by_images(bounds, *(lambda read: (read[0], len(read[1]) - 1))(read_bounds(bounds, 20)))
    assert flat.offsets.tolist() == [0, 4, 12, 12, 20, 64, 64, 64] and flat.offsets.dtype == torch.int32
    assert flat.longest.shape == (129, 0) and not flat.drops and flat.is_row(torch.empty(64, 3))
    assert not flat.is_row(torch.empty(1, 64)) and not flat.is_row(None)
    table, hidden = torch.randn(20, 3), torch.randn(20, 5)
    args, kwargs = flat.enter((hidden, bounds), {"table": (table, table)}, None, keep=True)
    assert args[1] is bounds and kwargs["image_bounds"] is bounds and torch.equal(args[0][:20], hidden)
    assert torch.equal(args[0][20:], hidden[:1].expand(44, 5)) and kwargs["table"][0].shape == (64, 3)
    left = flat.leave(args[0] + 1, keep=True)
    assert torch.equal(left, hidden + 1) and left.is_contiguous() and flat.rows.row_of(left) is not None
    other = torch.tensor([0, 20])
    flat = flat.by_images(other, read_bounds(other, 20)[0], 300)
    assert flat.bounds is other and flat.offsets.tolist() == [0, 20, 64, 64] and flat.longest.shape == (513, 0)
    assert flat.rows.row_of(left) is not None, "blocks of windows and of whole images hand on one row"


def filled_up():
    flat = row_of_patches(20, 64, True, torch.device("cpu"))
    bounds = torch.tensor([0, 20])
    return flat.by_images(bounds, read_bounds(bounds, 20)[0], 20)


def test_calls_whose_patches_are_filled_up(monkeypatch):
    """One row, of the patches that bounds tell of: of two, or with other bounds beside, images would be others."""
    waited_for(monkeypatch)
    layer, watch = nn.Linear(1, 1), SimpleNamespace(reason=lambda: None)
    made = Rounding(None, lambda: (layer,), watch, replay.GraphReplays())
    made.patches.graphs[layer] = graph = SimpleNamespace(of_images=True, mixes=None)
    made.sizes.first, made.sizes.waits = (8,), 1 << 20
    bounds, tower = torch.tensor([0, 4, 20], dtype=torch.int32), ImageBounds([], "bounds", None)

    def row(*sizes, call=None, **given):
        return made.patches.batch_of(call or OwnerCall({}), tower, (torch.randn(sizes),), {"bounds": bounds, **given})

    for sizes in ((20, 3), (1, 20, 3)):
        found = row(*sizes)
        assert found.bounds is bounds and found.offsets[:4].tolist() == [0, 4, 20, 64] and len(found.index) == 64
        assert found.lone is (len(sizes) == 2) and found.real == 20
    for sizes in ((2, 20, 3), (1, 1, 20, 3), (0, 20, 3), (21, 3)):
        assert row(*sizes) is None, sizes
    assert row(20, 3, other=torch.arange(3)) is None and row(20, 3, bounds=None) is None
    assert row(20, 3, other=bounds, table=torch.randn(20, 3), n=3) is not None
    call = OwnerCall({})
    assert row(20, 3, call=call).rows is row(20, 3, call=call).rows and call.sized
    assert row(1, 20, 3, call=call) is None, "blocks before it were given a row without that dimension"
    graph.mixes = note("mixes-tokens", detail="a mean")
    assert row(20, 3) is None and made.kept is graph.mixes


def test_a_row_that_is_filled_up_never_runs_by_the_layers_own_code():
    """Its bounds end before the row does."""
    layer, flat = nn.Linear(3, 3), filled_up()
    args, kwargs = flat.enter((torch.randn(20, 3), flat.bounds), {}, None, keep=False)
    with pytest.raises(RowsRefused):
        variant.layer_call(layer, *args, **kwargs)
    made = SimpleNamespace(refused="why it cannot be traced", flat=False)
    with pytest.raises(RowsRefused):
        variant.Variant.call(made, layer, *args, **kwargs)


def test_a_graph_that_may_mix_patches_is_found_when_it_ran():
    """It may be another one than that of the call which came as it was."""
    made, layer, flat = Rounding(None, tuple, None, None), nn.Linear(1, 1), filled_up()
    mixes = note("mixes-tokens", detail="a mean")
    for graph, code in (
        (SimpleNamespace(of_images=True, mixes=None), None),
        (SimpleNamespace(of_images=True, mixes=mixes), "mixes-tokens"),
        (SimpleNamespace(of_images=False, mixes=None), "runs-eagerly"),
        (None, "runs-eagerly"),
    ):
        assert getattr(made.ran(layer, flat, (), {}, graph), "code", None) == code


@pytest.mark.slow
def test_sizes_that_never_recur_are_replayed(monkeypatch):
    """By a stand-in for CUDA graphs: each size has come once, and its layers were recorded."""
    monkeypatch.setattr(replay, "CudaRecorder", CpuRecorder)
    monkeypatch.setattr(launch_bound, "SAMPLES", 1)
    waited_for(monkeypatch, learns=False)
    plain = adapted(qwen3_vl)[0]
    ours = tunecompile.optimize(copy.deepcopy(plain), executor="eager")
    replayed, inner, buffer = [], replay.Recording.replay, replay.InputBuffers.of

    def watched(self, inputs):
        replayed.append(self)
        return inner(self, inputs)

    monkeypatch.setattr(replay.Recording, "replay", watched)
    # (the stand-in runs what it records, so that offsets have to be some)
    monkeypatch.setattr(replay.InputBuffers, "of", lambda *given: buffer(*given).copy_(given[-1]))
    counts = []
    for size in (4, 5, 6, 9, 7, 10, 8, 11, 12, 13, 14, 15, 16):
        before = len(replayed)
        assert_close(*(zoo.step(m, images_of([(1, 2, 2 * size)] * 2)) for m in (ours, plain)), limit=1e-3)
        counts.append(len(replayed) - before)
    layers = len(plain.get_base_model().model.visual.blocks) + len(plain.get_base_model().model.language_model.layers)
    assert counts[:2] == [0, 0] and counts[-3:] == [2 * layers] * 3, counts
    assert state_of(ours).replays.recorded <= 3 * 2 * layers, "each of three sizes once, forward and backward"
