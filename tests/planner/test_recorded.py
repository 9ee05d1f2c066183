"""What a step takes whose layers are all recorded, and what is chosen for Qwen3-30B-A3B in 24 GiB on an H100."""

from dataclasses import replace

import pytest

from tunecompile.planner.candidates import CandidateCost
from tunecompile.planner.cost_model import Work
from tunecompile.planner.hardware import Rates
from tunecompile.planner.recorded import BUFFERS, RECORDED, RecordedStep, recorded_step
from tunecompile.planner.solver import KEEP, RECOMPUTE, Plan, PlanOption
from tunecompile.planner.step_plan import RegionCandidates, RegionRun, StepRequest, solve
from tunecompile.runtime.cuda_graphs.allowance import Allowance

LAYERS, HIDDEN = 48, 8_388_608
FORWARD = Work(80_597_745_664, 68_719_476_736, 3_604_271_123, 29)
EXPERTS = Plan(frozenset({3, 4}))
#: of a layer on 1x2048 tokens with adapters of rank 8 on attention and experts, as `tunecompile plan` surveys it
ROWS = tuple(
    CandidateCost(plan, held, 0, forward, backward, FORWARD, Work(products, attention, traffic, kernels))
    for plan, held, forward, backward, products, attention, traffic, kernels in (
        (KEEP, 107_176_448, 1_213_894_672, 966_430_736, 81_134_616_576, 171_798_691_840, 4_297_077_780, 54),
        (EXPERTS, 56_492_032, 1_264_357_904, 1_316_991_504, 81_134_616_576, 171_798_691_840, 5_225_040_964, 57),
        (RECOMPUTE, 25_427_968, 1_273_795_088, 1_317_548_560, 161_732_362_240, 171_798_691_840, 5_412_071_951, 72),
        (
            Plan(None, attention=True),
            *(8_650_752, 1_273_795_088, 1_382_658_576, 161_732_362_240, 240_518_168_576, 5_468_695_055, 74),
        ),
    )
)


def tight(rows=len(ROWS), **changes) -> StepRequest:
    found = RegionCandidates(
        ROWS[:rows], 2048, whole=rows == len(ROWS), passed=HIDDEN, attention=852_830_315_789.0, weights=0
    )
    made = StepRequest(
        2048,
        (RegionRun(1, LAYERS, gradients=1_285_029_888 // LAYERS),),
        {1: found},
        Rates(791.2e9, 55_040_000.0, 2.881e9, 1.2e12, launches=True),
        available=23_624_626_996,
        resident=21_833_602_432,
        tail=327_942_144,
        host=None,
        offload=True,
        records=True,
    )
    return replace(made, **changes)


def plans(made):
    return {(option.plan, option.offloaded > 0) for run in made.choice.options for option in run}


@pytest.mark.parametrize("saving", [10.0, 40.0, 75.0])
def test_a_tight_budget_recomputes_to_be_recorded(saving):
    """A step that waits for the host, 396 ms, is one of 205 ms and head, loss and AdamW."""
    copied = solve(tight())
    assert copied.choice.offloads and plans(copied) == {(EXPERTS, True), (EXPERTS, False)} and not copied.short
    made = solve(tight(saving=saving))
    assert plans(made) == {(Plan(None, attention=True), False)} and made.records_all and not made.short
    assert made.choice.fits and made.recorded.bytes <= made.room < made.recorded.bytes + made.recorded.scratch
    assert 200 < made.choice.work < 0.8 * 297


def test_surveys_go_on_until_all_layers_can_be_recorded():
    """Attention is recomputed by the last plans that are surveyed, and all others save too much."""
    for rows in (2, 3):
        made = solve(tight(rows, saving=40.0))
        assert made.choice.offloads and made.choice.fits and made.short
        assert not made.settles(tight(rows).candidates.values())
    assert solve(tight(saving=40.0)).settles(tight().candidates.values())
    assert solve(tight(3)).settles(tight(3).candidates.values()), "as long as it is not known that recordings save time"


def test_all_layers_are_admitted_and_fit():
    """Where scratch is taken once, by the first forward and what the first backward needs more."""
    made = solve(tight(saving=40.0))
    whole, (option,) = made.recorded, {option for run in made.choice.options for option in run}
    allowance = Allowance(
        made.room, made.choice.peak, LAYERS, True, whole.scratch, whole.saved, whole.beside
    )  # as `Recordings.allow` does
    taken = 0
    for layer in range(LAYERS):
        assert allowance.admits(taken, layer), layer
        taken += option.held - HIDDEN + (0 if layer else option.forward + HIDDEN)
    for layer in range(LAYERS):
        assert allowance.admits(taken, LAYERS), layer
        taken += 0 if layer else option.backward - option.forward - HIDDEN
    assert taken + whole.beside <= made.room
    assert not allowance.admits(2 * whole.scratch, LAYERS), "scratch of backwards in a memory of its own"
    assert not replace(allowance, beside=None).admits(whole.scratch, 1), "the share of a step counts scratch again"


def test_the_bytes_of_a_recorded_step():
    one = PlanOption(KEEP, 30, 100, 90, 0.0, gradients=7, passed=10)
    other = PlanOption(RECOMPUTE, 15, 50, 160, 1.0, gradients=7, passed=10)
    for tail, beside in ((0, 30 + 7), (100, 30 + 100)):
        made = recorded_step([[one, one], [other]], tail)
        assert made == RecordedStep(110 + 160, 20 + 20 + 5, beside + BUFFERS * 10)
        assert made.bytes == int(RECORDED * (270 + 45)) + made.beside
    assert recorded_step([[one] * 9], 0).scratch == 110, "layers of one plan have it in one place"
    grown = recorded_step([[replace(one, gradients=100)] * 2], 0)
    assert grown.beside == 210 + 40, "gradients are there once the last layers' backwards ran"


def test_the_share_that_is_recorded():
    """The others need scratch of their own."""
    made = RecordedStep(scratch=100, saved=1000, beside=0)
    assert made.bytes == 1210 and made.share(1210, 900) == 1.0
    assert made.share(1209, 900) == pytest.approx(209 / 210) and made.share(1105, 900) == pytest.approx(0.5)
    assert made.share(1000, 900) == made.share(500, 900) == 0.0


def test_layers_of_two_kinds_have_scratch_of_their_own_though_they_cost_the_same():
    """Full attention and a window that is longer than the batch, say. Layers whose gradients differ run one graph."""
    layer = PlanOption(KEEP, 20, 100, 300, 0.0, passed=10, kind=1)
    other = replace(layer, kind=2)
    assert layer == other and recorded_step([[layer], [other], [layer]], 0).scratch == 600
    assert recorded_step([[layer], [replace(layer, gradients=5)]], 0).scratch == 300
    assert recorded_step([[layer], [replace(layer, plan=RECOMPUTE, backward=400)]], 0).scratch == 700
    request = tight()
    two = replace(
        request,
        runs=(RegionRun(1, 1, gradients=0), RegionRun(2, 1, gradients=0)),
        candidates={1: request.candidates[1], 2: request.candidates[1]},
    )
    options = [run.options[0] for run in two.layer_runs()]
    assert options[0] == options[1]
    assert recorded_step([options], 0).scratch == 2 * recorded_step([options[:1]], 0).scratch > 0
