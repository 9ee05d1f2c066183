"""The parts of the search: limits for the host, and what is done with memory that is left."""

from dataclasses import replace

from tunecompile.planner.solver import (
    AHEAD,
    KEEP,
    KEEP_WEIGHTS,
    RECOMPUTE,
    Assignment,
    LayerRun,
    Plan,
    PlanOption,
    _ceilings,
    _shares,
    _use_up,
    choose,
    describe_plan,
    peak,
)


def sent(*offloaded):
    """Options that send so many bytes to the host."""
    return tuple(PlanOption(KEEP, 0, 0, 0, 0.0, offloaded=nbytes) for nbytes in offloaded)


def test_limits_on_what_a_layer_sends_are_few():
    """From an equal share up, each half as much again; what fits in the share needs no limit of its own."""
    assert _shares([LayerRun(1, sent(0, 10, 12, 20, 29)), LayerRun(3, sent(30, 45))], 40) == [10, 12, 20, 30, 45]
    assert _shares([LayerRun(2, sent(5, 20))], 40) == [20] and _shares([LayerRun(2, sent(5, 21))], 40) == [20, 21]


def moved(options, room, host, layers=5):
    """The options of layers that all followed the first, once what is left was used."""
    taken = ((options[0],) * layers,)
    start = Assignment(taken, peak(taken, 0), True)
    made = _use_up(start, [LayerRun(layers, options)], room, 0, host)
    assert made.peak == peak(made.options, 0) <= room and made.waiting <= host and made.fits
    return [options.index(option) for option in made.options[0]]


def test_memory_that_is_left_goes_where_it_saves_most_a_byte():
    """Not to the layer that saves most: the others would find nothing. Later layers come first."""
    slow, some, all_ = (PlanOption(KEEP, held, 0, 0, ms) for held, ms in ((0, 10.0), (2, 4.0), (100, 1.0)))
    assert moved((slow, some, all_), 100, 0) == [1, 1, 1, 1, 1]
    assert moved((slow, some, all_), 108, 0) == [1, 1, 1, 1, 2]
    assert moved((slow, some, all_), 5, 0) == [0, 0, 0, 1, 1] and moved((slow, some, all_), 4, 0) == [0, 0, 0, 1, 1]
    on_host = tuple(replace(option, held=0, offloaded=option.held) for option in (slow, some, all_))
    assert moved(on_host, 10**6, 107) == [1, 1, 1, 1, 1] and moved(on_host, 10**6, 108) == [1, 1, 1, 1, 2]


def test_plans_as_text_tell_all_that_differs():
    """They are part of the keys of compiled code: two plans of one key would run each other's."""
    plans = (
        Plan(),
        Plan(None),
        Plan(frozenset({10, 2})),
        Plan(tiles=4),
        Plan(weights=True),
        Plan(None, attention=True),
    )
    assert [plan.key for plan in plans] == ["", "all", "2,10", " in 4", " with weights", "all and attention"]
    assert Plan(frozenset({1}), 16, True, True).key == "1 in 16 with weights and attention"
    assert [plan.key for plan in (KEEP, RECOMPUTE, KEEP_WEIGHTS)] == ["", "all", " with weights"]


def test_all_runs_of_layers_stay_in_the_plan():
    """One layer of one run is made faster at a time."""
    slow, fast = PlanOption(KEEP, 0, 0, 0, 10.0), PlanOption(KEEP, 2, 0, 0, 4.0)
    stacks = [LayerRun(count, (slow, fast)) for count in (1, 2, 1, 3)]
    start = Assignment(tuple((slow,) * stack.layers for stack in stacks), 0, True)
    made = _use_up(start, stacks, 6, 0, 0)
    assert [len(run) for run in made.options] == [1, 2, 1, 3]
    assert sum(option is fast for run in made.options for option in run) == 3 and made.peak == 6
    assert made.options[:2] == ((fast,), (fast, fast))


def test_options_of_two_kinds_of_layers_are_equal_where_they_cost_the_same():
    """They are moved in turn, like layers of one kind."""
    first, other = (PlanOption(KEEP, 10, 1, 2, 3.0, kind=kind) for kind in (1, 2))
    made = choose([LayerRun(1, (first,)), LayerRun(1, (other,))], 100)
    assert made.options[0] == made.options[1] and hash(first) == hash(other) and first != replace(first, gradients=1)
    assert [option.kind for run in made.options for option in run] == [1, 2]


def test_where_nothing_is_copied_copies_may_go_as_far_ahead_as_ever():
    made = choose([LayerRun(2, (PlanOption(KEEP, 10, 0, 0, 0.0),))], 5)
    assert not made.fits and made.ahead == AHEAD and not made.offloads
    assert replace(made, options=(sent(1),)).offloads


def test_a_host_with_room_for_just_what_the_fastest_plan_sends():
    """The plan is that of a host without a limit: to share the host would send less to it."""
    options = PlanOption(Plan(frozenset({0})), 20, 0, 0, 2.0, 10), PlanOption(KEEP, 40, 0, 10, 0.0, 30)
    free, made = (choose([LayerRun(4, options)], 140, host=host) for host in (None, 60))
    assert made == free and made.waiting == 60 and choose([LayerRun(4, options)], 140, host=59).ms > made.ms


def test_the_last_layer_stays_behind_other_runs_of_layers():
    """As it does without them."""
    options = (
        *(PlanOption(KEEP, 90, 0, 0, 1.0), PlanOption(KEEP, 40, 0, 0, 1.1, offloaded=50)),
        *(PlanOption(RECOMPUTE, 40, 0, 10, 5.0), PlanOption(RECOMPUTE, 0, 0, 10, 5.1, offloaded=40)),
    )
    free = PlanOption(KEEP, 0, 0, 0, 0.0)
    alone = choose([LayerRun(2, options)], 70)
    made = choose([LayerRun(1, (free,)), LayerRun(2, (free,)), LayerRun(2, options)], 70)
    assert made.options == ((free,), (free, free), *alone.options)
    assert [option.offloaded for option in made.options[-1]] == [40, 0]


def test_ceilings_on_what_layers_need_while_they_run():
    """Each a tenth lower at least, and at last the lowest under which every layer has an option."""

    def needing(*most):
        return LayerRun(1, tuple(PlanOption(KEEP, 0, forward, forward - 1, 0.0) for forward in most))

    for stacks, ceilings in (
        ([needing(100, 95, 50, 10), needing(40, 70)], [100, 70, 50, 40]),
        ([needing(100, 95), needing(10)], [100, 95]),
        ([needing(100, 90), needing(95, 10)], [100, 90]),
        ([needing(100)], [100]),
        ([needing(100), needing(10, 20)], [100]),
    ):
        assert _ceilings(stacks, 2) == ceilings
    copied = replace(needing(100), options=(PlanOption(KEEP, 0, 10, 1, 0.0, offloaded=30),))
    assert [_ceilings([copied], ahead) for ahead in (2, 1, 0)] == [[100], [70], [40]]


def test_tiles_in_words():
    plain = {"recompute": [], "offload": False, "largest_stays": False}
    kept = "keep all that is expensive to recompute"
    assert [describe_plan({**plain, "tiles": tiles}) for tiles in (1, 2)] == [kept, f"{kept}; MLP in 2 tiles"]
