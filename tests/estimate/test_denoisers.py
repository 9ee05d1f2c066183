"""Plans of diffusion transformers by name: what they hold, and that rows of image tokens are planned for."""

import pytest

from tunecompile.estimate import denoisers, multi_gpu
from tunecompile.estimate.meta_model import meta_model
from tunecompile.estimate.multi_gpu import Question
from tunecompile.planner.datasheets import find_gpu

pytest.importorskip("diffusers")
pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")
TINY = dict(num_layers=2, attention_head_dim=32, num_attention_heads=2, in_channels=16)
IMAGES = dict(TINY, joint_attention_dim=24, axes_dims_rope=(8, 12, 12))
MODELS = {
    "flux-tiny": (denoisers.FLUX, dict(IMAGES, num_single_layers=2, pooled_projection_dim=20, guidance_embeds=True)),
    "qwen-image-tiny": (denoisers.QWEN, dict(IMAGES, out_channels=4)),
    "wan-tiny": (denoisers.WAN, dict(TINY, out_channels=4, text_dim=24, ffn_dim=128)),
}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    for name, about in MODELS.items():
        monkeypatch.setitem(denoisers.DENOISERS, name, about)


@pytest.mark.parametrize("mode", ["qlora", "lora", "full"])
def test_what_is_trained_and_in_nf4(mode):
    model = meta_model("flux-tiny", mode, 4)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if mode == "full":
        assert len(trained) == len(list(model.parameters()))
    else:
        assert trained and all("lora_" in name for name in trained)
        assert any("net.2.lora_A" in name for name in trained) and not any("proj_mlp" in name for name in trained)
    packed = [name for name, module in model.named_modules() if "4bit" in type(module).__name__]
    assert bool(packed) == (mode == "qlora")


@pytest.mark.parametrize(
    "name", ["wan-tiny", *(pytest.param(name, marks=pytest.mark.slow) for name in ("flux-tiny", "qwen-image-tiny"))]
)
def test_a_plan_of_an_image(name):
    small, large = (
        multi_gpu.plan(Question(name, "lora", 1, length, find_gpu("h200"), gpus=2, rank=4)) for length in (64, 256)
    )
    assert [engine.engine for engine in small.engines] == ["one GPU", "DDP", "FSDP2"]
    assert 0 < small.engines[0].activations < large.engines[0].activations
    assert all(engine.fits and engine.step_ms > 0 for engine in small.engines)
