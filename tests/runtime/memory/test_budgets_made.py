"""Which devices get a budget, and what each may take: planners and GPUs are stand-ins."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.support.notes import has
from tunecompile.runtime.memory import per_device

CPU, FIRST, LAST = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def grown(monkeypatch):
    """Calls that let segments of torch's allocator grow."""
    calls = []
    monkeypatch.setattr(per_device, "grow_segments", lambda: calls.append(1))
    monkeypatch.setattr(per_device, "gauge_of", lambda device: f"gauge of {device}")
    monkeypatch.setattr(per_device, "Offload", lambda *given: given)
    monkeypatch.setattr(per_device, "available", lambda: 90)
    monkeypatch.setattr(per_device, "MemoryAccounting", lambda *given, **named: SimpleNamespace(given=given, **named))
    monkeypatch.setattr(
        per_device,
        "RuntimePlanner",
        lambda memory: SimpleNamespace(memory=memory, surveys=SimpleNamespace(candidates={})),
    )
    return calls


def state_of(*devices, host_bytes=None, offload_dir=None, **changes):
    """A model with a layer on each of these."""
    given = {"memory": "1GiB", "checkpointed": False, "precision": None}
    return SimpleNamespace(
        model=nn.Linear(1, 1),
        settings=SimpleNamespace(host_bytes=host_bytes, offload_dir=offload_dir),
        slots=[SimpleNamespace(device=device) for device in devices],
        heads=["head"],
        regions=[SimpleNamespace(replays="replays") for _ in devices],
        replays=SimpleNamespace(recorder=SimpleNamespace(device="cuda"), failures=[]),
        kept="kept",
        notes=[],
        **{**given, **changes},
    )


def test_one_gpu_has_all(grown):
    state = state_of(FIRST, FIRST, checkpointed=True, offload_dir="folder", host_bytes=70)
    (budget,) = per_device.make_budgets(state)
    spec, model, gauge, device, slots, heads, offload, replays, kept = budget.memory.given
    assert (spec, model, gauge, device) == ("1GiB", state.model, "gauge of cuda:0", FIRST) and heads == ["head"]
    assert slots == state.slots and offload == (FIRST, 70, "folder") and budget.memory.checkpointed is True
    assert (replays, kept) == (state.replays, "kept") and grown == [1] and not state.notes
    assert all(region.replays for region in state.regions) and not state.replays.failures


def test_two_gpus_share_the_host_and_surveys_and_record_nothing(grown):
    for given, each in ((6 << 30, 3 << 30), (0, None)):
        made = per_device.make_budgets(state_of(FIRST, LAST, host_bytes=given))
        assert [budget.memory.given[6] and budget.memory.given[6][1] for budget in made] == [each, each]
    grown.clear()
    state = state_of(FIRST, LAST, FIRST, CPU)
    first, last = per_device.make_budgets(state)
    assert [budget.memory.given[4] for budget in (first, last)] == [[state.slots[0], state.slots[2]], [state.slots[1]]]
    assert [budget.memory.given[6][:2] for budget in (first, last)] == [(FIRST, 22), (LAST, 22)]
    assert [budget.memory.given[7:] for budget in (first, last)] == [(None, None)] * 2
    assert first.surveys.candidates is last.surveys.candidates and grown == [1]
    assert not any(region.replays for region in state.regions)
    assert has(state.replays.failures, "no-cuda-graph", reason="budgets-of-several-devices")
    assert has(state.notes, "no-memory-plan", subject="1 layers", reason="weights-not-on-device")
    assert "cuda:0 or cuda:1" in str(state.notes[0])


@pytest.mark.parametrize(
    "memory, checkpointed, device, count",
    [
        *(("auto", False, CPU, 0), ("auto", True, CPU, 1), ("1GiB", False, CPU, 1)),
        *(("auto", False, FIRST, 1), ("auto", True, None, 0), ("1GiB", False, None, 0)),
    ],
)
def test_where_there_is_something_to_plan(memory, checkpointed, device, count, grown):
    """On a CPU nothing bounds what layers hold, unless the user says so."""
    state = state_of(device, memory=memory, checkpointed=checkpointed)
    assert len(per_device.make_budgets(state)) == count and len(grown) == (device is FIRST)
    told = [str(note) for note in state.notes]
    assert [" any device" in text for text in told] == ([True] if device is None else [])


def test_what_keeps_weights_from_staying_dequantised(grown):
    """A lower precision reads other weights, and parts of several processes' come and go."""
    assert per_device.make_budgets(state_of(FIRST, precision="fp8"))[0].memory.given[8] is None
    state = state_of(FIRST)
    state.model.weight.ds_id = 1
    assert per_device.make_budgets(state)[0].memory.given[8] is None


def test_recordings_of_a_recorder_elsewhere_fail_nowhere(grown):
    state = state_of(FIRST, LAST)
    state.replays.recorder.device = "cpu"
    per_device.make_budgets(state)
    assert state.replays.failures == []


def test_a_cpu_copies_nothing(grown):
    (budget,) = per_device.make_budgets(state_of(CPU, host_bytes=70))
    assert budget.memory.given[6] is None and budget.memory.given[2:4] == ("gauge of cpu", CPU)
