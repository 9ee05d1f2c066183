"""Kernels are joined only where nothing else moves, and otherwise stay in the order of their graph."""

import importlib

import pytest
from torch._inductor.scheduler import ForeachKernelSchedulerNode, Scheduler

from tunecompile._torch.generation import kernel_order
from tunecompile._torch.generation.kernel_order import FAR, LARGE, LAUNCHES, SMALL, in_order

reordering = importlib.import_module("torch._inductor.memory")


class Kernel:
    def __init__(self, name, *reads, writes=1, order=0, until=None):
        self.name, self.reads, self.writes = name, reads, writes
        self.min_order, self.max_order = order, order if until is None else until

    def get_write_buffer_sizes(self):
        return self.writes


class Order:
    """A scheduler of kernels in order."""

    def __init__(self, *nodes):
        self.nodes = nodes

    def _get_unmet_dep_nodes(self, node):
        return node.reads


@pytest.fixture
def joined(monkeypatch):
    """Names of the kernels that are joined, of those that torch would join."""
    monkeypatch.setattr(ForeachKernelSchedulerNode, "combinable_nodes", lambda nodes: nodes)

    def groups(group, *nodes):
        large = Kernel("large", writes=LAUNCHES + 1)
        found = kernel_order._groups(lambda scheduler: [group], Order(*nodes, large))
        return [[node.name for node in part] for part in found]

    return groups


def test_kernels_are_joined_whose_operands_are_there(joined):
    source = Kernel("source")
    a, b = Kernel("a", source), Kernel("b", source)
    assert joined([b, a], source, a, Kernel("between"), b) == [["a", "b"]]


def test_kernels_stay_whose_operands_come_later(joined):
    """Joined with the first, the later one would pull what it reads before the kernels between them."""
    a, source = Kernel("a"), Kernel("source", writes=LARGE)
    b, c = Kernel("b", source), Kernel("c", source)
    assert joined([a, b, c], a, source, b, c) == [["a"], ["b", "c"]]


def test_large_results_are_not_joined(joined):
    a, b, c = Kernel("a"), Kernel("b", writes=SMALL + 1), Kernel("c", writes=SMALL)
    assert joined([a, b, c], a, b, c) == [["a", "c"]]


def test_small_graphs_are_joined_as_torch_does():
    """They wait for launches, and a few bytes more are no matter."""
    a, source = Kernel("a"), Kernel("source", writes=LAUNCHES)
    b = Kernel("b", source)
    assert kernel_order._groups(lambda scheduler: [[a, b]], Order(a, source, b)) == [[a, b]]


@pytest.mark.parametrize(
    "apart, one, other, far",
    [
        (FAR + 1, LARGE + 1, LARGE + 1, True),
        (FAR, LARGE + 1, LARGE + 1, False),
        (FAR + 1, LARGE, LARGE + 1, False),
        (FAR + 1, LARGE + 1, LARGE, False),
    ],
)
def test_large_results_far_from_each_other(apart, one, other, far):
    first, second = Kernel("first", writes=one, order=3), Kernel("second", writes=other, order=3 + apart)
    assert kernel_order._are_far(first, second) is far and kernel_order._are_far(second, first) is far


def test_torch_is_as_before(monkeypatch):
    asked = []
    monkeypatch.setattr(reordering, "reorder_for_peak_memory", lambda *_, **given: asked.append(given["methods"]))
    monkeypatch.setattr(Scheduler, "are_long_distant_nodes", lambda *_: False)

    def parts():
        return (
            vars(ForeachKernelSchedulerNode)["group_nodes_for_combo_kernels"].__func__,
            Scheduler.are_long_distant_nodes,
            reordering.reorder_for_peak_memory,
        )

    before = parts()
    with pytest.raises(ValueError), in_order():
        assert not set(before) & set(parts())
        reordering.reorder_for_peak_memory("nodes")
        near = Kernel("near", writes=LARGE + 1), Kernel("too", writes=LARGE + 1, order=1)
        far = near[0], Kernel("far", writes=LARGE + 1, order=FAR + 1)
        assert not Scheduler.are_long_distant_nodes(None, *near) and Scheduler.are_long_distant_nodes(None, *far)
        raise ValueError
    assert parts() == before and asked == [[]]


def test_what_torch_calls_far_stays_far(monkeypatch):
    monkeypatch.setattr(Scheduler, "are_long_distant_nodes", lambda *_: True)
    with in_order():
        assert Scheduler.are_long_distant_nodes(None, Kernel("a"), Kernel("b"))
