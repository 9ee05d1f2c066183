"""What a budget is made of, in bytes; and what steps and samples tell of it. No model runs."""

import types
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from tests.support.memory.cpu_recorder import CpuRecorder
from tests.support.memory.fake_replays import FakeReplays
from tunecompile.planner.device_memory import MARGIN
from tunecompile.planner.hardware import Rates
from tunecompile.runtime.cuda_graphs.launch_bound import HostTime
from tunecompile.runtime.cuda_graphs.replay import GraphReplays
from tunecompile.runtime.memory import accounting as module
from tunecompile.runtime.memory.accounting import (
    FLOOR,
    SPARE,
    MemoryAccounting,
    compute_dtype,
    host_bytes,
    region_runs,
    summed_bytes,
)
from tunecompile.runtime.memory.progress import Progress
from tunecompile.runtime.memory.timeline_trace import STEPS, MemoryTrace

CPU, ELSEWHERE = torch.device("cpu"), torch.device("meta")


@dataclass
class Gauge:
    """A device of a million bytes."""

    now: int = 0
    most: int = 0
    held: int = 0
    failed: int = 0
    free: int = 10**6
    beside: int = 1000
    calls: list[str] = field(default_factory=list)

    def allocated(self):
        return self.now

    def peak(self):
        return self.most, self.held

    def release(self):
        self.calls.append("release")

    def forget_peak(self):
        self.calls.append("forget")
        self.most = self.now

    def failures(self):
        return self.failed

    def outside(self):
        return self.beside

    def available(self):
        return self.free

    def total(self):
        return 10**6


def slot(region, *parameters, place=0):
    layer = nn.Module()
    for number, parameter in enumerate(parameters):
        layer.register_parameter(f"p{number}", parameter)
    return types.SimpleNamespace(region=region, layer=layer, place=place, checkpoint=False, window=0)


def trained(count, device=CPU, graded=False):
    made = nn.Parameter(torch.zeros(count, device=device))
    made.grad = torch.zeros_like(made) if graded else None
    return made


@pytest.fixture
def bounds_all(monkeypatch):
    """As on a GPU."""
    monkeypatch.setattr(MemoryAccounting, "bounds_all", True)


def accounting(layers=(), heads=(), beside=(), gauge=None, **options):
    model = nn.ModuleList([each.layer for each in layers])
    for head in heads:
        model.append(head.module)
    for number, parameter in enumerate(beside):
        model.register_parameter(f"beside{number}", parameter)
    return MemoryAccounting(500_000, model, gauge or Gauge(), CPU, layers, heads, **options)


def test_gradients_and_moments_that_are_to_come(bounds_all):
    """Four bytes a gradient that is not there, eight for the moments of each trained parameter here, in the first step."""
    frozen = nn.Parameter(torch.zeros(64), requires_grad=False)
    layers = [slot("a", trained(10), frozen), slot("a", trained(20, graded=True)), slot("b", trained(5, ELSEWHERE))]
    memory = accounting(layers, beside=[trained(3)])
    rates = Rates(1.0, 1.0)
    first, later = (memory.request(8, {}, rates, all_seen=True, first=first) for first in (True, False))
    assert later.resident == 4 * (10 + 3) and first.resident == later.resident + 8 * (10 + 20 + 3)
    assert [(run.layers, run.gradients) for run in later.runs] == [(2, 0), (1, 0)]
    memory.surplus, memory.present = 7, 100
    assert memory.request(8, {}, rates, all_seen=True, first=False).resident == later.resident + 107


class Known:
    """Shards of a model that says what it is asked of."""

    asked: list

    def __init__(self, model=None):
        self.model = model

    def passing(self, layers):
        return 11 * len(layers) * (self.model is not None)

    def to_come(self, ungraded, beside):
        Known.asked = [ungraded, beside]
        return 100

    def at_rest(self, parameter):
        return parameter

    def graded(self, parameter):
        return False

    def gradient_bytes(self, parameters):
        return 0


def test_what_passes_and_what_is_beside_the_layers(bounds_all, monkeypatch):
    monkeypatch.setattr(module, "Shards", Known)
    inside, frozen, other = trained(2), nn.Parameter(torch.zeros(3), requires_grad=False), trained(4)
    memory = accounting([slot("a", inside), slot("a", trained(1))], beside=[frozen, other, trained(6, ELSEWHERE)])
    memory.device = torch.device("cpu")
    found = memory.request(8, {}, Rates(1.0, 1.0), all_seen=True, first=False)
    assert found.resident == 100 + 22
    ungraded, beside = Known.asked
    assert [p.numel() for p in beside] == [4, 6] and sorted(p.numel() for p in ungraded) == [1, 2, 4]
    monkeypatch.setattr(MemoryAccounting, "bounds_all", False)
    assert memory.request(8, {}, Rates(1.0, 1.0), all_seen=True, first=False).resident == 0


def test_a_gpus_budget_bounds_all(monkeypatch):
    memory = accounting(gauge=Gauge(free=1000))
    assert memory.bounds_all is False and memory.allowed() == 500_000 - 1000, "a CPU's bounds what layers hold"
    memory.device = torch.device("cuda", 0)
    assert memory.bounds_all is True and memory.allowed() == 1000
    assert compute_dtype(CPU) is torch.float32
    for there, dtype in ((True, torch.bfloat16), (False, torch.float16)):
        monkeypatch.setattr(module, "has_bfloat16", lambda device, there=there: there)
        assert compute_dtype(memory.device) is dtype
    with torch.autocast("cpu", torch.float16):
        assert compute_dtype(CPU) is torch.float16


def test_what_a_plan_is_made_from():
    gauge = Gauge()
    memory = accounting([slot("a", trained(10))], gauge=gauge, ceiling=77)
    rates = Rates(1.0, 1.0)
    made = memory.request(8, {}, rates, all_seen=False, first=False)
    allowed = 500_000 - 1000
    assert (made.tokens, made.rates, made.ceiling, made.all_seen, made.offload, made.keeps_weights) == (
        *(8, rates, 77, False, False, False),
    )
    assert made.available == allowed - int(MARGIN * allowed) and made.host == 0 and made.tail == 0
    assert (made.checkpointed, made.spare, made.records, made.saving) == (False, 0, False, 0.0)
    memory.slack = 400_000
    memory.checkpointed = True
    made = memory.request(8, {}, rates, all_seen=True, first=False)
    assert made.available == allowed - 400_000 and made.spare == int(SPARE * 10**6) and made.checkpointed


def test_what_checkpointed_layers_may_take():
    """A share of what was free before the first layer of all; at the largest batch, which came or may come."""
    kept = types.SimpleNamespace(bytes=0)
    memory = accounting([slot("a", trained(1))], gauge=Gauge(now=1000), kept=kept, checkpointed=True)
    memory.begin_layers(8)
    free = memory.allowed() - 1000
    memory.gauge.now = 5000
    memory.begin_layers(4)
    made = memory.request(4, {}, Rates(1.0, 1.0), all_seen=True, first=False)
    assert (made.most, made.floor) == (8, int(FLOOR * free)) and not made.keeps_weights
    memory.most = 64
    memory.begin_layers(16)
    assert memory.request(16, {}, Rates(1.0, 1.0), all_seen=True, first=False).most == 64


def test_recordings_and_kept_weights_are_held_by_layers():
    """Of recordings what is in tensors: the allocator does not count their scratch."""
    replays = FakeReplays(bytes=90, saved_bytes=lambda: 30, saving=lambda tokens: 2.5)
    kept = types.SimpleNamespace(bytes=50)
    layers = [slot("a", trained(1)), slot("a", trained(1)), slot("b", trained(1))]
    memory = accounting(layers, gauge=Gauge(now=1000), replays=replays, kept=kept)
    for _ in range(3):
        memory.begin_layers(8)
    assert memory.present == 1000 - 30
    replays.saved_bytes = lambda: 700  # the step records layers, or drops their recordings
    assert memory.others() == 1000 - 30 - 50
    memory.present = 10
    assert memory.others() == 0
    made = memory.request(8, {}, Rates(1.0, 1.0), all_seen=True, first=False)
    assert made.keeps_weights and made.saving == 2.5 and made.records


def test_recordings_know_what_the_host_spends_on_copies():
    replays, offload = GraphReplays(CpuRecorder()), types.SimpleNamespace(spent=HostTime())
    accounting(replays=replays)
    assert replays.copying is not offload.spent
    accounting(replays=replays, offload=offload)
    assert replays.copying is offload.spent
    graph = replays.forward(lambda given: [given[0] + 1], handed=1)
    graph([torch.ones(2)])
    assert next(iter(graph.clocks.values())).copying is offload.spent


def test_heads_of_this_device(bounds_all):
    heads = [types.SimpleNamespace(module=nn.Linear(8, 32, bias=False)), types.SimpleNamespace(module=nn.ReLU())]
    memory = accounting(heads=heads)
    assert [each.shape for each in memory.head_weights()] == [(32, 8)] and memory.tail(16) > 0
    heads[0].module.to("meta")
    assert memory.is_here(heads[0].module.weight), "of another kind: no budget of its own"
    memory.device = torch.device("cpu", 1)
    assert not memory.is_here(torch.zeros(1)) and memory.trained_here() == [heads[0].module.weight]


@pytest.mark.parametrize("shared, trained, expected", [(True, True, 2), (False, True, 0), (True, False, 0)])
def test_a_weight_of_head_and_embedding_has_three_gradients_at_once(shared, trained, expected):
    """Both parts and their sum: two beside the one that stays, or three where there is one already."""
    model = nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 32, bias=False), nn.Linear(8, 32, bias=False))
    if shared:
        model[1].weight = model[0].weight
    model.requires_grad_(trained)
    heads = [model[1].weight, model[2].weight, model[1].weight]
    assert summed_bytes(model, heads, lambda weight: False) == expected * 32 * 8 * 4
    assert summed_bytes(model, heads, lambda weight: True) == expected // 2 * 3 * 32 * 8 * 4


def test_failures_are_counted_once():
    gauge = Gauge()
    memory = accounting(gauge=gauge)
    gauge.failed = 2
    assert memory.overflowed() and not memory.overflowed()
    gauge.failed = 3
    assert memory.overflowed()


def test_what_may_leave_the_device():
    pool = types.SimpleNamespace(limit=100, room=40)
    on_host, on_disk = (
        types.SimpleNamespace(blocks=types.SimpleNamespace(pool=pool, store=types.SimpleNamespace(disk=disk)))
        for disk in (None, "folder")
    )
    assert [host_bytes(each) for each in (None, on_host, on_disk)] == [0, 100, None]
    memory = accounting(offload=on_host)
    assert not memory.host_is_full(40) and memory.host_is_full(41)
    memory.offload = on_disk
    assert not memory.host_is_full(41) and accounting().host_is_full(1)


def test_layers_of_one_region_after_another_are_a_run():
    first, other = object(), object()
    runs = region_runs([slot(region) for region in (first, first, other, first)], len)
    assert [(run.region, run.layers, run.gradients) for run in runs] == [
        *((id(first), 2, 2), (id(other), 1, 1), (id(first), 1, 1))
    ]


# -- the course of a training --------------------------------------------------------------------------------------------


def admitted(peak=300, layers=200, room=0):
    return types.SimpleNamespace(peak=peak, choice=types.SimpleNamespace(peak=layers), room=room)


def test_a_step_that_needs_more_is_measured():
    gauge = Gauge(now=10, most=500, held=600)
    memory, progress = accounting(gauge=gauge), Progress()
    progress.begin(memory, None)
    assert (progress.steps, progress.highest, progress.measured, memory.surplus) == (1, 500, 0, 0)
    progress.layers_began = True
    gauge.most, gauge.held = 900, 1000
    progress.begin(memory, admitted())
    assert (progress.steps, progress.highest, progress.measured, progress.layers_began) == (2, 900, 900, False)
    assert memory.surplus == 600 and memory.slack == 100 and not progress.exceeded
    gauge.most, gauge.held = 950, 960
    progress.begin(memory, admitted())
    assert memory.surplus == 600 + 650 and memory.slack == 100
    progress.begin(memory, admitted())
    assert memory.surplus == 600 + 650, "no new peak"
    memory.recordings.replays = FakeReplays(bytes=40)
    gauge.most, gauge.held = 1000, memory.allowed()
    progress.begin(memory, admitted(peak=900))
    assert memory.surplus == 600 + 650 + 60 and not progress.exceeded
    memory.checkpointed = True
    gauge.most, gauge.held = 1100, memory.allowed() + 1
    progress.begin(memory, admitted())
    assert memory.surplus == 600 + 650 + 60 and progress.exceeded


@pytest.mark.parametrize("rise, measured", [(100, False), (101, True)])
def test_a_peak_that_is_no_steps(rise, measured):
    """It would need half of what its layers do, at least."""
    gauge = Gauge(now=400, most=400 + rise)
    progress = Progress()
    progress.begin(accounting(gauge=gauge), admitted(layers=200))
    assert bool(progress.measured) is measured


def test_other_code_between_steps_is_not_measured():
    gauge = Gauge(most=300)
    memory, progress = accounting(gauge=gauge), Progress()
    progress.pause(memory, None)
    assert not progress.paused
    progress.pause(memory, admitted())
    assert progress.paused and progress.measured == 300
    gauge.most = 700
    progress.pause(memory, admitted())
    assert progress.measured == 300, "of a generation"
    progress.begin(memory, admitted())
    assert (progress.measured, progress.highest, progress.paused, memory.surplus) == (300, 700, False, 0)
    gauge.most = 800
    progress.begin(memory, admitted())
    assert progress.measured == 800 and memory.surplus == 500


def test_peaks_are_forgotten():
    gauge = Gauge(now=5, most=700)
    progress = Progress(steps=4, highest=700)
    progress.forget(gauge)
    assert gauge.calls == ["release", "forget"] and (progress.highest, progress.steps) == (5, 0)


def test_the_first_steps_of_a_plan_are_sampled():
    gauge = Gauge()
    trace = MemoryTrace(gauge)
    seen = []
    for step in range(1, 7):
        trace.begin(step, "plan", tokens=8)
        gauge.now = step
        trace.note("forward", 0)
        seen.append(trace.step)
    assert seen == [1, 2, 3, 3, 3, 3] and STEPS == 3
    assert [(each.kind, each.place, each.allocated) for each in trace.samples] == [("forward", 0, 3)]
    trace.begin(7, "plan", tokens=9)
    assert trace.step == 7 and trace.tokens == 9 and trace.samples == []
    trace.begin(8, "plan", tokens=9)
    assert trace.step == 7
    trace.begin(9, "another", tokens=4)
    assert trace.step == 9 and trace.tokens == 4
    for step in (10, 11, 12):
        trace.begin(step, None, tokens=4)
    assert trace.step == 12


def test_a_layers_backward_is_sampled_where_it_begins():
    gauge = Gauge()
    trace = MemoryTrace(gauge)
    x = torch.ones(2, requires_grad=True)
    trace.begin(1, "plan", 8)
    for place, output in enumerate((x * 2, (x * 3, None), (), x.detach())):
        trace.follow(output, place)
        if place < 2:
            gauge.now = 10 + place
            (output[0] if place else output).sum().backward()
    trace.sampling = False
    last = x * 2
    trace.follow(last, 7)
    trace.note("tail")
    last.sum().backward()
    assert [(each.kind, each.place, each.allocated) for each in trace.samples] == [
        ("backward", 0, 10),
        ("backward", 1, 11),
    ]
