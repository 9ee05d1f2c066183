"""Stored times of other packages' kernels: what is no pair of numbers is measured anew."""

import importlib

import pytest

rivals = importlib.import_module("tunecompile.passes.plan.rivals")


@pytest.mark.parametrize("stored", [None, 1.0, [], [1.0], [1.0, 2.0, 3.0], [1.0, "2"], (1.0, 2.0), [1, 2], {"0": 1.0}])
def test_what_is_no_pair_of_times(stored):
    assert not rivals._sound(stored)


def test_a_pair_of_times():
    assert rivals._sound([1.0, 2.0])
