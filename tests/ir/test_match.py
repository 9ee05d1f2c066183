"""The matcher on small graphs: what binds, what commutes, what is closed, and how rewrites are applied."""

import pytest
import torch
import torch.nn.functional as F

from tests.support.passes.run import Recorder, family
from tunecompile.compiler.pass_manager import recognize
from tunecompile.errors import InvalidRewrite
from tunecompile.ir.canonicalize import canonicalize_graph
from tunecompile.ir.match import Matcher, Pattern, cast
from tunecompile.ir.near_miss import near_misses
from tunecompile.ir.rewrite import apply, rewrite


def graph(fn):
    made = torch.fx.symbolic_trace(fn).graph
    canonicalize_graph(made)
    return made


def find(pattern, fn):
    return list(Matcher(graph(fn)).find(Pattern.trace(pattern)))


def names(match):
    return {k: getattr(v, "name", v) for k, v in match.bound.items()}


def test_commutative_operands_and_captured_scalars():
    (m,) = find(lambda x, w, e: w * torch.rsqrt(x + e), lambda a, b: torch.rsqrt(1e-5 + a) * b)
    assert names(m) in ({"x": "a", "w": "b", "e": 1e-5}, {"x": 1e-5, "w": "b", "e": "a"})
    (m,) = find(lambda x, e: torch.rsqrt(x.pow(2) + e), lambda a: torch.rsqrt(1e-5 + a.square()))
    assert names(m) == {"x": "a", "e": 1e-5}


@pytest.mark.parametrize("fn", [lambda a, b: torch.tanh(a - b), lambda a, b: torch.tanh(b - a)])
def test_subtraction_does_not_commute(fn):
    (m,) = find(lambda x, y: torch.tanh(torch.sin(x) - y), lambda a, b: torch.tanh(torch.sin(a) - b))
    assert names(m) == {"x": "a", "y": "b"}
    assert not find(lambda x, y: torch.tanh(torch.sin(x) - y), lambda a, b: torch.tanh(b - torch.sin(a)))


def test_one_parameter_is_one_value():
    pattern = lambda x, y: torch.sin(x) * x + y  # noqa: E731
    assert find(pattern, lambda a, b: torch.sin(a) * a + b)
    assert not find(pattern, lambda a, b: torch.sin(a) * b + b)
    assert find(lambda x, s: torch.sin(x * s) + s, lambda a: torch.sin(a * 2.0) + 2.0)
    assert not find(lambda x, s: torch.sin(x * s) + s, lambda a: torch.sin(a * 2.0) + 3.0)


def test_constants_in_a_pattern_are_demanded():
    assert find(lambda x: x.pow(2) * 0.5, lambda a: a.square() * 0.5)
    assert not find(lambda x: x.pow(2) * 0.5, lambda a: a.square() * 0.25)
    assert not find(lambda x: x.pow(2) * 0.5, lambda a: a.pow(3) * 0.5)
    assert find(lambda x: x.pow(2) * 1.0, lambda a: a.pow(2.0) * 1)
    assert not find(lambda x: x.mean(-1, keepdim=True) + 1, lambda a: a.mean(-1, keepdim=False) + 1)


def test_an_inner_value_with_another_user():
    pattern = lambda x: torch.tanh(torch.sin(x))  # noqa: E731
    assert find(pattern, lambda a: torch.tanh(torch.sin(a)))
    assert not find(pattern, lambda a: (lambda s: torch.tanh(s) + s)(torch.sin(a)))
    assert find(pattern, lambda a: (lambda t: t + t * 2)(torch.tanh(torch.sin(a)))), (
        "outputs may have any number of users"
    )


@pytest.mark.parametrize("mutate", [lambda v: v.add_(1), lambda v: torch.relu_(v), lambda v: F.relu(v, inplace=True)])
def test_a_barrier_between(mutate):
    def fn(a, b):
        s = torch.sin(a)
        mutate(b)
        return torch.tanh(s)

    def outside(a, b):
        mutate(b)
        t = torch.tanh(torch.sin(a))
        mutate(t)
        return t

    pattern = lambda x: torch.tanh(torch.sin(x))  # noqa: E731
    assert not find(pattern, fn)
    assert find(pattern, outside)


def test_slices_and_ellipsis():
    pattern = lambda x, h: torch.cat((-x[..., h:], x[..., :h]), -1)  # noqa: E731
    (m,) = find(pattern, lambda a: torch.cat((-a[..., 4:], a[..., :4]), -1))
    assert m.bound["h"] == 4
    assert not find(pattern, lambda a: torch.cat((-a[..., 4:], a[..., :3]), -1))
    assert not find(pattern, lambda a: torch.cat((-a[..., 4:], a[:, :4]), -1))
    assert not find(pattern, lambda a: torch.cat((-a[..., 4::2], a[..., :4]), -1))


def test_optional_casts():
    pattern = lambda x: torch.tanh(cast(torch.sin(cast(x))))  # noqa: E731
    for fn in (
        lambda a: torch.tanh(torch.sin(a)),
        lambda a: torch.tanh(torch.sin(a.float())),
        lambda a: torch.tanh(torch.sin(a).half()),
        lambda a: torch.tanh(torch.sin(a.double()).to(torch.float32)),
    ):
        (m,) = find(pattern, fn)
        assert names(m) == {"x": "a"}
    assert not find(pattern, lambda a: torch.tanh(torch.sin(a).float().half()))


def test_several_outputs():
    pattern = lambda x, y: (torch.tanh(x + y), x + y)  # noqa: E731
    (m,) = find(lambda x, y: (lambda s: (torch.tanh(s), s))(x + y), lambda a, b: (lambda s: torch.tanh(s) * s)(a + b))
    assert [n.name for n in m.outputs] == ["tanh", "add"]
    assert pattern


def test_lists_of_another_length_are_others():
    """A pattern that joins two has no place for a third, which its op would leave out."""
    two = lambda x, y: torch.cat([x, y], -1)  # noqa: E731
    assert len(find(two, lambda a, b: torch.cat([a, b], -1))) == 1
    assert not find(two, lambda a, b: torch.cat([a, b, a], -1)) and not find(two, lambda a, b: torch.cat([a], -1))
    assert not find(lambda x: x.permute(0, 1), lambda a: a.permute(0, 1, 2))


def test_a_match_has_all_that_its_pattern_has():
    """An output, or a parameter of one, that the first output does not lead to is found in no graph."""
    fn = lambda a, b: torch.sin(a + b) * torch.cos(a + b)  # noqa: E731
    assert not find(lambda x, y: (torch.sin(x + y), torch.cos(x + y)), fn)
    assert not find(lambda x, y, z: torch.sin(x + y), fn) and len(find(lambda x, y: torch.sin(x + y), fn)) == 1


def test_a_rewrite_takes_what_its_pattern_binds():
    with pytest.raises(InvalidRewrite):
        rewrite("bad", to=lambda z: z)(lambda x: torch.sin(x))


@rewrite("sinc", to=lambda x: torch.sin(x) * 0.5 + torch.sin(x) * 0.5)
def same_sine(x):
    return torch.sin(torch.abs(x))


def run(rule, fn, *args):
    """Through Dynamo: new nodes get values and lint."""
    outcome = {}

    class Once(Recorder):
        def __call__(self, gm, inputs):
            places, outcome["refused"] = apply(rule, gm.graph)
            outcome["done"] = len(places)
            gm.graph.lint()
            gm.recompile()
            assert all("example_value" in n.meta for n in gm.graph.nodes if n.op in ("call_function", "call_method"))
            return gm.forward

    torch._dynamo.reset()
    return torch.compile(fn, backend=Once([]))(*args), outcome


def test_apply_replaces_every_match_and_gives_new_nodes_their_values():
    x = torch.rand(3)
    got, outcome = run(same_sine, lambda x: torch.sin(torch.abs(x)) + torch.sin(torch.abs(x * 2)), x)
    assert outcome["done"] == 2
    torch.testing.assert_close(got, torch.sin(x) + torch.sin(2 * x))


def test_a_match_that_reads_another_match():
    x = torch.rand(3)
    got, outcome = run(same_sine, lambda x: torch.sin(torch.abs(torch.sin(torch.abs(x)))), x)
    torch.testing.assert_close(got, torch.sin(torch.sin(x)))
    assert outcome["done"] == 2


def test_refusals_name_the_reason_and_the_line():
    rule = rewrite("never", to=lambda x: x, where=lambda m: "because")(lambda x: torch.sin(torch.abs(x)))
    x = torch.rand(3)
    got, outcome = run(rule, lambda x: torch.sin(torch.abs(x)), x)
    assert outcome["done"] == 0 and "never: because at test_match.py:" in outcome["refused"][0]
    assert torch.equal(got, torch.sin(x))


@pytest.mark.parametrize("fn", [lambda x: torch.sin(x + torch.tanh(x)), lambda x: torch.sin(torch.tanh(x) + x)])
def test_a_match_is_not_refused_where_it_is_rewritten_with_operands_in_the_other_order(fn):
    def where(match):
        return None if match.bound["y"].target is torch.tanh else "no tanh"

    rule = rewrite("ordered", to=lambda x, y: torch.sin(y) * torch.cos(x) + torch.cos(y) * torch.sin(x), where=where)(
        lambda x, y: torch.sin(x + y)
    )
    x = torch.rand(3)
    got, outcome = run(rule, fn, x)
    assert outcome["done"] == 1 and outcome["refused"] == []
    torch.testing.assert_close(got, torch.sin(x + torch.tanh(x)))


def test_overlapping_matches_are_taken_once():
    rule = rewrite("pair", to=lambda x: torch.neg(torch.neg(torch.neg(torch.neg(x)))))(
        lambda x: torch.neg(torch.neg(x))
    )
    x = torch.rand(3)
    got, outcome = run(rule, lambda x: -(-(-x)), x)
    assert torch.equal(got, -x) and outcome["done"] == 1


def test_a_guard_sees_every_binding():
    def where(m):
        return None if isinstance(m.bound["s"], float) else "no constant"

    rule = rewrite("shift", to=lambda x, s: torch.sin(x + s), where=where)(lambda x, s: torch.sin(s + x))
    got, outcome = run(rule, lambda x: torch.sin(x + 2.0), torch.rand(3))
    assert outcome["done"] == 1


def test_a_guard_that_raises():
    rule = rewrite("bad_guard", to=lambda x: x, where=lambda m: m.bound["x"].nonsense)(
        lambda x: torch.sin(torch.abs(x))
    )
    run(rule, lambda x: torch.sin(torch.abs(x)), torch.rand(3))


@pytest.mark.parametrize("to", [lambda x: torch.sin(x).double(), lambda x: torch.sin(x).sum()])
def test_a_replacement_of_another_dtype_or_shape(to):
    rule = rewrite("changes", to=to)(lambda x: torch.sin(torch.abs(x)))
    x = torch.rand(3)
    got, outcome = run(rule, lambda x: torch.sin(torch.abs(x)), x)
    assert got.dtype == x.dtype and got.shape == x.shape
    made = to(x)
    assert f"the replacement is {made.dtype} {tuple(made.shape)}, the original {x.dtype} (3,)" in outcome["refused"][0]


def test_outputs_used_before_all_are_there():
    rule = rewrite("two", to=lambda x, y: (torch.tanh(x + y), x + y))(
        lambda x, y: (lambda s: (torch.tanh(s), s))(x + y)
    )
    a, b = torch.rand(3), torch.rand(3)
    got, outcome = run(rule, lambda a, b: (lambda s: torch.cos(s) * torch.tanh(s))(a + b), a, b)
    torch.testing.assert_close(got, torch.cos(a + b) * torch.tanh(a + b))
    assert outcome["done"] + len(outcome["refused"]) == 1


def changed(x, y, of, place):
    """Two inputs, of which one is changed in place, before the match or behind it."""
    given = {"x": x * 1.0, "y": y * 1.0}
    if place == "before":
        given[of].add_(1.0)
    made = torch.sin(torch.abs(given["x"]))
    if place == "behind":
        given[of].add_(1.0)
    return made + given["y"], given["x"]


@pytest.mark.parametrize(
    "of, place, refused", [("x", "behind", True), ("x", "before", False), ("y", "behind", False), ("y", None, False)]
)
def test_an_input_that_is_changed_afterwards(of, place, refused):
    """What an op saves of it would be another value in the backward."""
    x, y = torch.rand(3), torch.rand(3)
    got, outcome = run(same_sine, lambda x, y: changed(x, y, of, place), x, y)
    torch.testing.assert_close(got, changed(x, y, of, place))
    assert outcome["done"] == (not refused) and ("afterwards" in str(outcome["refused"])) is refused


def test_recognise_counts_anchors_and_names_what_is_left():
    family = recognize("sines", [same_sine], anchors=lambda g: [n for n in g.nodes if n.target is torch.abs])
    recorder = Recorder([family])
    torch._dynamo.reset()
    torch.compile(lambda x: torch.sin(torch.abs(x)) + torch.cos(torch.abs(x)), backend=recorder)(torch.rand(3))
    (tally,) = recorder.seen.contexts[0].tallies
    assert (tally.found, tally.rewritten) == (2, 1)
    (reason,) = tally.refused
    line = "test_match.py:" + str(test_recognise_counts_anchors_and_names_what_is_left.__code__.co_firstlineno + 4)
    assert reason == f"`abs` at {line}: expected sin(abs(...)), found cos(abs(...)) at {line}"


def norm_divided(x, w):
    root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * (x / root)


def norm_of_cubes(x, w):
    cubes = x.pow(3)
    return w * (x * torch.rsqrt(cubes.mean(-1, keepdim=True) + 1e-6))


def norm_of_another(x, w):
    root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * (w * root)


def gated_by_mish(x, u):
    gate = F.mish(x)
    return torch.sin(u) * gate


def gate_of_a_quotient(x, u):
    gate = F.silu(x)
    return gate / u


def gate_read_twice(x, u):
    gate = F.silu(x)
    out = gate * u
    return out, torch.sin(gate)


def gate_interrupted(x, u):
    gate, up = F.silu(x), u * 1.0
    up.add_(1.0)
    return gate * up


def root_alone(x, w):
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def turned_back(x, cos):
    half = torch.cat((-x[..., 4:], x[..., :4]), -1)
    return x * cos - half * (cos + 1)


def turned_wrongly(x, cos):
    half = torch.cat((x[..., 4:], -x[..., :4]), -1)
    return x * cos + half * (cos + 1)


def turned_in_place(x, cos):
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    out, sin = torch.empty_like(x), cos + 1
    out[..., :4] = first * cos - second * sin
    out[..., 4:] = first * sin + second * cos
    return out


def adapter_with_two_factors(x, weight):
    product = F.linear(F.linear(x, weight[:2]), weight[:, :2])
    return F.linear(x, weight) + product * x[0, 0] * 0.5


def adapter_behind_dropout(x, weight):
    down = F.dropout(F.linear(x, weight[:2]), 0.1)
    return F.linear(x, weight) + F.linear(down, weight[:, :2]) * 0.5


NEAR_MISSES = [
    (norm_divided, "rms_norm", "`rsqrt` at {1}: expected mul(x, rsqrt(...)), found div(L_x_, rsqrt(...)) at {2}"),
    (norm_of_cubes, "rms_norm", "`rsqrt` at {2}: expected pow(x, 2), found pow(L_x_, 3) at {1}"),
    (norm_of_another, "rms_norm", "`rsqrt` at {1}: expected L_x_ once more, found L_w_ at {2}"),
    (gated_by_mish, "swiglu", "`mish` at {1}: expected silu(gate), found mish(L_x_) at {1}"),
    (gate_of_a_quotient, "swiglu", "`silu` at {1}: expected mul(silu(...), up), found div(silu(...), L_u_) at {2}"),
    (gate_read_twice, "swiglu", "`silu` at {1}: `sin` uses an inner value too at {3}"),
    (gate_interrupted, "swiglu", "`silu` at {1}: `add_` comes in between at {2}"),
    (root_alone, "rms_norm", "`rsqrt` at {1}: expected mul(x, rsqrt(...)), found the region's result"),
    (turned_back, "rope", "`cat` at {1}: expected add(mul(...), mul(...)), found sub(mul(...), mul(...)) at {2}"),
    (
        turned_wrongly,
        "rope",
        "`cat` at {1}: expected neg(getitem(...)), found getitem(L_x_, (..., slice(4, None, None))) at {1}",
    ),
    (
        turned_in_place,
        "rope",
        "`sub` at {3}: expected cat((sub(...), add(...)), -1), "
        "found setitem(empty_like(...), (..., slice(None, 4, None)), sub(...)) at {3}",
    ),
    (
        adapter_with_two_factors,
        "lora",
        "`linear` at {1}: expected add(linear(...), mul(...)), found mul(mul(...), 0.5) at {2}",
    ),
    (
        adapter_behind_dropout,
        "lora",
        "`linear` at {1}: expected add(linear(...), mul(...)), found dropout(linear(...), 0.1, True) at {1}",
    ),
]


@pytest.mark.parametrize("fn, name, expected", NEAR_MISSES, ids=lambda item: getattr(item, "__name__", ""))
def test_a_near_miss_says_what_was_expected_and_found_and_where(fn, name, expected):
    recorder = Recorder(family(name))
    torch._dynamo.reset()
    shape = {"rms_norm": (8,), "lora": (8, 8)}.get(name, (2, 4) if fn is turned_in_place else (2, 8))
    torch.compile(fn, backend=recorder)(torch.rand(2, 8), torch.rand(*shape))
    lines = [f"test_match.py:{fn.__code__.co_firstlineno + i}" for i in range(5)]
    (tally,) = recorder.seen.contexts[0].tallies
    assert (tally.found, tally.rewritten) == (1, 0) and tally.refused == [expected.format(*lines)]


def test_a_near_miss_is_told_of_the_pattern_that_has_its_operation():
    """Halves and pairs are turned alike but for `cat` and `stack`: what the other layout would have next is no news."""

    def pairs_turned_back(x, cos):
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        return x * cos - turned * cos

    def pairs_turned_wrongly(x, cos):
        turned = torch.stack((x[..., 1::2], -x[..., ::2]), -1).flatten(-2)
        return x * cos + turned * (cos + 1)

    for fn, expected in (
        (pairs_turned_back, "expected add(mul(...), mul(...)), found sub(mul(...), mul(...))"),
        (pairs_turned_wrongly, "expected neg(getitem(...)), found getitem("),
    ):
        recorder = Recorder(family("rope"))
        torch._dynamo.reset()
        torch.compile(fn, backend=recorder)(torch.rand(2, 8), torch.rand(2, 8))
        (reason,) = recorder.seen.refused
        assert reason.startswith("`stack` at test_match.py:") and expected in reason, reason


def test_of_several_near_misses_the_one_that_went_furthest_is_told():
    """Though the pattern that failed at once is the first of its family."""
    made = graph(lambda a, b: torch.sub(F.silu(a) * b, 1))
    (anchor,) = made.find_nodes(op="call_function", target=F.silu)
    patterns = [
        Pattern.trace(pattern) for pattern in (lambda x: torch.sin(F.silu(x)), lambda x, u: torch.tanh(F.silu(x) * u))
    ]
    for order in (patterns, patterns[::-1]):
        (reason,) = near_misses(order, [anchor]).values()
        assert "expected tanh(mul(...)), found sub(mul(...), 1)" in reason


def test_a_near_miss_is_listed_beside_what_a_guard_refused():
    def both(x, u):
        return (F.silu(x) * u[0]) + (F.silu(x * 2) / u)

    recorder = Recorder(family("swiglu"))
    torch._dynamo.reset()
    torch.compile(both, backend=recorder)(torch.rand(2, 8), torch.rand(2, 8))
    guarded, missed = recorder.seen.refused
    assert "gate and up differ in shape" in guarded and "expected mul(silu(...), up), found div(" in missed


def test_what_another_rewrite_takes_was_not_refused():
    """A wide pattern does not fit, a narrow one within it does."""
    wide = rewrite("wide", to=lambda x: torch.sin(x) + 1, where=lambda match: "too wide")(lambda x: torch.sin(x) + 1)
    narrow = rewrite("narrow", to=lambda x: torch.cos(x - torch.pi / 2))(lambda x: torch.sin(x))
    sines = [torch.sin]
    for rewrites, refused in (([wide, narrow], []), ([wide], ["wide: too wide"])):
        recorder = Recorder([recognize("sines", rewrites, lambda g: [n for n in g.nodes if n.target in sines])])
        torch._dynamo.reset()
        torch.compile(lambda x: torch.sin(x) + 1, backend=recorder)(torch.rand(3))
        (tally,) = recorder.seen.contexts[0].tallies
        assert (tally.found, tally.rewritten) == (1, len(rewrites) - 1)
        assert [reason.partition(" at ")[0] for reason in tally.refused] == refused
