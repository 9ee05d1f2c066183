"""axolotl with the plugin: the losses of training without it, and a report of what was rewritten.
`make test-hosts HOST=axolotl` runs this in axolotl's own environment.
"""

import inspect

import pytest
import yaml

import tunecompile
from tests.support.hosts import assert_rewritten, data_file, losses, model_folder
from tunecompile.errors import HostOptions, HostTooOld
from tunecompile.trainers import door as doors

pytest.importorskip("axolotl")
from tunecompile.trainers import axolotl as door

pytestmark = pytest.mark.filterwarnings("ignore")
KERNELS = dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel"), False)


def config(folder, **more):
    """A YAML of LoRA on rows of text, read and validated by axolotl."""
    folder.mkdir(exist_ok=True)
    settings = dict(
        base_model=model_folder(folder),
        adapter="lora",
        lora_r=4,
        lora_alpha=8,
        lora_target_linear=True,
        datasets=[dict(path=data_file(folder, text=slice(None)), ds_type="json", type="completion")],
        dataset_num_proc=1,
        num_dataset_shards_to_save=1,
        dataset_prepared_path=str(folder / "prepared"),
        output_dir=str(folder / "out"),
        sequence_len=32,
        micro_batch_size=2,
        gradient_accumulation_steps=1,
        max_steps=3,
        save_steps=3,
        logging_steps=1,
        learning_rate=1e-3,
        optimizer="adamw_torch",
        lr_scheduler="constant",
        bf16=False,
        val_set_size=0,
        special_tokens={"pad_token": "<pad>"},
        seed=1,
    )
    file = folder / "train.yaml"
    file.write_text(yaml.safe_dump({**settings, **more}))
    from axolotl.cli.config import load_cfg

    return load_cfg(str(file))


def train(folder, **more):
    from axolotl.cli.args import TrainerCliArgs
    from axolotl.cli.train import do_train

    do_train(config(folder, **more), TrainerCliArgs())
    return losses(folder / "out")


OURS = {"plugins": ["tunecompile.trainers.axolotl.Plugin"], "tunecompile": {"executor": "eager"}}


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """axolotl keeps its plugins for the whole process, and looks for a token of the hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("AXOLOTL_DO_NOT_TRACK", "1")
    from axolotl.integrations.base import PluginManager

    PluginManager.get_instance().plugins.clear()


def test_it_trains(tmp_path, monkeypatch):
    plain = train(tmp_path / "plain", **KERNELS)
    met = []
    optimize = doors.optimize
    monkeypatch.setattr(doors, "optimize", lambda model, **given: met.append(model) or optimize(model, **given))
    assert train(tmp_path / "ours", **OURS) == pytest.approx(plain, rel=1e-4) and len(plain) == 3
    assert_rewritten(tunecompile.report(met[0]))


def test_its_keys_are_validated(tmp_path):
    found = config(tmp_path / "right", **{**OURS, "tunecompile": {"memory": "20GiB", "verify": True}})
    assert found.tunecompile.memory == "20GiB" and not any(found[key] for key in KERNELS)
    with pytest.raises(Exception, match="memroy"):
        config(tmp_path / "wrong", **{**OURS, "tunecompile": {"memroy": "20GiB"}})
    assert set(door.Options.model_fields) == set(inspect.signature(tunecompile.optimize).parameters) - {"model"}


@pytest.mark.parametrize(
    "option",
    [
        {"lora_mlp_kernel": True},
        {"liger_rms_norm": True},
        {"use_scattermoe": True},
        {"plugins": [*OURS["plugins"], "axolotl.integrations.liger.LigerPlugin"]},
    ],
)
def test_kernels_of_axolotls_are_refused(option):
    with pytest.raises(HostOptions, match=next(iter(option))):
        door.Plugin().register({**OURS, **option})


def test_an_old_axolotl(monkeypatch):
    monkeypatch.setattr(doors.importlib.metadata, "version", lambda package: "0.11.0")
    with pytest.raises(HostTooOld, match=r"needs axolotl 0\.12 or newer"):
        door.Plugin().register({})
