"""Lightning's Trainer and Fabric with the callback: the losses of training without it, and a report of what was
rewritten. `make test-hosts HOST=lightning` runs this in Lightning's own environment.
"""

import json

import pytest
import torch

from tests.support import zoo
from tests.support.models.pairs import small
from tests.support.trainers import Rows, collate
from tunecompile.errors import HostTooOld, NotOptimized
from tunecompile.trainers import door as doors
from tunecompile.trainers.door import RUN

pl = pytest.importorskip("lightning.pytorch")
from lightning.fabric import Fabric

from tunecompile.trainers import lightning as door

pytestmark = pytest.mark.filterwarnings("ignore")


class Lit(pl.LightningModule):
    def __init__(self, late: bool = False):
        super().__init__()
        self.losses: list[float] = []
        self.teacher = small().requires_grad_(False)
        if not late:
            self.model = zoo.adapt(small())

    def configure_model(self):
        if not hasattr(self, "model"):
            self.model = zoo.adapt(small())

    def training_step(self, batch, index):
        loss = self.model(**batch).loss
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=1e-3)


def loader():
    return torch.utils.data.DataLoader(Rows(), batch_size=2, collate_fn=collate)


def fit(module, *callbacks):
    trainer = pl.Trainer(
        max_steps=4,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
    )
    module.train()
    trainer.fit(module, loader())
    return module.losses


def rewritten(report):
    found = {match.family: match.rewritten for match in report.matches}
    assert found["lora"] == 7 and found["linear_cross_entropy"] == 1, report


@pytest.mark.parametrize("late", [False, True])
def test_a_lightning_module(late):
    mine = door.Callback(watch=True, executor="eager")
    with pytest.raises(NotOptimized):
        mine.report()
    module = Lit(late)
    watchers = mine.watchers
    losses = fit(module, mine, door.Callback(executor="eager"))
    assert [watcher.steps for watcher in watchers.values()] == [4] and mine.watchers == {}
    assert losses == pytest.approx(fit(Lit()), rel=1e-4) and len(losses) == 4
    assert mine.models == [module.model], "neither the module itself nor the frozen teacher"
    rewritten(mine.report())


def trained_by_fabric(*callbacks):
    fabric = Fabric(accelerator="cpu", callbacks=list(callbacks))
    model = zoo.adapt(small()).train()
    wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    losses = []
    for batch, _ in zip(fabric.setup_dataloaders(loader()), range(3)):
        loss = wrapped(**batch).loss
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def test_fabric():
    mine = door.Callback(executor="eager")
    assert trained_by_fabric(mine) == pytest.approx(trained_by_fabric(), rel=1e-4)
    rewritten(mine.report())


def test_the_entry_points_are_silent_unless_asked(monkeypatch, tmp_path):
    told = tmp_path / "told"
    assert not any(isinstance(each, door.Callback) for each in pl.Trainer(accelerator="cpu", logger=False).callbacks)
    with monkeypatch.context() as patch:
        patch.setenv("TUNECOMPILE", "1")
        assert any(isinstance(each, door.Callback) for each in pl.Trainer(accelerator="cpu", logger=False).callbacks)
    monkeypatch.setenv(RUN, json.dumps({"options": {"executor": "eager"}, "told": str(told)}))
    fit(Lit())
    trained_by_fabric()
    assert told.read_text().split() == ["PeftModelForCausalLM"] * 2


def test_an_old_lightning(monkeypatch):
    monkeypatch.setattr(doors.importlib.metadata, "version", lambda package: "2.3.9")
    with pytest.raises(HostTooOld, match=r"needs lightning 2\.4 or newer, and 2\.3\.9"):
        door.Callback()
