"""Templates that fail their trial hand their op on, and the report says so."""

import copy
import dataclasses
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tunecompile
from tests.support import zoo
from tests.support.notes import find
from tunecompile.ops.swiglu import gated_activation_backward
from tunecompile.passes.plan import probe


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def trained():
    """(Report of an optimized model, its largest error of a gradient.)"""
    torch.manual_seed(0)
    reference, x = zoo.Stack(Gated), torch.randn(2, 5, 16)
    model = tunecompile.optimize(copy.deepcopy(reference), executor="eager")
    for each in (model, reference):
        each(x).backward()
    pairs = zip(model.parameters(), reference.parameters())
    return tunecompile.report(model), max((a.grad - b.grad).abs().max().item() for a, b in pairs)


@pytest.fixture(autouse=True)
def untried(monkeypatch):
    monkeypatch.setattr(probe, "_wrong", {})
    monkeypatch.setattr(probe, "_known", {})


def test_on_a_card_without_tests_the_first_step_tries(monkeypatch):
    """Inside of a compilation; and where there are tests, nothing is run."""
    (template,) = gated_activation_backward.providers
    planted = dataclasses.replace(template, run=loses, refuses=lambda *_: None)
    monkeypatch.setattr(gated_activation_backward, "providers", [planted])
    monkeypatch.setattr(probe, "is_tested", lambda device: False)
    told, error = trained()
    assert error < 1e-5 and [n.subject for n in find(told, "template-wrong")] == [gated_activation_backward.name]


def plant(monkeypatch, run):
    """A template that takes any tensor, in the place of the GPU's."""
    (template,) = gated_activation_backward.providers
    planted = dataclasses.replace(template, run=run, refuses=lambda *_: None)
    monkeypatch.setattr(gated_activation_backward, "providers", [planted])
    return probe.fault_of(gated_activation_backward, planted, torch.device("cpu"))


def loses(*args):
    gate, up = gated_activation_backward.reference(*args)
    return [gate, up * 1.1]


def raises(*_):
    raise RuntimeError("out of resources: shared memory")


@pytest.mark.parametrize("run, says", [(loses, "output 1 is 1.0e-01 from fp64"), (raises, "shared memory")])
def test_a_wrong_template_is_not_used(run, says, monkeypatch):
    assert says in plant(monkeypatch, run)
    report, error = trained()
    assert error < 1e-5
    (note,) = find(report, "template-wrong")
    assert note.subject == "gated_activation_backward" and says in note.detail
    assert "gated_activation_backward: reference" in report.regions[0].providers


def test_a_right_template_is_used(monkeypatch):
    assert plant(monkeypatch, gated_activation_backward.reference) == ""
    report, error = trained()
    assert "gated_activation_backward: triton" in report.regions[0].providers
    assert error < 1e-5 and not find(report, "template-wrong")


def test_a_trial_is_made_once_a_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(probe.tuning_cache, "machine", lambda device: {"gpu": "a card"})
    monkeypatch.setattr(probe, "precision_on", lambda device: torch.bfloat16)
    tries = []
    monkeypatch.setattr(probe, "_try", lambda *given: tries.append(given) or "wrong")
    (template,) = gated_activation_backward.providers
    for _ in range(2):
        given = gated_activation_backward, template, torch.device("cuda", 0)
        assert probe.fault_of(*given) == "wrong"
        probe._known.clear()
    assert len(tries) == 1


ONES = torch.ones(4)


@pytest.mark.parametrize(
    "made, says",
    [
        ([None, ONES], ""),  # of a result that nobody reads
        ([ONES[:0], ONES], ""),
        ([ONES[:0], None], ""),
        ([None, ONES * 1.1], "output 1 is 1.0e-01"),
        ([None, ONES.double()], "output 1 is torch.float64"),
        ([None, ONES[:3]], "output 1 is torch.float32 (3,), not torch.float32 (4,)"),
        ([None, ONES * torch.nan], "output 1 is nan"),
    ],
)
def test_which_results_are_compared(made, says):
    template = SimpleNamespace(run=lambda: made)
    told = probe.compare(template, [], [ONES[:0], ONES], [ONES[:0].double(), ONES.double()], 1e-6)
    assert told.startswith(says) and bool(told) == bool(says)
