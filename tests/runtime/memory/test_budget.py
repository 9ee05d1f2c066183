"""Budgets on real layers: fewer bytes for a smaller budget, bit-equal losses and gradients, plans that follow the batch."""

import functools
from operator import getitem

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.compare import assert_equal
from tests.support.memory import full_device
from tests.support.memory.budgets import LAYERS, Meter, build, needed, step
from tests.support.notes import codes, find, has
from tunecompile.compiler import partitioner
from tunecompile.notes.memory import NOTES
from tunecompile.ops import lora_linear
from tunecompile.planner import candidates
from tunecompile.planner.device_memory import HostGauge
from tunecompile.planner.solver import KEEP, RECOMPUTE
from tunecompile.runtime.memory import accounting

pytest.importorskip("transformers")
pytest.importorskip("peft")


@functools.cache
def plain(dropout=0.0):
    """A step without a budget."""
    return step(build(None, dropout))


@pytest.mark.parametrize(
    "dropout, shares",
    [
        (0.0, (1.1, 0.01)),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((0.0, (1.1, 0.5, 0.05)), (0.2, (1.1, 0.5, 0.05)))),
    ],
)
def test_any_budget_gives_the_same_bits(dropout, shares):
    """And what does not fit is run, and told."""
    reference, whole = plain(dropout), needed(dropout)
    recomputing = set()
    for share in shares:
        model = build(int(share * whole), dropout)
        assert_equal(step(model), reference)
        assert has(model, "over-budget") is (share < (1.0 if dropout else 0.1))
        recomputing.add(sum(p["layers"] for p in tunecompile.report(model).memory["plans"] if p["recompute"]))
    assert min(recomputing) == 0 and max(recomputing) >= LAYERS - 1


@pytest.mark.slow
def test_a_bigger_batch_is_planned_anew_and_a_smaller_one_again():
    model, reference = build(int(1.2 * needed())), build(None)
    plans = []
    for rows in (2, 8, 2):
        assert_equal(step(model, rows=rows), step(reference, rows=rows))
        plans.append([(tuple(p["recompute"]), p["layers"]) for p in tunecompile.report(model).memory["plans"]])
    assert plans[0] == plans[2] == [((), LAYERS)] and plans[1] != plans[0]


def test_a_budget_takes_the_place_of_checkpointing():
    model = build("1TiB")
    model.gradient_checkpointing_enable()
    assert_equal(step(model), plain())
    assert tunecompile.report(model).memory["plans"] == [
        {"recompute": [], "tiles": 1, "offload": False, "largest_stays": False, "layers": LAYERS}
    ]


@pytest.mark.slow
@pytest.mark.parametrize("floor", [accounting.FLOOR, 0])
def test_checkpointing_alone_is_a_budget(monkeypatch, floor):
    """Of a small batch all is kept; beside little free memory, what fits into what checkpoints would need."""
    monkeypatch.setattr(accounting, "FLOOR", floor)
    model = build(None)
    model.gradient_checkpointing_enable()
    assert_equal(step(model), plain())
    told = tunecompile.report(model)
    assert told.memory["predicted_peak"] <= told.memory["budget"]
    assert any(p["recompute"] for p in told.memory["plans"]) is (floor == 0)
    assert has(told, "checkpointing-is-budget") and not find(told, "over-budget")
    model.gradient_checkpointing_disable()
    assert_equal(step(model), plain())
    assert tunecompile.report(model).memory is None and not find(model, "checkpointing-is-budget")


@pytest.mark.slow
def test_others_take_memory_and_give_it_back(monkeypatch):
    """A rollout engine that wakes and sleeps: the plan follows, in both directions, and stays where nothing changes."""
    from tunecompile.runtime.memory.accounting import MemoryAccounting

    there, half, expected = [1 << 40], needed() // 2, plain()
    monkeypatch.setattr(MemoryAccounting, "bounds_all", True)
    monkeypatch.setattr(HostGauge, "available", lambda _: there[0])
    model, plans = build("1TiB"), []
    for free in (1 << 40, 3 << 39, half, half, 1 << 40):
        there[0] = free
        assert_equal(step(model), expected)
        told = tunecompile.report(model)
        plans.append((told.memory["replans"], sum(p["layers"] for p in told.memory["plans"] if p["recompute"])))
    counts, recomputed = zip(*plans)
    assert recomputed[0] == recomputed[1] == recomputed[4] == 0 < recomputed[2] == recomputed[3], plans
    assert counts[0] == counts[1] < counts[2] == counts[3] < counts[4], plans


def test_auto_does_nothing_on_a_cpu():
    model = full_device.build("auto")
    full_device.step(model)
    report = tunecompile.report(model)
    assert report.memory is None and not set(codes(report)) & NOTES.keys()


@pytest.mark.parametrize("dropout", [0.0, pytest.param(0.2, marks=pytest.mark.slow)])
def test_what_waits_on_the_host_comes_back_as_it_was(to_the_host, dropout):
    reference = plain(dropout)
    model = build(int(0.85 * needed(dropout)), dropout)  # room for the copies under way
    for _ in range(3):
        assert_equal(step(model), reference)
    memory, offload = tunecompile.report(model).memory, to_the_host[-1]
    assert [p["recompute"] for p in memory["plans"]] == [[], []] and 0 < sum(
        p["layers"] for p in memory["plans"] if p["offload"]
    ) < LAYERS
    assert memory["offload"]["bytes_out"] == memory["offload"]["bytes_back"] > 0 and offload.blocks.pool.used == 0


@pytest.mark.slow
def test_host_memory_is_allocated_while_code_is_generated(to_the_host, monkeypatch):
    """All of the first plan's, in a thread of its own, before the first layer has anything to send."""
    from tunecompile.runtime.memory.host import pinned_pool

    asked = []
    expect = pinned_pool.PinnedPool.expect

    def small(pool, nbytes):
        pool.slab = pool.granule = 1 << 12
        asked.append((nbytes, pool.reserved))
        expect(pool, nbytes)

    monkeypatch.setattr(pinned_pool.PinnedPool, "expect", small)
    model = build(int(0.85 * needed()))
    step(model)
    pool = to_the_host[-1].blocks.pool
    assert asked[0] == (model._tunecompile.step.budget.admitted.choice.waiting, 0) and pool.ahead is not None
    assert pool.ahead.left == 0 and pool.peak >= 0.9 * asked[0][0]


@pytest.mark.slow
def test_the_largest_tensor_stays_where_there_is_room_for_it(to_the_host):
    """Between all that a layer saves and none of it."""
    roomy = build("1TiB", intermediate_size=384)
    reference = step(roomy)
    kept = tunecompile.report(roomy).memory
    model = build(int(0.95 * (kept["predicted_peak"] - kept["kept_weights"])), intermediate_size=384)
    for _ in range(3):
        assert_equal(step(model), reference)
    memory = tunecompile.report(model).memory
    assert [
        p for p in memory["plans"] if p["offload"] and p["largest_stays"]
    ] and "all but the largest tensor is offloaded" in str(tunecompile.report(model))
    option = next(o for o in model._tunecompile.step.budget.options.values() if o.offloaded and o.held)
    assert (
        option.offloads_tensor(option.held // 2)
        and not option.offloads_tensor(option.held)
        and not option.offloads_tensor(int(0.75 * option.held))
    )
    assert (
        0
        < memory["offload"]["bytes_out"]
        == memory["offload"]["bytes_back"]
        < sum(option.offloaded + option.held for option in model._tunecompile.step.budget.options.values())
    )


@pytest.mark.slow
@pytest.mark.parametrize("flops, pays", [(1e12, True), (1.0, False)])
def test_launches_are_weighed_against_computing_again(monkeypatch, flops, pays):
    """CUDA graphs keep a step's memory for good. Where that is not there, a smaller plan may be faster all the same."""
    from tests.support.memory.cpu_recorder import CpuRecorder
    from tunecompile.planner.hardware import Rates
    from tunecompile.runtime.cuda_graphs import launch_bound, replay
    from tunecompile.runtime.memory import plan_maker

    monkeypatch.setattr(replay, "CudaRecorder", CpuRecorder)
    monkeypatch.setattr(launch_bound, "SAMPLES", 2)
    monkeypatch.setattr(plan_maker, "rates_of", lambda *_: Rates(flops, 1e12))
    reference, model = plain(), build(int(1.1 * needed()))
    state = model._tunecompile
    for number in range(7):
        assert_equal(step(model), reference)
        if not number:
            assert not state.replays.recorded and all(
                option.plan == KEEP for option in state.step.budget.options.values()
            )
    again = [bool(plan["recompute"]) for plan in tunecompile.report(model).memory["plans"]]
    assert any(again) == pays and (state.replays.recorded >= 2 * LAYERS) == pays, tunecompile.report(model)
    assert state.step.budget.plans <= 5 and state.step.budget.admitted.choice.fits


@pytest.mark.slow
def test_a_step_that_needed_more_than_predicted_is_planned_anew(monkeypatch):
    from tunecompile.runtime.memory import per_device

    meter = Meter()
    monkeypatch.setattr(per_device, "gauge_of", lambda device: meter)
    whole = needed()
    meter.most = meter.held = 100 * whole  # of loading the model: no step's
    model = build(int(1.3 * whole))
    for _ in range(2):
        step(model)
    budget = model._tunecompile.step.budget
    assert budget.plans == 1 and not budget.memory.surplus and tunecompile.report(model).memory["measured_peak"] is None
    meter.most = meter.held = int(1.6 * whole)  # the user has reset the count since
    step(model)
    memory = tunecompile.report(model).memory
    made = budget.plans
    assert made > 1 and memory["measured_peak"] == meter.most and any(p["recompute"] for p in memory["plans"])
    assert_equal(step(model), plain())
    assert budget.plans == made  # until there is a new peak


def test_a_generation_between_steps_is_no_part_of_them(monkeypatch):
    """Nor is an evaluation: a plan for what they need would be too small."""
    from tunecompile.runtime.memory import per_device

    meter, whole = Meter(), needed()
    monkeypatch.setattr(per_device, "gauge_of", lambda device: meter)
    model = build(int(1.3 * whole))
    for grown in (2, 5, 9):
        step(model)
        meter.most = meter.held = max(meter.most, whole)  # the step's own
        with torch.no_grad():
            for _ in range(2):
                model(zoo.batch()["input_ids"], use_cache=True)
                meter.most = meter.held = grown * whole
    step(model)
    budget = model._tunecompile.step.budget
    assert budget.plans == 1 and not budget.memory.surplus


@pytest.mark.slow
def test_layers_without_anything_trained_survive_a_new_plan(monkeypatch):
    """Their graphs have no backward to plan with; a bigger batch has all graphs seen again."""
    monkeypatch.setattr(
        candidates, "plans", lambda graph: [KEEP, RECOMPUTE]
    )  # enough to plan with, and sooner surveyed

    def make(memory):
        model = zoo.adapt(zoo.make("llama", num_hidden_layers=LAYERS)).train()
        for layer in model.get_base_model().model.layers[:2]:
            layer.requires_grad_(False)
        model.get_base_model().model.layers[0].mlp.register_forward_hook(
            lambda *_: None
        )  # a kind of call that no trained layer has
        return tunecompile.optimize(model, memory=memory, executor="eager")

    whole = make("1TiB")
    step(whole)
    memory = tunecompile.report(whole).memory
    model, reference = make(int(1.2 * (memory["predicted_peak"] - memory["kept_weights"]))), make(None)
    for rows in (2, 8, 2):
        assert_equal(step(model, rows=rows), step(reference, rows=rows))


@pytest.mark.slow
def test_small_results_of_what_is_computed_again_are_saved(monkeypatch):
    """The inner products of adapters are a few bytes beside the products they were made with."""
    read, trial, inner = {}, partitioner.Partitioner._try, partitioner._cut

    def follow(self, gm, inputs, kwargs, plan):
        def cut(*args):
            graphs = inner(*args)
            read[plan] = [
                {user.args[1] for user in node.users if user.target is getitem}
                for node in graphs[1].graph.nodes
                if node.target is lora_linear.overload
            ]
            return graphs

        monkeypatch.setattr(partitioner, "_cut", cut)
        return trial(self, gm, inputs, kwargs, plan)

    monkeypatch.setattr(partitioner.Partitioner, "_try", follow)
    narrow = [
        tunecompile.optimize(
            zoo.adapt(zoo.make("llama", num_hidden_layers=LAYERS), r=2).train(), memory=memory, executor="eager"
        )
        for memory in (None, int(0.3 * needed()))
    ]
    assert_equal(*map(step, narrow))
    assert sum(map(len, read.values())) > 4
    assert not any(
        1 in indices for plan, calls in read.items() if plan.recompute is not None for indices in calls
    )  # xa
