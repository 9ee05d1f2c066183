"""Loops without a Trainer under `tunecompile run`: the model of an optimizer is found, once, and trains as without."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

import tunecompile
from tests.support import zoo
from tests.support.models.pairs import small
from tunecompile.cli.commands import run
from tunecompile.runtime.model_state import is_optimized
from tunecompile.trainers import loops
from tunecompile.trainers.door import RUN

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def told(monkeypatch, tmp_path):
    monkeypatch.setenv(RUN, json.dumps({"options": {"executor": "eager"}, "told": str(tmp_path / "told")}))
    monkeypatch.setattr(loops, "_door", [])
    return lambda: (tmp_path / "told").read_text().split() if (tmp_path / "told").exists() else []


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    made = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    loops.optimizer_made(made)
    return made


class Engine(nn.Module):
    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module


def test_the_outermost_model_is_found_once(told):
    """Adapters' wrapper, in an engine's; neither the base model, nor a copy, nor the engine, nor anything twice."""
    model = zoo.adapt(small())
    engine, copy = Engine(model), zoo.adapt(small())
    optimizer(engine)
    optimizer(model)
    assert told() == ["PeftModelForCausalLM"] and is_optimized(model)
    assert not is_optimized(copy) and not is_optimized(engine)


def test_a_wrapper_that_nobody_has_any_more(told):
    model = small()
    Engine(model).itself = [Engine(model)]
    optimizer(model)
    assert told() == ["LlamaForCausalLM"] and is_optimized(model)


def test_what_is_left_alone(told):
    mine = tunecompile.optimize(zoo.adapt(small()), executor="eager")
    optimizer(Engine(mine))
    optimizer(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=1.0)
    assert told() == []


def test_layers_of_ones_own(told):
    model = zoo.Stack(zoo.Layer, 3)
    optimizer(model)
    model.train()(torch.randn(2, 8)).backward()
    assert told() == ["Stack"] and tunecompile.report(model).matches


LOOP = """
import torch, tests.support.zoo as zoo
from tests.support.models.pairs import small
from accelerate import Accelerator
model = zoo.adapt(small()).train()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
accelerator = Accelerator(cpu=True)
wrapped, optimizer = accelerator.prepare(model, optimizer)
losses = []
for seed in range(3):
    loss = wrapped(**zoo.batch(seed=seed)).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(float(loss.detach()))
"""


TELL = """
import json, tunecompile
print(json.dumps([losses, {m.family: m.rewritten for m in tunecompile.report(model).matches}]))
"""


@pytest.mark.slow
def test_a_script_with_accelerate(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    plain: dict = {}
    exec(LOOP, plain)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    environment = run.environment({"executor": "eager"}, tmp_path / "told")
    command = [sys.executable, "-c", LOOP + TELL]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    losses, found = json.loads(done.stdout.splitlines()[-1])
    assert losses == pytest.approx(plain["losses"], rel=1e-4)
    assert found["lora"] == 7 and found["linear_cross_entropy"] == 1, found
    assert (tmp_path / "told").read_text().split() == ["PeftModelForCausalLM"]
