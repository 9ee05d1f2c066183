"""The loop of the docs in DeepSpeed's engine, of one process: the losses of training without us, and what was rewritten.
`make test-hosts HOST=deepspeed` runs this in its own environment, and the cases of several processes after it.
"""

import os
import re
import socket
from pathlib import Path

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.hosts import assert_rewritten
from tests.support.models.pairs import small

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
deepspeed = pytest.importorskip("deepspeed")
pytestmark = pytest.mark.filterwarnings("ignore")
PAGE = Path(__file__).parents[2] / "docs" / "pages" / "guides" / "loops.md"


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in dict(RANK=0, LOCAL_RANK=0, WORLD_SIZE=1, MASTER_ADDR="127.0.0.1", MASTER_PORT=port).items():
        monkeypatch.setenv(name, str(value))


def names(stage: int) -> dict:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    return {"model": zoo.adapt(small()).train(), "batches": [zoo.batch(seed=s) for s in range(3)], "config": config}


def losses(space: dict, code: str) -> list[float]:
    code = code.replace("    engine.backward(loss)", "    losses.append(loss.item())\n    engine.backward(loss)")
    space["losses"] = []
    exec(code, space)
    return space["losses"]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_loop_of_the_page(stage, monkeypatch):
    (code,) = [code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if "deepspeed" in code]
    plain = losses(names(stage), re.sub(r"(?m)^(model = tunecompile|print).*$", "", code))
    optimize = tunecompile.optimize
    monkeypatch.setattr(tunecompile, "optimize", lambda model: optimize(model, executor="eager"))
    space = names(stage)
    assert losses(space, code) == pytest.approx(plain, rel=1e-4) and len(plain) == 3 and plain[2] != plain[0]
    assert_rewritten(tunecompile.report(space["model"]))


def test_a_loss_of_the_users_own():
    """Of logits, which DeepSpeed hooks: they are made, and the gradients are those of the model's own loss."""
    space = names(2)
    model = tunecompile.optimize(space["model"], executor="eager")
    trainable = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, config=space["config"], model_parameters=trainable)
    batch = dict(space["batches"][0])
    own = names(2)["model"](**batch).loss.item()
    labels = batch.pop("labels")
    logits = engine(**batch).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
    engine.backward(loss)
    engine.step()
    assert loss.item() == pytest.approx(own, rel=1e-4)
