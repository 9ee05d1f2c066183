"""Fake results of ops: once for a signature, in any fake mode where sizes are numbers and the op is this package's."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tunecompile.ir.pretend_gpu import as_on_gpu
from tunecompile.ir.shape_rule_cache import (
    ProcessCache,
    are_contiguous,
    contiguous_like,
    first_of,
    remembered,
    signature,
)

OURS = "tunecompile.ops.of_a_test"


@pytest.fixture
def rule(monkeypatch):  # with it, caches of other tests are set aside (tests/conftest.py)
    def transposed(x, scale=1.0):
        transposed.calls += 1
        return x.t().contiguous(), None

    transposed.calls, transposed.__module__ = 0, OURS
    return transposed


def fake(mode, *shape, static=True, **options):
    return mode.from_tensor(torch.empty(shape, **options), static_shapes=static)


def test_numbers_are_remembered_in_any_mode(rule):
    run = remembered(rule)
    for _ in range(2):
        mode = FakeTensorMode()
        with mode:
            (result, nothing), (again, _) = run(x := fake(mode, 3, 5)), run(x)
        assert result.shape == again.shape == (5, 3) and result.fake_mode is mode and nothing is None
        assert result is not again and result.untyped_storage()._cdata != again.untyped_storage()._cdata
    assert rule.calls == 1
    others = [fake(mode, 3, 4), fake(mode, 3, 5, dtype=torch.half), fake(mode, 5, 3).t(), fake(mode, 6, 5)[::2]]
    with mode:
        for count, other in enumerate(others, start=2):
            run(other)
            assert rule.calls == count
        run(x, 1)  # equal to 1.0, and of another type
    assert rule.calls == 6


def test_what_results_depend_on_besides(rule):
    run, mode, before = remembered(rule), FakeTensorMode(), torch.get_default_dtype()
    with mode:
        run(x := fake(mode, 3, 5))
        with as_on_gpu():
            run(x)
        torch.set_default_dtype(torch.float64)
        try:
            run(x)
        finally:
            torch.set_default_dtype(before)
    assert rule.calls == 3


@pytest.mark.parametrize("module, static", [(OURS, False), ("a_package", True)])
def test_symbols_and_foreign_rules_are_remembered_in_their_mode(rule, module, static):
    """A symbol of another mode is another size; and users define their functions again."""
    rule.__module__ = module
    run = remembered(rule)
    for calls in (1, 2):
        mode = FakeTensorMode(shape_env=ShapeEnv())
        x = fake(mode, 3, 5, static=static)
        with mode:
            assert tuple(run(x)[0].shape) == tuple(run(x)[0].shape) == (x.shape[1], x.shape[0])
        assert rule.calls == calls


def test_sizes_are_those_of_the_calls_arguments(rule):
    """A trace knows where an argument's size comes from; an earlier one's may have become a gradient's since."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = fake(mode, 3, 5, static=False)
    with mode:
        run = remembered(rule)
        run(x)
        again = torch.empty(x.shape[0] + 0, x.shape[1] + 0)
        assert rule.calls == 1 and [a.node for a in run(again)[0].shape] == [a.node for a in again.shape[::-1]]
        assert rule.calls == 1

        def doubled(x):
            doubled.calls += 1
            return x.new_empty(2 * x.shape[0])

        doubled.calls, doubled.__module__ = 0, OURS
        assert [remembered(doubled)(x).dim() for _ in range(2)] == [1, 1] and doubled.calls == 2


APART = {
    "a list with a number": lambda x: [x, 3],
    "values and places": lambda x: x.to_sparse(),
    "a part that begins further behind": lambda x: x[1:],
    "a part that begins at a symbol": lambda x: x.as_strided((1,), (1,), storage_offset=x.shape[0] - 3),
    "as many as there are": lambda x: x.nonzero(),
}


@pytest.mark.parametrize("name", APART)
def test_what_sizes_and_strides_do_not_tell_is_computed_each_time(name):
    """And nothing is assumed of a symbol to find that out: compiled code would hold for fewer sizes."""

    def rule(x):
        rule.calls += 1
        return APART[name](x)

    rule.calls = 0
    run, env = remembered(rule), ShapeEnv(allow_dynamic_output_shape_ops=True)
    x = fake(mode := FakeTensorMode(shape_env=env), 3, 5, static="symbol" not in name)
    with mode:
        run(x), run(x)
    assert rule.calls == 2 and not env.guards


def test_a_full_cache_starts_again():
    cache = ProcessCache(limit=2)
    found = []
    for number in range(4):
        cache[number] = number
        found.append({*cache})
    assert found == [{0}, {0, 1}, {2}, {2, 3}]
    ProcessCache.instances.remove(cache)


def test_what_tells_arguments_apart():
    """Symbols by their expressions; of other objects nothing is known."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x, plain = fake(mode, 3, 5, static=False), fake(FakeTensorMode(), 3, 5)
    rows, columns = x.shape
    assert signature((rows, 2)) == signature((rows, 2)) != signature((columns, 2)) is not None
    assert signature([rows + columns]) == signature([rows + columns]) != signature([rows * columns])
    for other in (object(), torch.ones(1), 1j):
        assert signature((plain, other)) is None
    constants = [None, True, 1, 1.0, "word", torch.half, torch.device("cpu"), torch.strided, torch.channels_last]
    assert len({signature([value]) for value in constants}) == len(constants)
    assert len({signature(value) for value in ((1, 2), [1, 2], {"a": 1, "b": 2})}) == 3


def test_what_has_no_signature_is_computed_each_time(rule):
    run = remembered(rule)
    real = run(torch.ones(2, 3))
    assert real[0].tolist() == [[1.0, 1.0]] * 3 and rule.calls == 1
    with (mode := FakeTensorMode()):
        for count in (2, 3):
            run(fake(mode, 3, 5), object())
            assert rule.calls == count


def test_a_shape_rule_that_does_not_know_leaves_it_to_the_op():
    def shapes(x, known):
        return x + 1 if known else None

    rule = first_of(shapes, lambda x, known: x * 10)
    assert (rule(2, True), rule(2, known=False)) == (3, 20) and rule.__name__ == "shapes"
    assert first_of(None, shapes) is shapes


def test_how_gradients_lie_in_memory():
    x = torch.ones(2, 3, dtype=torch.half)
    first, second = contiguous_like(x.t(), x[:1])
    assert (first.shape, first.stride(), second.shape) == ((3, 2), (2, 1), (1, 3)) and first.dtype is torch.half
    assert are_contiguous(x, x[:1]) and not are_contiguous(x, x.t()) and are_contiguous()
