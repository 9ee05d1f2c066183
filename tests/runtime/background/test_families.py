"""Models of several kinds of layers: each kind has its code made, and finds it, in sizes that change."""

import copy

import pytest
import torch

from tests.runtime.background.later import Generated, warming
from tests.support import zoo
from tests.support.notes import EAGER, find

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
ERROR = 2e-5  #: of a gradient, in fp32


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """No code of another test's."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def changes_over(model, batches, changes, monkeypatch):
    """changes: of kinds of layers and calls. Steps are eager's before there is code and after, and nothing is generated in the training."""
    reference, made = copy.deepcopy(model), Generated(monkeypatch)
    code = warming(model, monkeypatch)

    def steps(seed):
        for make in (*batches, batches[0]):
            loss, ours = zoo.step(model, make(seed))
            expected, theirs = zoo.step(reference, make(seed))
            assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
            assert max(zoo.errors(ours, theirs, 1e-4).values()) < ERROR

    steps(1)
    assert made.graphs == 0
    code.deliver()
    generated, ordered = made.graphs, len(code.orders)
    steps(2)
    steps(3)
    assert (made.graphs, len(code.orders)) == (generated, ordered)
    assert len(find(model, "changed-over")) == changes
    assert not find(model, *EAGER, "waits-for-code", "not-from-background", "compiled-at-once")


def test_windows_and_experts(monkeypatch):
    """Two windows: a first size and others each have two graphs, which change over together."""
    model = zoo.adapt(zoo.make("gpt_oss", num_hidden_layers=2), r=4)
    batches = [lambda seed, shape=shape: zoo.batch(256, *shape, seed=seed) for shape in ((2, 16), (3, 12))]
    changes_over(model, batches, 2, monkeypatch)


def test_images_of_changing_sizes(monkeypatch):
    """Blocks of the tower, its mergers, and layers behind images."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForImageTextToText, Qwen3VLConfig

    from benchmarks.steps.vision import MODELS, make_batch

    text, tower, more = MODELS["qwen3-vl-tiny"]
    text = text | {"tie_word_embeddings": False, "num_hidden_layers": 2}
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(Qwen3VLConfig(text_config=text, vision_config=tower, **more))
    model.config.use_cache = False
    adapters = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    model = get_peft_model(model, adapters).train()
    sizes = ((4, 4), (4, 8), (6, 4))
    batches = [lambda seed, size=size: make_batch(model.config, seed, size, 8, "cpu") for size in sizes]
    changes_over(model, batches, 3, monkeypatch)
