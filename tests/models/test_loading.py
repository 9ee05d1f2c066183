"""The ways of the docs to load a model that is too big to be loaded whole: it trains as the same weights do without tunecompile."""

import pytest
import torch

import tunecompile
from tests.integrations.distributed.common import DEVICE
from tests.support import zoo
from tests.support.files import loaded, save_shards
from tests.support.notes import has

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    save_shards(folder)
    assert len(list(folder.glob("*.safetensors"))) > 2
    return str(folder)


def trained(make, **adapter):
    """What the report says after two steps, whose losses and gradients are those of another that was loaded alike."""

    def adapted():
        base = make()
        torch.manual_seed(1)
        return zoo.adapt(base, r=8, **adapter).train()

    reference, model = adapted(), adapted()
    tunecompile.optimize(model, executor="inductor" if DEVICE == "cuda" else "eager")
    for seed in range(2):
        inputs = zoo.batch(seed=seed, device=DEVICE)
        (loss, ours), (expected, theirs) = zoo.step(model, inputs), zoo.step(reference, inputs)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5 if DEVICE == "cpu" else 1e-4) and set(
            ours
        ) == set(theirs)
        assert max(zoo.errors(ours, theirs).values()) < 1e-3
    return tunecompile.report(model)


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_shards_are_quantised_as_they_are_read(where, path):
    bnb = pytest.importorskip("bitsandbytes")
    make = lambda: loaded("load_in_4bit=True", path=path, device=where)  # noqa: E731
    assert sum(isinstance(module, bnb.nn.Linear4bit) for module in make().modules()) == 21
    report = trained(make)
    assert {m.family: m.rewritten for m in report.matches}["lora"] == 7 and report.compiles == 1


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_every_placement(placement, path):
    room = {"cpu": "1GB"} | ({0: "1GB"} if DEVICE == "cuda" else {})
    report = trained(lambda: loaded("device_map=placement", path=path, placement=placement, room=room))
    assert report.compiles == 1 and not report.notes, report


def test_what_waits_on_the_disk_runs_as_it_is(path, tmp_path):
    room = {"cpu": "500KB"} if DEVICE == "cpu" else {0: "500KB", "cpu": "1KB"}
    placed = []

    def make():
        placed.append(loaded("offload_folder=folder", path=path, room=room, folder=str(tmp_path)))
        return placed[-1]

    report = trained(make, target_modules=["q_proj", "v_proj", "down_proj"], layers_to_transform=[0])
    assert (
        placed[0].hf_device_map["lm_head"]
        == placed[0].hf_device_map["model.layers.2"]
        == "disk"
        != placed[0].hf_device_map["model.layers.0"]
    )
    assert has(report, "ran-eagerly", reason="weights-loaded-per-call"), report
