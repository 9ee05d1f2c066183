"""Templates that fail their trial hand their op on, and the report says so."""

import copy
import dataclasses
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

import tunecompile
from tests.support import zoo
from tests.support.notes import find
from tunecompile.ir.eager_call import outputs
from tunecompile.ir.example import Draw, arguments_of
from tunecompile.ir.op import OPS
from tunecompile.ir.pretend_gpu import as_on_gpu
from tunecompile.ops.experts.grouped_linear import CHOICES, TOKENS
from tunecompile.ops.linear_cross_entropy import row_losses, runs_template
from tunecompile.ops.swiglu import gated_activation_backward
from tunecompile.passes.plan import probe


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def test_arguments_are_made_under_any_default_device():
    """A generator of the CPU draws on no other device: templates went untried, and other packages' were given up."""
    device = torch.device("cpu")
    for name in ("rms_norm", "dequantize_4bit"):
        (op,) = (op for op in OPS.values() if op.name == name)
        found = []
        for default in ("cpu", "meta"):
            with torch.device(default):
                found.append(tree_leaves(arguments_of(op, Draw(device, torch.float32))))
        assert all(a is b or a == b if not isinstance(a, torch.Tensor) else torch.equal(a, b) for a, b in zip(*found))


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


def test_where_templates_need_no_trial(monkeypatch):
    """On a GPU where tests ran, and where there is none."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert probe.is_tested(gpu) and probe.is_tested(cpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for shown, tested in (("compiled", False), (probe.RUN, True)):
        monkeypatch.setattr(probe, "shown_on", lambda device, shown=shown: shown)
        assert probe.is_tested(gpu) is tested and probe.is_tested(cpu)


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


def test_a_wrong_loss_kernel_is_not_used(monkeypatch):
    """No graph has it. It is tried when the first layer is compiled, before there is a loss."""
    (template,) = row_losses.providers
    tries = []

    def run(*given):
        losses, gradient = row_losses.reference(*given)
        tries.append(given)
        return losses * 1.1, gradient

    planted = dataclasses.replace(template, run=run, refuses=lambda *_: None)
    monkeypatch.setattr(row_losses, "providers", [planted])
    monkeypatch.setattr(probe, "is_tested", lambda device: False)
    logits, labels = torch.randn(3, 7), torch.tensor([1, 0, 6])
    taken = lambda: row_losses.choose((logits, labels, 1.0, 0.0, -100, 0.0)).name  # noqa: E731
    assert taken() == "triton"
    for _ in range(2):
        told, error = trained()
    assert error < 1e-5 and len(tries) == 1 and taken() == "reference"
    (note,) = find(told, "template-wrong")
    assert note.subject == "row_losses" and "output 0 is 1.0e-01 from fp64" in note.detail


def test_logits_that_the_loss_kernel_takes():
    """On a GPU, in no more than fp32, scaled by a positive factor; a CPU's are torch's, also where a GPU is pretended."""
    labels = torch.tensor([1, 0])
    with as_on_gpu("rtx4090"):
        for dtype, scale, provider in (
            (torch.bfloat16, 1.0, "triton"),
            (torch.float32, 0.5, "triton"),
            (torch.float32, -1.0, "reference"),
            (torch.float64, 1.0, "reference"),
        ):
            logits = torch.zeros(2, 3, dtype=dtype)
            assert row_losses.choose((logits, labels, scale, 0.0, -100, 0.0)).name == provider
            assert not runs_template(logits, labels, scale, 0.0)


def test_a_right_template_is_used(monkeypatch):
    assert plant(monkeypatch, gated_activation_backward.reference) == ""
    report, error = trained()
    assert "gated_activation_backward: triton" in report.regions[0].providers
    assert error < 1e-5 and not find(report, "template-wrong")


def test_what_a_template_refuses_is_not_tried(monkeypatch):
    """That is no fault of its, and nothing is known of it."""
    (template,) = gated_activation_backward.providers
    ran = []
    planted = dataclasses.replace(template, run=lambda *given: ran.append(given), refuses=lambda *_: "not on this GPU")
    assert probe._try(gated_activation_backward, planted, torch.device("cpu"), torch.float32) is None
    taken = dataclasses.replace(planted, refuses=lambda *_: None)
    monkeypatch.setattr(probe, "arguments_of", lambda *_: None)
    assert probe._try(gated_activation_backward, taken, torch.device("cpu"), torch.float32) is None and not ran


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


CPU = torch.device("cpu")
NAMED = {op.name: op for op in OPS.values()}
EXAMPLES = [name for name, op in NAMED.items() if op.example]


@pytest.mark.parametrize("name", EXAMPLES)
def test_references_run_on_the_arguments_of_a_trial(name):
    """The same ones each time, and the user's random numbers stay as they were."""
    op, state = NAMED[name], torch.get_rng_state()
    for each in filter(None, (op, op.backward_op)):
        given, again = (arguments_of(each, Draw(CPU, torch.float32)) for _ in range(2))
        assert len(given) == len(each.parameters)
        tensors = [[x for x in tree_leaves(each) if isinstance(x, torch.Tensor)] for each in (given, again)]
        assert all(map(torch.equal, *tensors))
        made = outputs(each.reference(*given))
        assert made and all(x.isfinite().all() for x in made if x is not None and x.is_floating_point())
    assert torch.equal(state, torch.get_rng_state())
    assert arguments_of(NAMED["rope"], Draw(CPU, torch.float32)) is None


def test_trials_have_what_templates_must_not_take_for_granted():
    """Rows that fill no tile, keys that heads share, experts without rows, and rows of no expert."""
    given = {
        name: dict(zip(NAMED[name].parameters, arguments_of(NAMED[name], Draw(CPU, torch.float32))))
        for name in EXAMPLES
    }
    attention = given["varlen_attention"]
    offsets = attention["offsets"].tolist()
    assert offsets[0] == 0 and offsets[-1] == len(attention["q"]) and len(offsets) == 3
    assert attention["longest"] == max(b - a for a, b in zip(offsets, offsets[1:])) and attention["causal"]
    assert attention["q"].shape[1] == 2 * attention["k"].shape[1]
    experts = given["grouped_lora_linear"]
    counts = torch.diff(experts["offsets"], prepend=torch.zeros(1, dtype=torch.int32)).tolist()
    assert 0 in counts and min(filter(None, counts)) < 8 and sum(counts) < len(experts["x"]) == TOKENS * CHOICES
    for rank, a, b in zip((4, 3), experts["a"], experts["b"]):
        assert (len(a), b.shape[1]) == (rank * len(counts), rank * len(counts))
    for name, place in (("gathered_lora_linear", "order"), ("sum_rows", "places")):
        order = given[name][place]
        assert sorted(order.tolist()) == list(range(TOKENS * CHOICES)) and order.tolist() != sorted(order.tolist())
    for name, rows in (("rms_norm", 5), ("gated_delta_rule", 96), ("selective_scan", 80)):
        x = next(iter(given[name].values()))
        assert x.shape[0 if name == "rms_norm" else 1] == rows
    rule = given["gated_delta_rule"]
    assert (rule["g"] <= 0).all() and ((rule["beta"] > 0) & (rule["beta"] < 1)).all()
