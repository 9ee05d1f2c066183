"""Towers that transformers runs image by image: in one graph by the bounds of images, whatever their sizes."""

import copy
import inspect
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import tunecompile
from tests.support import zoo
from tests.support.compare import assert_close
from tests.support.models.images import adapted, attending, images_of, qwen2_5_vl
from tests.support.notes import fell_back
from tunecompile.integrations.kernel_functions.bounds import Fork, fork_of
from tunecompile.runtime.unpad.image_bounds import ImageBounds, read_bounds

tf = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
EDGES = [[(1, 4, 4)] * 2, [(1, 6, 4), (1, 2, 2)], [(1, 8, 8)], [(2, 4, 4), (1, 4, 12), (1, 2, 6)]]


class Tower(nn.Module):
    """A tower alone, and a loss of each feature."""

    def __init__(self, make, implementation: str = "sdpa", adapts: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.tower = make()[0].model.visual
        tunecompile.register()
        self.tower.set_attn_implementation(implementation)
        self.tower = zoo.adapt(self.tower, target_modules=["qkv", "proj"], task_type=None) if adapts else self.tower

    def forward(self, pixel_values: torch.Tensor, image_grid_thw: torch.Tensor, **_) -> SimpleNamespace:
        made = self.tower(pixel_values, image_grid_thw)
        made = made.pooler_output
        return SimpleNamespace(loss=made.sin().mul(torch.arange(made.shape[-1])).mean())


def optimized(model: nn.Module) -> nn.Module:
    return tunecompile.optimize(copy.deepcopy(model), executor="eager")


def implementations(model: nn.Module) -> dict[str, str]:
    configs = {name: module.config for name, module in model.named_modules() if hasattr(module, "config")}
    return {name: getattr(config, "_attn_implementation", "") for name, config in configs.items()}


def test_other_numbers_and_sizes_of_images_are_one_graph():
    """Windows, whole images, frames of a video, one image alone. Other calls and configs are as they were."""
    model = Tower(qwen2_5_vl).double()
    before, ours = implementations(model), optimized(model)
    for grids in EDGES:
        batch = images_of(grids, torch.float64)
        assert_close(zoo.step(ours, batch), zoo.step(model, batch), loss=1e-9, limit=1e-6, floor=1e-6)
    report = tunecompile.report(ours)
    region = report.regions[0]
    assert not fell_back(ours) and region.compiles == 1, report
    assert region.providers["varlen_attention: reference"] == 1, report
    assert implementations(ours) == before
    with torch.no_grad():
        assert torch.equal(ours.eval()(**batch).loss, model.eval()(**batch).loss)


def test_rows_behind_images_are_of_any_length_from_the_first_batch_on():
    """A second graph for the second size of images would take 15 s of a 4B's second step. The first rows are as long as
    the model is wide, by chance."""
    ours = optimized(attending(adapted(qwen2_5_vl, "q_proj", "qkv")[0]))
    for grids in ([(1, 10, 20)] * 2, [(1, 8, 4)] * 2):
        zoo.step(ours, images_of(grids))
    report = tunecompile.report(ours)
    assert not fell_back(ours) and all(region.compiles == 1 for region in report.regions), report


def test_a_frozen_tower_saves_nothing():
    model = Tower(qwen2_5_vl, adapts=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("merger" in name)
    ours, batch = optimized(model), images_of(EDGES[1])
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        ours.train()(**batch)
    blocks = tunecompile.report(ours).regions[0]
    patches = sum(t * h * w for t, h, w in EDGES[1])
    assert blocks.compiles == 1 and blocks.saved_bytes == [0], blocks
    assert not any(tensor.shape[:1] == (patches,) and tensor.shape[-1] > 32 for tensor in saved)
    assert_close(zoo.step(ours, batch), zoo.step(model, batch))


class Masked(Tower):
    """A tower whose mask says where images are: one row of patches, and tables that have no row."""

    def __init__(self):
        nn.Module.__init__(self)
        torch.manual_seed(0)
        sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
        self.tower = tf.PixtralVisionModel(tf.PixtralVisionConfig(**sizes, patch_size=4, image_size=64))

    def forward(self, pixel_values: torch.Tensor, image_sizes: torch.Tensor) -> SimpleNamespace:
        made = self.tower(pixel_values, image_sizes).last_hidden_state
        return SimpleNamespace(loss=made.sin().mul(torch.arange(made.shape[-1])).mean())


@pytest.mark.slow
def test_images_that_a_mask_keeps_apart():
    model = Masked()
    ours = optimized(model)
    for sizes in ([(16, 16), (8, 16)], [(24, 8), (16, 40), (4, 4)], [(16, 36)], [(8, 8), (32, 32)]):
        batch = {"pixel_values": torch.randn(len(sizes), 3, 40, 40), "image_sizes": torch.tensor(sizes)}
        assert_close(zoo.step(ours, batch), zoo.step(model, batch), limit=1e-4, floor=1e-3)
    report = tunecompile.report(ours)
    assert report.regions[0].compiles == 1 and report.regions[0].providers["varlen_attention: reference"], report


@pytest.mark.slow
def test_a_function_of_the_users_is_called_image_by_image(monkeypatch):
    lengths = []
    stock = tf.AttentionInterface()["sdpa"]

    def mine(module, query, *args, **kwargs):
        lengths.append(query.shape[2])
        return stock(module, query, *args, **kwargs)

    monkeypatch.setitem(tf.AttentionInterface._global_mapping, "mine", mine)
    model = Tower(qwen2_5_vl, "mine")
    ours, batch = optimized(model), images_of(EDGES[1])
    expected = zoo.step(model, batch)
    before, lengths[:] = list(lengths), []
    assert_close(zoo.step(ours, batch), expected)
    assert lengths and set(lengths) == set(before)


def test_bounds_that_are_none_are_eagers():
    model = Tower(qwen2_5_vl)
    block = optimized(model).tower.blocks[0].train()
    hidden, tables = torch.randn(12, 32), (torch.ones(12, 16), torch.zeros(12, 16))
    for bounds in ([0, 4, 10], [0, 8, 4, 12]):
        with pytest.raises((RuntimeError, ValueError)):
            block(hidden, cu_seqlens=torch.tensor(bounds), position_embeddings=tables)


@pytest.mark.parametrize(
    ("bounds", "longest"),
    [
        ([0, 4, 12], 129),
        ([0, 12], 129),
        ([0, 4, 4, 12], 129),
        ([0, 4, 10], 0),
        ([1, 12], 0),
        ([0, 8, 4, 12], 0),
        ([0], 0),
    ],
)
def test_bounds_are_read(bounds, longest):
    read = read_bounds(torch.tensor(bounds), 12)
    assert (read is not None) == bool(longest)
    if read is not None:
        assert read[0].tolist() == [*bounds, 12] and read[1].shape == (longest, 0) and read[0].dtype == torch.int32


def test_bounds_are_read_again_when_they_were_written_to():
    bounds = torch.tensor([0, 4, 12])
    read = read_bounds(bounds, 12)
    assert read_bounds(bounds, 12) is read
    bounds[1] = 7
    assert read_bounds(bounds, 12)[0].tolist() == [0, 7, 12, 12] and read_bounds(bounds, 11) is None


def test_the_fork_is_found_in_towers():
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen

    assert fork_of(qwen.Qwen2_5_VLVisionAttention.forward) == Fork("cu_seqlens", False)
    assert fork_of(qwen.Qwen2_5_VLAttention.forward) is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("is_causal=False", "is_causal=True"),
        ("attention_mask=None", "attention_mask=position_embeddings"),
        ("cu_seq_lens_k=cu_seqlens", "cu_seq_lens_k=max_seqlen"),
        ("cu_seqlens[1:] - cu_seqlens[:-1]", "cu_seqlens[1:] - cu_seqlens[:-1] - 1"),
        ("scaling=self.scaling,\n                    ", "scaling=1.0,\n                    "),
        ("is_flash_attention_requested(self.config)", "is_flash_attention_requested(self.config) and max_seqlen"),
        (
            "            max_seqlen = get_max",
            "            query_states = query_states * 2\n            max_seqlen = get_max",
        ),
        ("torch.cat(attn_outputs, dim=1)", "torch.cat(attn_outputs[::-1], dim=1)"),
        ("for q, k, v in zip", "for k, q, v in zip"),
        ("(query_states, key_states, value_states)\n", "(query_states, key_states, key_states)\n"),
    ],
)
def test_another_fork_is_none(old, new, tmp_path):
    """Ways that may differ in more than the loop."""
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen

    source = inspect.getsource(qwen.Qwen2_5_VLVisionAttention)
    assert source.count(old) >= 1, old
    path = tmp_path / "changed.py"
    path.write_text(source.replace(old, new))
    namespace = dict(vars(qwen))
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    assert fork_of(namespace["Qwen2_5_VLVisionAttention"].forward) is None


class OnGpu(torch.Tensor):
    """As far as it is asked."""

    is_cuda = True


def test_a_gpu_without_a_kernel_for_bounds_gets_images_one_by_one(monkeypatch):
    """In 32 bits a mask of all pairs of patches would be made."""
    tower, bounds = ImageBounds([], "bounds", 1), torch.tensor([0, 4, 12], dtype=torch.int32)

    def read(dtype, kind=torch.Tensor, *sizes):
        found = tower.read((torch.zeros(sizes or (12, 3), dtype=dtype).as_subclass(kind), bounds), {})
        assert found is None or found[0] is bounds and found[1].tolist() == [0, 4, 12, 12]
        return found is not None

    assert read(torch.float32) and read(torch.bfloat16, OnGpu) and not read(torch.float32, OnGpu)
    assert tower.read((torch.zeros(12, 3), [0, 4, 12]), {}) is None and tower.read((torch.zeros(12, 3),), {}) is None
    assert not read(torch.float32, torch.Tensor, 12) and not read(torch.float32, torch.Tensor, 11, 3)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
    assert read(torch.float32, OnGpu)
