"""The planner against brute force, and what it promises of any layers and any budget."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunecompile.errors import UnknownBudget
from tunecompile.planner.device_memory import HostGauge, budget_bytes, host_budget_bytes
from tunecompile.planner.solver import (
    KEEP,
    LayerRun,
    Plan,
    PlanOption,
    choose,
    copies,
    peak,
    plan_lines,
    smaller_options,
)

bytes_ = st.integers(0, 100)
option = st.builds(
    PlanOption,
    st.just(KEEP),
    held=bytes_,
    forward=bytes_,
    backward=bytes_,
    ms=st.floats(0, 10).map(lambda x: round(x, 2)),
)
stack = st.builds(LayerRun, st.integers(1, 4), st.lists(option, min_size=1, max_size=4).map(tuple))


def brute_force(stacks, room, tail):
    """The time of the fastest assignment that fits, or None."""
    each = [stack.options for stack in stacks for _ in range(stack.layers)]
    fitting = [sum(o.ms for o in chosen) for chosen in itertools.product(*each) if peak([chosen], tail) <= room]
    return min(fitting, default=None)


@settings(max_examples=200, deadline=None)
@given(st.lists(stack, min_size=1, max_size=2), st.integers(0, 600), bytes_)
def test_what_is_chosen_fits_or_says_that_it_does_not(stacks, room, tail):
    choice = choose(stacks, room, tail)
    assert [len(options) for options in choice.options] == [stack.layers for stack in stacks]
    assert all(option in stack.options for stack, options in zip(stacks, choice.options) for option in options)
    assert choice.peak == peak(choice.options, tail, choice.ahead)
    assert choice.fits == (choice.peak <= room)


@settings(max_examples=100, deadline=None)
@given(stack, st.integers(0, 400), st.integers(0, 400))
def test_more_room_is_never_slower(stack, one, other):
    less, more = sorted((one, other))
    tight, loose = choose([stack], less), choose([stack], more)
    assert not tight.fits or loose.fits
    assert not tight.fits or loose.ms <= tight.ms + 1e-9


def nested(layers, held, ms):
    """Layers as they are: the less a plan holds, the more it computes; nothing beside."""
    return LayerRun(
        layers,
        tuple(
            PlanOption(Plan(frozenset(range(i))), h, 0, 0, t)
            for i, (h, t) in enumerate(zip(sorted(held, reverse=True), sorted(ms)))
        ),
    )


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 4),
    st.lists(st.integers(1, 50), min_size=2, max_size=3),
    st.lists(st.floats(0.1, 9), min_size=1, max_size=2),
    st.integers(0, 250),
)
def test_at_most_one_layer_from_the_optimum(layers, held, ms, room):
    stack = nested(layers, held[: len(ms) + 1], [0.0, *ms])
    best, choice = brute_force([stack], room, 0), choose([stack], room)
    assert choice.fits == (best is not None)
    if best is not None:
        assert choice.ms <= best + max(o.ms for o in stack.options) + 1e-9


def test_early_layers_move_first_and_only_as_many_as_must():
    stack = nested(8, [100, 40, 10], [0.0, 1.0, 4.0])
    plans = [option.held for option in choose([stack], 8 * 100 - 130).options[0]]
    assert plans == [40, 40, 40, 100, 100, 100, 100, 100]


def test_all_is_kept_where_it_fits_even_if_another_plan_costs_as_little():
    options = (PlanOption(KEEP, 100, 5, 5, 0.0), PlanOption(KEEP, 0, 300, 300, 0.01, offloaded=100))
    assert all(o.offloaded == 0 for o in choose([LayerRun(4, options)], 405).options[0])


def test_the_cheapest_byte_comes_first():
    keep, bad, good = PlanOption(KEEP, 100, 0, 0, 0.0), PlanOption(KEEP, 90, 0, 0, 5.0), PlanOption(KEEP, 20, 0, 0, 6.0)
    assert smaller_options([bad, good, keep], keep) == [good, bad] and smaller_options([bad, good, keep], good) == []


def test_milliseconds_that_are_paid_already_do_not_count():
    """What a byte costs is what a layer pays beyond what it pays now."""
    now, near, far = (PlanOption(KEEP, held, 0, 0, ms) for held, ms in ((100, 4.0), (90, 5.0), (20, 13.0)))
    assert smaller_options([far, now, near], now) == [near, far]


def test_bytes_that_copies_have_on_the_device():
    """A layer's own, and those of a few before it; a layer without an option has none."""
    order = [PlanOption(KEEP, 0, 0, 0, 0.0, offloaded=bytes_) for bytes_ in (1, 10, 100)]
    assert [copies(order, place, 1) for place in range(3)] == [1, 11, 110]
    assert [copies(order, place, 0) for place in range(3)] == [1, 10, 100]
    assert copies([order[0], None, order[2]], 2, 2) == 101


def test_room_to_compute_again_counts():
    """The last layer's backward runs while all others hold theirs, so it may be the one that must not recompute."""
    options = (PlanOption(KEEP, 50, 0, 10, 0.0), PlanOption(Plan(None), 10, 0, 100, 1.0))
    choice = choose([LayerRun(3, options)], 130)
    assert choice.fits and choice.options[0][-1].plan == KEEP


def step(options, tail):
    """Every moment of a step, one after the other: the most bytes there are."""
    held = gradients = 0
    seen = [tail]
    for option in options:
        held += option.held
        seen.append(held + option.forward)
    seen.append(held + tail)
    for option in reversed(options):
        seen.append(held + gradients + option.backward)
        held, gradients = held - option.held, gradients + option.gradients
    return max(seen)


@given(
    st.lists(
        st.builds(
            PlanOption, st.just(KEEP), held=bytes_, forward=bytes_, backward=bytes_, ms=st.just(0.0), gradients=bytes_
        ),
        min_size=1,
        max_size=6,
    ),
    bytes_,
)
def test_gradients_come_as_what_layers_hold_goes(options, tail):
    assert peak([options], tail) == step(options, tail)


@pytest.mark.parametrize(
    "spec, expected",
    [
        ("20GiB", 20 * 2**30),
        ("1.5 GB", 1_500_000_000),
        ("1 B", 1),
        (2, 2),
        (1.0, HostGauge().total()),
        ("512mib", 512 * 2**20),
        ("2TB", 2 * 10**12),
        ("2 kB", 2000),
        ("3MB", 3 * 10**6),
        ("1TiB", 2**40),
        ("3KiB", 3 * 2**10),
        (10**9, 10**9),
        (0.5, HostGauge().total() // 2),
        (None, None),
        ("auto", "auto"),
    ],
)
def test_budgets(spec, expected):
    assert budget_bytes(spec, HostGauge()) == expected


@pytest.mark.parametrize("spec", ["20", "much", "GiB", -1, 0, 1, 0.0, 1.5, True, "0GiB", [1]])
def test_what_is_no_budget(spec):
    with pytest.raises(UnknownBudget, match="is no budget"):
        budget_bytes(spec, HostGauge())


@pytest.mark.parametrize(
    ("spec", "expected"), [(None, None), ("auto", None), (0, 0), (2, 2), ("2KiB", 2048), (4096, 4096)]
)
def test_host_budgets(spec, expected):
    assert host_budget_bytes(spec) == expected


def test_the_last_layer_stays_where_others_wait_on_the_host():
    options = (
        PlanOption(KEEP, 100, 0, 0, 0.0),
        PlanOption(Plan(frozenset({0})), 40, 0, 10, 5.0),
        PlanOption(Plan(frozenset({0})), 0, 0, 10, 5.1, offloaded=40),
    )
    (made,) = choose([LayerRun(4, options)], room=130).options  # three layers' copies and the room to recompute
    assert [option.offloaded for option in made] == [40, 40, 40, 0]
    (made,) = choose(
        [LayerRun(4, options)], room=130, tail=100
    ).options  # what the head needs comes on top of what stays
    assert [option.offloaded for option in made] == [40] * 4


def test_the_last_layer_stays_where_the_search_offloads_it():
    """Both layers are offloaded on the way to a plan that fits; the last layer's copy has no work to hide behind."""
    part = Plan(frozenset({0}))
    options = (
        PlanOption(KEEP, 90, 0, 0, 1.0),
        PlanOption(KEEP, 40, 0, 0, 1.1, offloaded=50),
        PlanOption(part, 40, 0, 10, 5.0),
        PlanOption(part, 0, 0, 10, 5.1, offloaded=40),
    )
    (made,) = choose([LayerRun(2, options)], room=70).options
    assert [option.offloaded for option in made] == [40, 0] and {option.plan for option in made} == {part}


def test_copies_go_fewer_layers_ahead_where_there_is_no_room_for_two():
    stack = LayerRun(6, (PlanOption(KEEP, 100, 0, 0, 0.0), PlanOption(KEEP, 0, 0, 10, 0.1, offloaded=100)))
    assert [choose([stack], room).ahead for room in (700, 320, 220, 120)] == [2, 2, 1, 0]
    assert choose([stack], 110).fits and not choose([stack], 100).fits


def test_copies_that_cost_nothing_go_fewer_layers_ahead_too():
    free = LayerRun(3, (PlanOption(KEEP, 0, 0, 0, 0.0, offloaded=100),))
    assert [(made.fits, made.ahead) for made in (choose([free], room) for room in (310, 210, 110))] == [
        (True, 2),
        (True, 1),
        (True, 0),
    ]


def test_copies_go_one_layer_ahead_where_that_is_faster():
    options = (
        PlanOption(KEEP, 100, 0, 0, 0.0),
        PlanOption(KEEP, 0, 0, 10, 0.1, offloaded=100),
        PlanOption(Plan(frozenset({0})), 0, 0, 10, 9.0, offloaded=50),
    )
    made = choose([LayerRun(6, options)], 260)
    assert made.ahead == 1 and made.fits and made.ms < 1


def test_copies_that_nothing_hides_are_paid_for():
    """With room for one layer's tensors at a time, recomputing is faster than waiting for them; with room for two, it is not."""
    options = (
        PlanOption(KEEP, 100, 0, 10, 0.0),
        PlanOption(KEEP, 0, 0, 10, 0.1, offloaded=100, copying=20.0),
        PlanOption(Plan(None), 10, 0, 60, 4.0),
    )
    tight, loose = choose([LayerRun(8, options)], 140), choose([LayerRun(8, options)], 400)
    assert {o.plan for o in tight.options[0]} == {Plan(None)} and tight.ms == 32.0
    assert loose.ahead == 2 and {o.offloaded for o in loose.options[0]} == {0, 100}
    options = (*options[:2], PlanOption(Plan(None), 10, 0, 60, 40.0))
    waiting = choose([LayerRun(8, options)], 140)
    assert (
        waiting.ahead == 0
        and waiting.fits
        and sum(o.offloaded for o in waiting.options[0]) >= 700
        and waiting.ms >= 7 * 20
    )


def test_the_largest_tensor_stays_where_all_of_a_layers_do_not_fit():
    """Rather than being recomputed, with the small ones on the device."""
    again = Plan(frozenset({0}))
    options = (
        PlanOption(KEEP, 72, 30, 90, 0.0),
        PlanOption(KEEP, 44, 30, 90, 0.1, offloaded=28),
        PlanOption(KEEP, 0, 30, 90, 3.0, offloaded=72),
        PlanOption(again, 28, 50, 100, 2.6),
        PlanOption(again, 0, 50, 100, 2.7, offloaded=28),
    )
    without = tuple(o for o in options if not (o.held and o.offloaded))
    mixed, plain = (choose([LayerRun(32, given)], 1300, tail=50) for given in (options, without))
    assert (
        mixed.fits
        and plain.fits
        and mixed.ms < 0.5 * plain.ms
        and any(o.held and o.offloaded for o in mixed.options[0])
    )
    assert (
        options[1].offloads_tensor(22)
        and not options[1].offloads_tensor(33)
        and options[2].offloads_tensor(72)
        and not options[0].offloads_tensor(1)
    )


def test_a_host_that_cannot_hold_all_is_shared():
    """A few layers that leave all they save on the host would fill it, and the others have nowhere to go: everything is recomputed by most."""
    most, again = Plan(None), Plan(None, attention=True)
    options = (
        PlanOption(KEEP, 300, 20, 60, 0.0),
        PlanOption(KEEP, 0, 20, 60, 0.2, offloaded=300),
        PlanOption(most, 60, 30, 90, 10.0),
        PlanOption(most, 0, 30, 90, 10.1, offloaded=60),
        PlanOption(again, 30, 30, 90, 90.0),
        PlanOption(again, 0, 30, 90, 90.1, offloaded=30),
    )
    made = choose([LayerRun(30, options)], 300, host=1000)
    assert made.fits and sum(o.offloaded for o in made.options[0]) <= 1000
    assert (
        made.ms < 30 * 90.1 - 2 * 80 and PlanOption(most, 0, 30, 90, 10.1, offloaded=60) in made.options[0]
    )  # what was left of the host is used
    assert choose([LayerRun(30, options)], 300, host=10**6).ms < 30 * 10.2


def test_a_layer_that_sends_more_to_the_host_needs_room_there_for_the_rest_alone():
    again = Plan(frozenset({0}))
    options = (
        PlanOption(KEEP, 72, 0, 10, 0.0),
        PlanOption(KEEP, 44, 0, 10, 0.1, offloaded=28),
        PlanOption(KEEP, 0, 0, 10, 3.0, offloaded=72),
        PlanOption(again, 10, 0, 10, 20.0),
    )
    made = choose([LayerRun(4, options)], 102, host=133)
    assert made.fits and sorted(o.offloaded for o in made.options[0]) == [0, 0, 0, 72]


def test_a_layer_that_waits_for_its_copies_takes_their_time_once():
    options = (PlanOption(KEEP, 100, 0, 0, 0.0, work=5.0), PlanOption(KEEP, 0, 0, 0, 1.0, 100, 6.0, copying=3.0))
    made = choose([LayerRun(6, options)], 100)
    assert (made.fits, made.ahead, made.ms, made.work) == (True, 0, 20.0, 50.0)  # the last layer waits for none
    assert {option.copying for option in made.options[0]} == {0.0}


def test_copies_that_cost_nothing_go_less_far_ahead_where_room_is_short():
    options = (PlanOption(KEEP, 100, 0, 10, 0.0), PlanOption(KEEP, 0, 0, 10, 0.0, offloaded=100))
    made = choose([LayerRun(6, options)], 260)
    assert (made.fits, made.ahead, made.ms) == (True, 1, 0.0)


def test_a_host_smaller_than_an_equal_share_takes_as_many_layers_as_it_can():
    """70B at 120k tokens: each layer's input alone is more than its share of the host."""
    keep, again = PlanOption(KEEP, 200, 0, 90, 0.0), PlanOption(Plan(None), 20, 0, 90, 10.0)
    options = (
        keep,
        again,
        PlanOption(KEEP, 0, 0, 90, 1.0, offloaded=200),
        PlanOption(Plan(None), 0, 0, 90, 10.1, offloaded=20),
    )
    made = choose([LayerRun(10, options)], 195, host=100)
    assert (
        made.fits and sum(o.offloaded for o in made.options[0]) == 100 and set(made.options[0]) <= {again, options[3]}
    )
    assert (
        choose([LayerRun(10, options)], 1000, host=100).ms < made.ms
    )  # what stays on the device beside them is not as small as can be


waiting = st.builds(
    PlanOption,
    st.just(KEEP),
    held=bytes_,
    forward=bytes_,
    backward=bytes_,
    ms=st.floats(0, 10).map(lambda x: round(x, 2)),
    offloaded=bytes_,
)


@settings(max_examples=150, deadline=None)
@given(
    option,
    st.lists(waiting, min_size=1, max_size=4),
    st.integers(1, 5),
    st.integers(0, 500),
    bytes_,
    st.integers(0, 300),
)
def test_the_host_holds_what_is_sent_to_it(plain, others, layers, room, tail, host):
    stack = LayerRun(layers, (plain, *others))
    choice = choose([stack], room, tail, host)
    assert sum(o.offloaded for o in choice.options[0]) <= host
    assert choice.peak == peak(choice.options, tail, choice.ahead) and choice.fits == (choice.peak <= room)
    assert not choice.fits or choice.ms <= sum(o.ms for o in choice.options[0]) + 1e-9
    assert choose([stack], room, tail, None).fits or not choice.fits


@settings(max_examples=150, deadline=None)
@given(
    option,
    st.lists(waiting, min_size=1, max_size=3),
    st.lists(st.one_of(option, waiting), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(0, 500),
    bytes_,
    st.integers(0, 300),
)
def test_layers_without_a_choice_keep_what_they_have(plain, others, fixed, layers, room, tail, host):
    """They ran already. What they sent to the host is no more room there for others, and may even be too much."""
    stacks = [*(LayerRun(1, (each,)) for each in fixed), LayerRun(layers, (plain, *others))]
    choice = choose(stacks, room, tail, host)
    assert [option for (option,) in choice.options[: len(fixed)]] == fixed
    sent, left = (sum(o.offloaded for o in part) for part in (fixed, choice.options[-1]))
    assert left <= max(0, host - sent)
    assert choice.peak == peak(choice.options, tail, choice.ahead) and choice.fits == (choice.peak <= room)


def test_plans_in_words():
    plain = {"layers": 30, "recompute": [], "tiles": 1, "offload": False, "largest_stays": False}
    again = {**plain, "layers": 2, "recompute": ["mm 8x32", "mm 8x2"], "tiles": 4, "offload": True}
    assert plan_lines([plain, again, {**again, "recompute": [], "largest_stays": True}]) == [
        "     30 layers keep all that is expensive to recompute",
        "      2 layers recompute mm 8x32, mm 8x2; MLP in 4 tiles; the rest is offloaded",
        "      2 layers keep all that is expensive to recompute; MLP in 4 tiles; all but the largest tensor is offloaded",
    ]
