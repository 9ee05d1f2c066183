"""The plan of a whole step: what checkpoints would need as a budget."""

from dataclasses import replace

import pytest

from tunecompile.planner.candidates import CandidateCost
from tunecompile.planner.cost_model import SUSTAINED, Work
from tunecompile.planner.hardware import Rates
from tunecompile.planner.solver import KEEP, KEEP_WEIGHTS, RECOMPUTE, LayerRun, Plan, PlanOption, choose
from tunecompile.planner.step_plan import (
    ROOMY,
    RegionCandidates,
    RegionRun,
    StepRequest,
    count_options,
    leave_room_for_graphs,
    recomputed_names,
    solve,
    solve_from_here,
)

HALF = Plan(frozenset({0}))
ROWS = (
    CandidateCost(KEEP, 50, 0, 5, 10, Work(100), Work(200)),
    CandidateCost(HALF, 20, 0, 5, 30, Work(100), Work(250)),
    CandidateCost(RECOMPUTE, 10, 0, 5, 45, Work(100), Work(300)),
)


def request(layers: int, tail: int = 0, **changes) -> StepRequest:
    candidates = {1: RegionCandidates(ROWS, 8, whole=True, passed=10)}
    made = StepRequest(8, (RegionRun(1, layers),), candidates, Rates(1.0, 1.0), 10**6, 1000, tail, checkpointed=True)
    return replace(made, **changes)


@pytest.mark.parametrize("layers, tail", [(1, 0), (2, 0), (8, 0), (32, 0), (8, 200), (8, 1000)])
def test_no_more_than_checkpoints(layers, tail):
    """A checkpointed step holds each layer's input; one layer's saved tensors exist while it runs backwards."""
    made = solve(request(layers, tail))
    limit = max(10 * layers + 40 + 10, 10 * layers + tail)
    assert request(layers, tail).checkpointed_peak() == limit == made.room and made.limit == 1000 + limit
    assert made.choice.fits and made.choice.peak <= limit
    assert made.choice.ms <= layers * 110


def test_room_that_the_tail_leaves_is_used():
    plans = [option.plan for run in solve(request(8, 1000)).choice.options for option in run]
    assert plans.count(RECOMPUTE) == 8, "they hold as much as checkpoints do, beside the tail"
    assert [option.plan for run in solve(request(1)).choice.options for option in run] == [KEEP]


def test_checkpoints_have_what_they_need_at_the_largest_batch_and_a_share_of_what_is_free():
    """So small batches keep everything, and larger ones that come later are planned within the same bytes."""
    for changes, room in (({"most": 4}, 130), ({"most": 16}, 260), ({"floor": 100}, 130), ({"floor": 500}, 500)):
        made = solve(request(8, **changes))
        assert made.room == room and made.choice.peak <= room, changes
    small = solve(request(8, most=64, tokens=8))
    assert {option.plan for option in options(small)} == {KEEP} and small.choice.ms == 0


def test_nothing_is_offloaded_under_checkpoints_where_recomputing_fits():
    """Where it does not, the next stage of plans is surveyed before anything goes to the host."""
    made = solve(request(8, offload=True))
    assert made.choice.fits and not made.choice.offloads
    assert solve(request(8, offload=True, checkpointed=False, available=1130)).choice.offloads
    kept = {1: RegionCandidates((ROWS[0], ROWS[1]), 8, passed=10)}
    lacking = request(8, offload=True, candidates=kept)
    made = solve(lacking)
    assert made.choice.offloads and made.choice.fits and not made.settles(kept.values())
    whole = {1: replace(kept[1], whole=True)}
    assert solve(replace(lacking, candidates=whole)).settles(whole.values())


def test_steps_that_wait_for_launches_have_room_for_their_graphs():
    """Beside what checkpoints would need, as far as the device has it."""
    waiting = request(8, saving=5000.0, spare=100)
    made = solve(waiting)
    assert made.spare == 100 and solve(replace(waiting, available=1150)).spare == 150 - made.room
    assert not made.short and made.records_all and solve(replace(waiting, spare=0)).short
    assert made.choice.peak <= waiting.checkpointed_peak()


def test_tokens_scale_it_and_the_device_may_have_less():
    assert request(8, tokens=16).checkpointed_peak() == 2 * request(8).checkpointed_peak()
    assert solve(request(8, available=1050)).room == 50
    assert solve(request(8, ceiling=60)).room == 60


def beside(room: int, **changes) -> StepRequest:
    """Two layers whose frozen weights take 30 bytes each, in this many bytes."""
    candidates = {1: RegionCandidates(ROWS, 8, whole=True, passed=10, weights=30)}
    changes = {"keeps_weights": True, "candidates": candidates, **changes}
    return request(2, checkpointed=False, available=1000 + room, **changes)


def test_frozen_weights_stay_dequantised_where_all_is_kept_and_room_is_left():
    peak = solve(beside(10**6)).choice.peak
    for records in (False, True):
        room = int((ROOMY if records else 1) * peak) + 60
        made = solve(beside(room, records=records))
        assert made.weights == 60 and {o.plan for run in made.choice.options for o in run} == {KEEP_WEIGHTS}
        for less in (
            beside(room - 1, records=records),
            beside(room, records=records, all_seen=False),
            beside(room, records=records, keeps_weights=False),
        ):
            made = solve(less)
            assert made.weights == 0 and {o.plan for run in made.choice.options for o in run} == {KEEP}


def test_which_plans_outlive_a_change_of_the_memory_that_is_there():
    peak = solve(beside(10**6)).choice.peak
    kept = solve(beside(peak + 70))
    assert not replace(kept, weights=kept.room).records_all
    assert kept.outlives(-10, False) and not kept.outlives(-11, False) and kept.outlives(5, False)
    tight = solve(beside(peak - 1))
    assert tight.choice.fits and tight.choice.ms > 0
    assert tight.outlives(5, True) and not tight.outlives(0, False) and not tight.outlives(-peak, True)
    hopeless = solve(beside(1))
    assert not hopeless.choice.fits and not hopeless.outlives(5, True)


def test_a_plan_that_leaves_room_for_all_recordings():
    """Larger ones are recorded in part."""
    sizes = {100: 0.0, 95: 1.0, 89: 2.0}  #: milliseconds by the bytes that a plan holds
    runs = [LayerRun(1, tuple(PlanOption(Plan(frozenset({held})), held, 0, 0, ms) for held, ms in sizes.items()))]
    fastest = choose(runs, 100)
    for gain, held, short in ((10.0, 89, False), (1.9, 95, False), (0.1, 100, False), (0.0, 100, False)):
        choice, found = leave_room_for_graphs(fastest, runs, 100, 0, gain)
        assert (choice.peak, found) == (held, short), gain
    for gain in (10.0, 0.5):
        assert leave_room_for_graphs(fastest, [LayerRun(1, runs[0].options[:2])], 100, 0, gain)[1]
    assert leave_room_for_graphs(fastest, runs, 100, 0, 10.0, spare=50) == (fastest, False)


def test_layers_that_show_no_backward_and_those_that_follow_one_plan():
    runs = (RegionRun(1, 2, only=RECOMPUTE), RegionRun(2, 3))
    asked, frozen = request(0, runs=runs).layer_runs()
    assert [option.plan for option in asked.options] == [RECOMPUTE] and asked.layers == 2
    assert frozen == LayerRun(3, (PlanOption(KEEP, 0, 0, 0, 0.0),))
    assert request(0, runs=runs[::-1]).layer_runs() == [frozen, asked]
    unseen = request(0, runs=runs, all_seen=False).layer_runs()[1]
    assert len(unseen.options) > 1, "as the first region"


def test_surveys_end_where_a_plan_fits_and_more_would_not_help():
    """More plans may leave room for recordings."""
    made, (one, more) = solve(beside(10**6)), (RegionCandidates(ROWS[:count], 8) for count in (1, 3))
    whole = replace(more, whole=True)
    assert made.settles([one, more])
    short = replace(made, short=True)
    assert short.settles([whole]) and not short.settles([more]) and not short.settles([one, whole])
    assert not solve(beside(1)).settles([more])


def test_frozen_weights_stay_packed_where_a_layer_recomputes():
    small = {1: RegionCandidates(ROWS, 8, whole=True, passed=10, weights=1)}
    made = solve(beside(solve(beside(10**6)).choice.peak - 1, candidates=small))
    assert made.choice.fits and made.choice.peak + 2 <= made.room and made.weights == 0


def test_a_request_of_layers_alone():
    """No checkpoints, no graphs, nothing on the host, and each region seen."""
    runs, candidates = (RegionRun(1, 2), RegionRun(2, 3)), {1: RegionCandidates(ROWS, 8, whole=True, passed=10)}
    made = solve(StepRequest(8, runs, candidates, Rates(1.0, 1.0), 1090, 1000, 0))
    assert (made.resident, made.room, made.spare, made.weights, made.short, made.saving) == (
        1000,
        90,
        0,
        0,
        False,
        0,
    )
    assert made.seen and made.limit == 1090 and made.peak == 1000 + made.choice.peak
    assert [len(options) for options in made.choice.options] == [2, 3]
    assert {option.held for option in made.choice.options[1]} == {0}
    assert not any(option.offloaded for run in made.choice.options for option in run)
    limited = solve(request(2, saving=5000.0))
    assert limited.spare == 0 and limited.saving == 5000.0


def test_steps_that_would_launch_faster_record_what_stays_on_the_device():
    """Beside checkpoints, graphs have room of their own; layers on the host are not recorded."""
    options = (PlanOption(KEEP, 0, 0, 0, 0.0, offloaded=20), PlanOption(HALF, 20, 0, 0, 1.0))
    runs = [LayerRun(1, options)]
    fastest = choose(runs, 20)
    assert fastest.offloads
    for gain, spare, held in ((10.0, 100, 20), (0.5, 100, 0), (0.0, 100, 0), (10.0, 0, 0)):
        made, short = leave_room_for_graphs(fastest, runs, 20, 0, gain, spare)
        assert (made.options[0][0].held, short) == (held, not spare), (gain, spare)
    made, short = leave_room_for_graphs(fastest, runs, 30, 0, 10.0)
    assert (made.options[0][0].held, short) == (20, False), "beside a budget that is no checkpoints', too"


def test_the_end_of_a_step_counts_where_nothing_else_is_larger():
    """All gradients are there then, and parts of one that are added up: no plan of the layers changes that."""
    runs = (RegionRun(1, 2, gradients=30),)
    made = solve(request(2, checkpointed=False, runs=runs, resident=1060, summed=400))
    assert made.resident == 1000 and made.choice.peak == 460 and made.peak == 1460 and made.choice.fits
    plain = solve(request(2, checkpointed=False, runs=runs, resident=1060))
    assert plain.choice.options == made.choice.options and plain.choice.peak < 200
    none = solve(request(2, checkpointed=False, runs=runs, resident=1060, summed=400, available=1459))
    assert not none.choice.fits and none.choice.peak == 460


def test_checkpoints_would_need_the_end_of_the_step_as_well():
    made = solve(request(8, summed=500))
    assert made.room == 500 > request(8).checkpointed_peak() and made.choice.fits and made.choice.peak == 500


def two_kinds(**changes) -> StepRequest:
    """Three layers of a kind, and one of another that was not known when they ran: it cannot hold less than 50 bytes."""
    kinds = {1: RegionCandidates(ROWS, 8, whole=True, passed=10), 2: RegionCandidates(ROWS[:1], 8, whole=True)}
    return replace(request(0), runs=(RegionRun(1, 3), RegionRun(2, 1)), candidates=kinds, checkpointed=False, **changes)


def options(made):
    return [option for run in made.choice.options for option in run]


def test_layers_that_ran_hold_what_they_hold():
    """The device would overflow if layers that ran were thought to follow the new plan."""
    whole = two_kinds(available=1132)
    planned = options(solve(whole))
    assert solve(whole).choice.fits and [option.held for option in planned] == [20, 20, 20, 50]
    keeps = next(option for option in options(solve(two_kinds())) if option.held == 50)
    made = solve_from_here(whole, [keeps, None, None, None])
    assert made.for_one_step and options(made)[0] == keeps and made.choice.fits
    assert sum(option.held for option in options(made)[1:3]) < sum(option.held for option in planned[1:3])
    assert solve(whole) == solve_from_here(whole, [None] * 4) == solve_from_here(whole, ())
    roomy = two_kinds()
    assert solve_from_here(roomy, [planned[0], None, None, None]) == solve(roomy), "the step fits all the same"


def test_what_waits_on_the_host_takes_its_room_there():
    whole = two_kinds(offload=True, host=100, available=1100)
    planned = solve(whole)
    assert planned.choice.offloads and planned.choice.waiting <= 100
    sent = replace(options(planned)[0], held=0, offloaded=90)
    made = solve_from_here(whole, [sent, None, None, None])
    assert made.for_one_step and made.choice.waiting <= 100 and options(made)[0].offloaded == 90
    most = solve_from_here(whole, [replace(sent, offloaded=200), None, None, None])
    assert most.for_one_step and sum(option.offloaded for option in options(most)[1:]) == 0, "nothing more fits there"


def test_layers_that_ran_tell_kinds_apart_and_leave_recordings_to_others():
    first, other = request(3, checkpointed=False).layer_runs()[0].options[:2]
    told = replace(first, plan=KEEP_WEIGHTS, kind=7)
    runs = replace(request(3), ran=(told, first, None)).layer_runs()
    assert [(run.layers, run.options[0].kind) for run in runs] == [(1, 7), (1, 1), (1, 1)]
    assert runs[0].options == (replace(told, plan=KEEP),) and runs[1].options == (first,) and other in runs[2].options
    waiting = request(3, saving=5000.0, spare=100, ran=(replace(first, offloaded=10), None, None))
    assert options(solve(waiting))[0].offloaded == 10


def test_layers_in_running_order_and_those_that_were_not_surveyed():
    """They are taken to be like the first region that was, unless every region had its chance."""
    other = RegionCandidates(ROWS[:2], 8)
    asked = request(0, runs=(RegionRun(2, 2), RegionRun(3, 1), RegionRun(1, 1)), all_seen=False)
    asked = replace(asked, candidates={1: asked.candidates[1], 2: other})
    assert asked.layers() == [other, other, asked.candidates[1], asked.candidates[1]]
    runs = asked.layer_runs()
    assert [len(run.options) for run in runs] == [2, 3, 3] and [run.layers for run in runs] == [2, 1, 1]
    assert [{option.kind for option in run.options} for run in runs] == [{2}, {3}, {1}]
    assert len(replace(asked, all_seen=True).layer_runs()[1].options) == 1


def test_what_a_plan_recomputes_in_words():
    """A graph may have fewer values than a plan of another one numbers."""
    names = ("mm 8x2", "mm 8x4", "mm 8x8")
    assert (
        recomputed_names(Plan(frozenset({2, 0, 3})), names) == ("mm 8x2", "mm 8x8")
        and recomputed_names(KEEP, names) == ()
    )
    assert recomputed_names(RECOMPUTE, names) == ("everything",)
    assert recomputed_names(Plan(None, attention=True), names) == ("everything", "attention")


def test_how_many_layers_follow_each_plan():
    kept = PlanOption(KEEP, 50, 0, 0, 0.0)
    gone, largest = replace(kept, held=0, offloaded=50), replace(kept, held=30, offloaded=20)
    again = PlanOption(Plan(frozenset({0}), 4), 10, 0, 0, 1.0)
    chosen = [(kept, "a"), (again, ["x"]), (gone, "a"), (largest, "a"), (again, ["x"]), (again, ["y"])]
    found = [tuple(entry.values()) for entry in count_options(chosen)]
    assert found == [
        ([], 1, False, False, 1),
        (["x"], 4, False, False, 2),
        ([], 1, True, False, 1),
        ([], 1, True, True, 1),
        (["y"], 4, False, False, 1),
    ]
    assert list(count_options(chosen)[0]) == ["recompute", "tiles", "offload", "largest_stays", "layers"]


def test_attention_that_was_timed_takes_its_own_rate():
    rows = (replace(ROWS[0], forward_work=Work(0, 100), backward_work=Work(0, 200)),)
    plain = RegionCandidates(rows, 8)
    timed, machine = replace(plain, attention=50.0), Rates(1.0, 2.0, 3.0, 4.0)
    assert plain.rates(machine) == machine and timed.rates(machine) == replace(machine, attention=50.0)
    made = solve(request(1, candidates={1: timed}, rates=machine))
    assert made.choice.work == pytest.approx(300 / 50.0 / SUSTAINED)


@pytest.mark.parametrize("room, kept", [(70, 1), (100, 2), (119, 3)])
@pytest.mark.parametrize("held", [0, 20])
def test_a_mixture_of_plans_leaves_room_for_recordings(room, kept, held):
    """As many layers keep all as can be recorded in a part of the room: neither copies, nor one plan for all."""
    options = (
        PlanOption(KEEP, 30, 0, 0, 0.0),
        PlanOption(KEEP, held, 0, 0, 0.5, offloaded=30 - held),
        PlanOption(RECOMPUTE, 10, 0, 0, 10.0),
    )
    runs = [LayerRun(4, options)]
    fastest = choose(runs, room)
    assert fastest.offloads
    made, short = leave_room_for_graphs(fastest, runs, room, 0, 35.0)
    assert [option.held for option in made.options[0]] == [10] * (4 - kept) + [30] * kept and not short


def test_recordings_save_in_both_passes_of_a_step():
    """What they save of the forwards is known, and backwards save as much: less than that has to be lost by a plan."""
    tight = request(1, checkpointed=False, available=1095, rates=Rates(1 / SUSTAINED, 1.0))
    for saving, plan in ((57.0, KEEP), (59.0, HALF)):  # 50 ms for the 3 / 7 of the graphs that lack room
        made = solve(replace(tight, saving=saving))
        assert [option.plan for option in made.choice.options[0]] == [plan], saving
        assert made.saving == saving and not made.short


def test_checkpoints_of_layers_that_save_no_more_than_they_return():
    rows = (CandidateCost(KEEP, 8, 0, 5, 45, Work(), Work()),)
    assert request(3, candidates={1: RegionCandidates(rows, 8, passed=10)}).checkpointed_peak() == 30 + 45


def test_a_region_of_which_nothing_else_is_known():
    """It has no frozen weights to keep, and hands on nothing."""
    made = solve(request(2, candidates={1: RegionCandidates(ROWS, 8)}, keeps_weights=True, checkpointed=False))
    assert made.weights == 0 and {(o.plan, o.passed, o.gradients) for o in made.choice.options[0]} == {(KEEP, 0, 0)}
    assert request(2, candidates={1: RegionCandidates(ROWS, 8)}).checkpointed_peak() == 50 + 10


def test_one_plan_for_all_layers_may_take_the_whole_room():
    """Its recordings have scratch in one place; of a mixture that takes less and is faster none can be made."""
    runs = [LayerRun(2, (PlanOption(KEEP, 30, 0, 65, 0.0), PlanOption(RECOMPUTE, 10, 0, 100, 10.0)))]
    fastest = choose(runs, 120)
    assert [option.plan for option in fastest.options[0]] == [RECOMPUTE, KEEP] and fastest.peak == 110
    made, short = leave_room_for_graphs(fastest, runs, 120, 0, 50.0, spare=20)
    assert [option.plan for option in made.options[0]] == [RECOMPUTE, RECOMPUTE] and made.peak == 120 and not short


def test_layers_with_windows_recompute_their_attention_first():
    """Of one region: attention of a window takes a hundredth of the time of attention to all."""
    attends = tuple(
        replace(row, forward_work=Work(100, attention=10), backward_work=replace(row.backward_work, attention=10 * i))
        for i, row in enumerate(ROWS)
    )
    candidates = {1: RegionCandidates(attends, 8, whole=True, attention=0.9, longest=1000, window=10)}
    runs = tuple(RegionRun(1, layers, window) for layers, window in ((2, 10), (1, 0), (2, 10), (1, 0)))
    asked = request(0, runs=runs, candidates=candidates, checkpointed=False, available=1000 + 200)
    asked = replace(asked, rates=Rates(1.0, 1.0, attention=1.0))
    assert [each.rows[1].backward_work.attention for each in asked.layers()] == [10, 10, 1000, 10, 10, 1000]
    assert [each.attention for each in asked.layers()] == [0.9, 0.9, None] * 2
    plans = [option.plan for option in options(solve(asked))]
    assert plans[2] == plans[5] == KEEP and KEEP not in plans[:2] + plans[3:5]
    short = replace(asked, candidates={1: replace(candidates[1], longest=10)})
    assert [run.layers for run in short.layer_runs()] == [6] and len(asked.layer_runs()) == 4
