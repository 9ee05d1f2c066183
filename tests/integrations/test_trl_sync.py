"""TRL's transfer of weights to an engine reads what it would without `optimize`, and training goes on as before."""

import copy
import dataclasses
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.notes import EAGER, find
from tunecompile.ops import lora_linear

generation = pytest.importorskip("trl.generation.vllm_generation")
pytest.importorskip("peft")


class Engine:
    """In the place of vLLM: keeps what it is given."""

    def __init__(self):
        self.weights = {}
        runner = SimpleNamespace(model=self)
        self.llm_engine = SimpleNamespace(
            model_executor=SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        )

    def load_weights(self, pairs):
        for name, value in pairs:
            assert name not in self.weights
            self.weights[name] = value.detach().clone()

    def reset_prefix_cache(self):
        self.asked = True


def sent(model):
    """What TRL's own code gives an engine that shares the process."""
    made = object.__new__(generation.VLLMGeneration)
    made.mode, made.enable_sleep_mode, made.model, made.llm = "colocate", False, model, Engine()
    made.accelerator = SimpleNamespace(is_main_process=True, device=torch.device("cpu"))
    made._dist = SimpleNamespace(gather_params=lambda parameters: nullcontext(), is_fsdp=False)
    made.sync_weights()
    return made.llm.weights


@pytest.fixture(autouse=True)
def gpu_paths(monkeypatch):
    """As on a GPU: siblings have one product."""
    for op in (lora_linear, lora_linear.backward_op):
        taken = [
            dataclasses.replace(p, refuses=lambda *_: None) if p.name in ("k_extension", "grouped") else p
            for p in op.providers
        ]
        monkeypatch.setattr(op, "providers", taken)


def steps(model, first, optimizer):
    for seed in range(first, first + 2):
        model.train()(**zoo.batch(seed=seed)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def follow(model, other):
    """Give a model another one's adapters, bit by bit."""
    values = dict(other.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(values[name])


def test_an_engine_gets_what_it_would():
    torch.manual_seed(0)
    eager = zoo.adapt(zoo.make("llama"))
    ours = tunecompile.optimize(copy.deepcopy(eager), executor="eager")
    optimizer = torch.optim.SGD([p for p in ours.parameters() if p.requires_grad], lr=0.1)
    for first in (0, 2):  # sent, trained on, sent again
        steps(ours, first, optimizer)
        follow(eager, ours)
        given, expected = sent(ours), sent(eager)
        assert given.keys() == expected.keys() and not any("lora" in name for name in given)
        assert all(torch.equal(given[name], expected[name]) for name in given)
        names = dict(eager.named_parameters())
        assert all(torch.equal(p, names[name]) for name, p in ours.named_parameters())  # unmerged again
        losses = [model(**zoo.batch(seed=9)).loss.item() for model in (ours, eager)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert not find(ours, *EAGER)
